/** Conditions of a phone, by expo-battery, netinfo and the file system. Anything they do not report is unknown. */

import type { Conditions } from "../core/conditions.ts";
import type { BatteryModule, FileSystem, NetInfo } from "./modules.ts";

// Values of expo-battery's BatteryState.
const [UNKNOWN, CHARGING, FULL] = [0, 2, 3];

/** Read the conditions now. A phone that saves power counts as one that does not charge. */
export async function phoneConditions(
  battery: BatteryModule,
  network: NetInfo,
  files: FileSystem,
): Promise<Conditions> {
  const [{ batteryLevel, batteryState, lowPowerMode }, { details }] = await Promise.all([
    battery.getPowerStateAsync(),
    network.fetch(),
  ]);
  const expensive = (details as { isConnectionExpensive?: boolean } | null)?.isConnectionExpensive;
  return {
    charging: batteryState === UNKNOWN ? null : [CHARGING, FULL].includes(batteryState) && !lowPowerMode,
    idle: null, // no module says what else the person does
    unmetered: expensive === undefined ? null : !expensive,
    battery: batteryLevel < 0 ? null : batteryLevel,
    freeStorageBytes: files.Paths.availableDiskSpace,
  };
}
