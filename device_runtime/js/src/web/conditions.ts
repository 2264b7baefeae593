/** Conditions of a browser: what it tells of battery, network and storage, and under which its owner lets it work. */

import { PolicyForbids } from "../core/errors.ts";
import type { Conditions } from "../core/platform.ts";

/** A part of the Battery Status API, which only some browsers have. */
interface Battery {
  readonly charging: boolean;
  readonly level: number;
}

/** A part of the Network Information API, which only some browsers have. */
interface Network {
  readonly saveData?: boolean;
  readonly type?: string;
}

type Told = Navigator & { getBattery?: () => Promise<Battery>; readonly connection?: Network };

/** When the person lets the device work besides: without its charger, where bytes may cost something, unseen. */
export interface OwnRules {
  readonly onBattery: boolean;
  readonly onMetered: boolean;
  readonly whileClosed: boolean;
}

const METERED = ["cellular"];
const UNMETERED = ["ethernet", "wifi"];

/** Read the conditions. Workers are not told of the battery. */
export async function readConditions(): Promise<Conditions> {
  const told = navigator as Told;
  const battery = (await told.getBattery?.().catch(() => null)) ?? null;
  const { quota, usage } = (await told.storage?.estimate().catch(() => null)) ?? {};
  return {
    charging: battery?.charging ?? null,
    idle: null, // a page cannot know what else the person does
    unmetered: unmetered(told.connection),
    battery: battery?.level ?? null,
    freeStorageBytes: quota === undefined || usage === undefined ? null : quota - usage,
  };
}

/** Whether bytes cost nothing; null where the browser does not say. */
export function unmetered(network: Network | undefined): boolean | null {
  if (network?.saveData || METERED.includes(network?.type ?? "")) return false;
  return UNMETERED.includes(network?.type ?? "") ? true : null;
}

/** The conditions, if they are those under which the person lets the device work. Throws PolicyForbids. */
export function allowed(now: Conditions, { onBattery, onMetered }: Omit<OwnRules, "whileClosed">): Conditions {
  if (now.charging === false && !onBattery) {
    throw new PolicyForbids("it takes part only while it charges, by your own setting");
  }
  if (now.unmetered === false && !onMetered) {
    throw new PolicyForbids("it takes part only where bytes cost nothing, by your own setting");
  }
  return now;
}
