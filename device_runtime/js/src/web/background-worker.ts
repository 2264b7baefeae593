/** The service worker of a device in a browser: woken while no page is open, it runs one session on its own thread.
 *
 * A service worker can start no other worker and import nothing later, so the engine is bundled with it.
 *
 * @module web/background-worker
 */

import { StateInUse } from "../core/errors.ts";
import { policyOf } from "../core/permission/policy.ts";
import { runIfDue } from "../core/sessions/scheduler.ts";
import { readConditions } from "./conditions.ts";
import { alone, untilPages } from "./pages.ts";
import { webPlatform } from "./platform.ts";
import { IndexedDbStore, keptLabels, keptOwner, openDatabase, type Target } from "./storage.ts";

const WAIT_S = 30;
/** Chromium ends a woken service worker after three minutes. Unfinished work is given up in time before that. */
const LONGEST_MS = 150_000;

interface Woken extends Event {
  readonly tag: string;
  waitUntil(work: Promise<unknown>): void;
}

self.addEventListener("periodicsync", (event) => {
  const { tag } = event as Woken;
  (event as Woken).waitUntil(run(JSON.parse(tag) as Target));
});

async function run(target: Target): Promise<void> {
  const stopping = untilPages(target, LONGEST_MS);
  try {
    await alone(target, () => session(target, stopping));
  } catch (error) {
    if (!(error instanceof StateInUse)) throw error; // a page works
  }
}

async function session(target: Target, stopping: AbortSignal): Promise<void> {
  const database = await openDatabase(target);
  const store = new IndexedDbStore(database);
  const owner = await keptOwner(store);
  if (owner === null || !owner.rules.whileClosed) return;
  const now = await readConditions();
  // A worker cannot read the charger: for its owner's rules it counts as absent, and coordinators are told unknown.
  const platform = await webPlatform(database, owner, () => ({ ...now, charging: false }));
  const conditions = async () => ({ ...(await platform.conditions()), charging: null });
  const { coordinator, population } = target;
  const config = {
    coordinator: new URL(coordinator),
    population,
    policy: policyOf(owner.policy),
    waitS: WAIT_S,
    labels: await keptLabels(store),
    stopping,
  };
  await runIfDue({ ...platform, conditions }, config);
}
