/** The engine and the conditions of a phone: onnxruntime-react-native, expo-battery, netinfo and the file system. */

import { type Bytes, fromBase64, hex } from "../core/bytes.ts";
import { sha256 } from "../core/cryptography.ts";
import type { Engine, OnnxRuntime } from "../core/plans/engine.ts";
import type { Attest, Conditions } from "../core/platform.ts";
import type { AppIntegrity, BatteryModule, FileSystem, NativeOrt, NetInfo } from "./modules.ts";
import type { Folder } from "./storage.ts";

/** ONNX Runtime as an app hands it in. version: of onnxruntime-react-native. Graphs are in `folder` while they load. */
export function nativeEngine(ort: NativeOrt, version: string, folder: Folder): Engine {
  async function create(graph: Bytes) {
    const name = `${hex(await sha256(graph))}.onnx`;
    await folder.write(name, graph);
    try {
      return await ort.InferenceSession.create(folder.file(name).uri);
    } finally {
      folder.remove(name);
    }
  }

  class OwnTensor extends ort.Tensor {
    constructor(...[type, data, dims]: ConstructorParameters<OnnxRuntime["Tensor"]>) {
      super(type, data.byteLength === data.buffer.byteLength ? data : data.slice(), dims);
    }
  }

  const runtime = { InferenceSession: { create }, Tensor: OwnTensor } satisfies OnnxRuntime;
  return { ort: runtime, name: `onnxruntime-react-native ${version}` };
}

const KEY = "muster.attestation";

/** Android Key Attestation and App Attest, by @expo/app-integrity. system: React Native's Platform.OS.
 *
 * The module takes challenges as texts: that is the 64 hex digits (docs/spec/wire.md §9).
 */
export function appIntegrity(module: AppIntegrity, system: string): Attest {
  return async (challenge) => {
    if (system === "ios") {
      const statement = await module.attestKeyAsync(await module.generateKeyAsync(), hex(challenge));
      return { kind: "app-attest", statement: fromBase64(statement) };
    }
    await module.generateHardwareAttestedKeyAsync(KEY, hex(challenge));
    return { kind: "android-key", chain: (await module.getAttestationCertificateChainAsync(KEY)).map(fromBase64) };
  };
}

// Values of expo-battery's BatteryState.
const [UNSAID, CHARGING, FULL] = [0, 2, 3];

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
    charging: batteryState === UNSAID ? null : [CHARGING, FULL].includes(batteryState) && !lowPowerMode,
    idle: null, // no module says what else the person does
    unmetered: expensive === undefined ? null : !expensive,
    battery: batteryLevel < 0 ? null : batteryLevel,
    freeStorageBytes: files.Paths.availableDiskSpace,
  };
}
