/** A device in React Native, made from the modules that an app provides. Never run on a phone: docs/phones.md.
 *
 * The system runs sessions in the background when it finds it convenient: WorkManager on Android, BGProcessing on iOS. It
 * may stop the app in mid-session. Nothing has to be done then: what a session owes is in the store, and the next one
 * finishes it or gives it up.
 *
 * @module native
 */

import type { Bytes } from "../core/bytes.ts";
import type { RandomSource } from "../core/cryptography.ts";
import type { ExampleSource } from "../core/plans/examples.ts";
import type { Attest, Platform } from "../core/platform.ts";
import type * as provided from "./modules.ts";
import { nativeEngine, phoneConditions } from "./platform.ts";
import { FileBlobs, Folder, Keychain, SealedStore } from "./storage.ts";

export type * from "./modules.ts";
export { appIntegrity } from "./platform.ts";

import type { Outcome } from "../core/kept/sessions.ts";

/** The modules that an app provides. */
export interface PhoneModules {
  readonly ort: provided.NativeOrt;
  readonly ortVersion: string;
  readonly database: provided.Database;
  readonly secureStore: provided.SecureStore;
  readonly battery: provided.BatteryModule;
  readonly network: provided.NetInfo;
  readonly files: provided.FileSystem;
  /** That of expo/fetch, since React Native's own gives no body in pieces. */
  readonly fetch: typeof fetch;
  readonly random: RandomSource;
  readonly examples: ExampleSource;
  /** The phone's own evidence for coordinator and authority, such as `appIntegrity`. */
  readonly attest?: Attest;
  /** Instead of that, a secret. Who has the app can read it. */
  readonly enrolmentSecret?: Bytes;
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
    attest: modules.attest,
    enrolmentSecret: modules.enrolmentSecret,
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

const TASK = "muster-session";
const LEAST_MINUTES = 15;

/** Let the system run sessions. Call it where the app starts, outside of components: the system starts the app for it. */
export function defineSessions(
  { tasks, background }: provided.BackgroundModules,
  session: () => Promise<Outcome>,
): void {
  const { Success, Failed } = background.BackgroundTaskResult;
  tasks.defineTask(TASK, async () => {
    const { outcome } = await session();
    return outcome === "failed" ? Failed : Success;
  });
}

/** Ask for sessions no more often than every so many minutes, 15 at least. The person's consent comes first. */
export async function allowSessions(
  { background }: provided.BackgroundModules,
  minutes = LEAST_MINUTES,
): Promise<void> {
  await background.registerTaskAsync(TASK, { minimumInterval: Math.max(minutes, LEAST_MINUTES) });
}

/** Ask for no more sessions. */
export async function forbidSessions({ tasks, background }: provided.BackgroundModules): Promise<void> {
  if (await tasks.isTaskRegisteredAsync(TASK)) await background.unregisterTaskAsync(TASK);
}
