/** Conditions of a device, the rules of offers on them, and the conditions stated to a coordinator.
 *
 * Spec: docs/spec/wire.md §2.
 */

import type { ExampleSource } from "./examples.ts";
import type { Offer } from "./wire/messages.ts";

const MEBIBYTE = 1 << 20;
const MOST_COLLECTIONS = 64;

/** One reading of a device; null means unknown. `battery` is a fraction. */
export interface Conditions {
  readonly charging: boolean | null;
  readonly idle: boolean | null;
  readonly unmetered: boolean | null;
  readonly battery: number | null;
  readonly freeStorageBytes: number | null;
}

/** A device that knows none of its conditions. */
export const UNKNOWN: Conditions = {
  charging: null,
  idle: null,
  unmetered: null,
  battery: null,
  freeStorageBytes: null,
};

/** The conditions that a coordinator is told. Levels are rounded: exact ones would help to recognise a device. */
export function statedConditions({ charging, idle, unmetered, battery, freeStorageBytes }: Conditions): object {
  return {
    charging,
    idle,
    unmetered,
    battery: battery === null ? null : Math.round(10 * battery) / 10,
    free_storage_mb: freeStorageBytes === null ? null : roundedMb(freeStorageBytes),
  };
}

/** The numbers of examples that a device states, by collection: rounded down, and only of the largest collections. */
export function statedExamples(counts: ReadonlyMap<string, number>): Record<string, number> {
  const named = [...counts].filter(([name]) => name.length > 0 && name.length <= 200);
  const largest = named.sort(([, a], [, b]) => b - a).slice(0, MOST_COLLECTIONS);
  return Object.fromEntries(largest.map(([name, count]) => [name, roundedDown(count)]));
}

/** MiB, rounded down to a power of two. */
export function roundedMb(bytes: number): number {
  return roundedDown(Math.floor(bytes / MEBIBYTE));
}

/** The tasks whose rules all hold, in the order of the offers. A rule on an unknown value does not hold.
 *
 * shows: whether the owner lets a coordinator know of a collection. Any other is treated as missing.
 */
export async function acceptableTasks(
  offers: readonly Offer[],
  examples: ExampleSource,
  now: Conditions,
  shows: (collection: string) => boolean,
): Promise<string[]> {
  const counts = await examples.counts();
  const accepted: string[] = [];
  for (const offer of offers) {
    const shown = shows(offer.collection);
    const held = shown ? (counts.get(offer.collection) ?? 0) : 0;
    const age = offer.max_example_age_s;
    const recent = age === null || !shown ? held : await examples.countRecent(offer.collection, age);
    if (rulesHold(offer, now) && held >= offer.min_examples && recent >= offer.min_recent_examples) {
      accepted.push(offer.task);
    }
  }
  return accepted;
}

function rulesHold(offer: Offer, now: Conditions): boolean {
  const flags = (["charging", "idle", "unmetered"] as const).every((rule) => !offer[rule] || now[rule] === true);
  const battery = offer.min_battery === null || (now.battery !== null && now.battery >= offer.min_battery);
  const least = offer.min_free_storage_bytes;
  return flags && battery && (least === null || (now.freeStorageBytes !== null && now.freeStorageBytes >= least));
}

/** The greatest power of two that is not above a count; 0 for 0. */
function roundedDown(count: number): number {
  return count === 0 ? 0 : 2 ** Math.floor(Math.log2(count));
}
