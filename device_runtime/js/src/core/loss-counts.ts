/** Losses of devices as counts: how many devices have a loss of at least 1, of at least 1.5, of at least 2 …
 *
 * Spec: docs/spec/plan.md §5.5.
 */

import type { Float32, Segment } from "./report.ts";

export const LOSSES = "losses";
const [LEAST_OCTAVE, OCTAVES] = [-8, 32];
/** The losses that are looked for, ascending: 2^k and 1.5 · 2^k. */
const LEVELS = Array.from({ length: 2 * OCTAVES }, (_, place) => {
  return (1 + 0.5 * (place % 2)) * 2 ** (LEAST_OCTAVE + Math.floor(place / 2));
});
/** Values of the segment: the counts before training, and those of training. */
export const LOSSES_SIZE = 2 * LEVELS.length;

/** Whether this is the segment that counts losses. */
export function countsLosses({ name, size, reduction, labels, range }: Segment): boolean {
  const counts = range?.low === 0 && range.high === 1 && range.bits === 1;
  return name === LOSSES && size === LOSSES_SIZE && reduction === "sum" && labels.length === 0 && counts;
}

/** The values of the segment: 1 for every level that a mean loss reaches, and 0.
 *
 * first: the metric sums of the first step of the first pass. training: those of the whole last pass. The first of each
 * is the number of examples, the second the loss.
 */
export function countLosses(first: Float32, training: Float32): Float32 {
  const means = [first, training].map((sums) => Math.fround(sums[1]! / sums[0]!));
  return Float32Array.from(means.flatMap((mean) => LEVELS.map((level) => (mean >= level ? 1 : 0))));
}
