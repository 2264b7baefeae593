/** A device in React Native, made from the modules that an app provides. Never run on a phone: docs/phones.md.
 *
 * @module native
 */

import type { ExampleSource } from "../core/examples.ts";
import type { Platform } from "../core/platform.ts";
import type { RandomSource } from "../core/primitives.ts";
import { phoneConditions } from "./conditions.ts";
import { nativeEngine } from "./engine.ts";
import { FileBlobs, Folder } from "./files.ts";
import type { BatteryModule, Database, FileSystem, NativeOrt, NetInfo, SecureStore } from "./modules.ts";
import { Keychain, SealedStore } from "./store.ts";

export { allowSessions, defineSessions, forbidSessions } from "./background.ts";
export type * from "./modules.ts";

/** The modules that an app provides. */
export interface PhoneModules {
  readonly ort: NativeOrt;
  readonly ortVersion: string;
  readonly database: Database;
  readonly secureStore: SecureStore;
  readonly battery: BatteryModule;
  readonly network: NetInfo;
  readonly files: FileSystem;
  /** That of expo/fetch, since React Native's own gives no body in pieces. */
  readonly fetch: typeof fetch;
  readonly random: RandomSource;
  readonly examples: ExampleSource;
}

/** A phone's platform: `runSession(await phonePlatform(modules), config)`. One session at a time. */
export async function phonePlatform(modules: PhoneModules): Promise<Platform> {
  const { random, files } = modules;
  const keychain = new Keychain(modules.secureStore, random);
  return {
    store: await SealedStore.of(modules.database, keychain, random),
    blobs: new FileBlobs(new Folder(files, "muster-blobs")),
    engine: nativeEngine(modules.ort, modules.ortVersion, new Folder(files, "muster-graphs")),
    examples: modules.examples,
    signingKey: (name) => keychain.signingKey(name),
    conditions: () => phoneConditions(modules.battery, modules.network, files),
    fetch: modules.fetch,
    random,
    now: () => Date.now() / 1000,
    workSeconds: () => performance.now() / 1000,
    sleep: (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds)),
    memoryBytes: null,
  };
}
