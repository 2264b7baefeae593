/** The platform of a device in a browser, inside a worker: one page at a time, with the state of the page's origin. */

import type { Conditions } from "../core/conditions.ts";
import type { Platform } from "../core/platform.ts";
import { platformRandom } from "../core/primitives.ts";
import { allowed, type OwnRules } from "./conditions.ts";
import { webEngine } from "./engine.ts";
import { LocalExamples, type Retention } from "./examples.ts";
import { heldSigningKey } from "./keys.ts";
import { CachedBlobs, IndexedDbStore } from "./store.ts";

const GIB = 1 << 30;

/** A platform with the state in a database. conditions: those that the page read last. */
export function webPlatform(
  database: IDBDatabase,
  retention: Retention,
  rules: OwnRules,
  conditions: () => Conditions,
): Platform {
  return {
    store: new IndexedDbStore(database),
    blobs: new CachedBlobs(database),
    examples: new LocalExamples(database, () => retention),
    engine: webEngine,
    signingKey: (name) => heldSigningKey(database, name),
    conditions: async () => allowed(conditions(), rules),
    fetch: (...request) => fetch(...request), // a browser's is bound to its global object
    random: platformRandom,
    now: () => Date.now() / 1000,
    workSeconds: () => performance.now() / 1000,
    sleep: (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds)),
    memoryBytes: memoryBytes(),
  };
}

/** The machine's memory, roughly, where the browser tells it. */
function memoryBytes(): number | null {
  const { deviceMemory } = navigator as Navigator & { readonly deviceMemory?: number };
  return deviceMemory === undefined ? null : deviceMemory * GIB;
}
