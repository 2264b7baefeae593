/** Derivations of a secure round that both ends make alike: hashes, fixed-point numbers, weight.
 *
 * Spec: docs/spec/wire.md §8.
 */

import { type Bytes, concat, fromHex, utf8 } from "./bytes.ts";
import type { Codec } from "./codecs.ts";
import type { BlobRef } from "./plan.ts";
import { sha256 } from "./primitives.ts";
import type { SumBounds } from "./release.ts";
import { codedSizeOf, type ReportLayout, unweighted } from "./report.ts";

// Metric sums are fixed-point numbers with three bits behind the point: counts are exact, and sums reach 65,535.
const [METRIC_BITS, METRIC_STEP] = [20, 0.125];

/** How the values of a segment become fixed-point numbers of `bits` in [low, high]; the rest as in a session's. */
export interface FixedPoint {
  readonly size: number;
  readonly inBits: number;
  readonly low: number;
  readonly high: number;
  readonly norm: number;
  readonly weighted: boolean;
}

/** The fixed-point numbers of every unweighted segment of a report: plan and release leave no choice. */
export function fixedPoints(layout: ReportLayout, bounds: SumBounds): FixedPoint[] {
  const [clip, half] = [bounds.clip_norm, 2 ** (METRIC_BITS - 1)];
  const metric = {
    inBits: METRIC_BITS,
    low: -half * METRIC_STEP,
    high: (half - 1) * METRIC_STEP,
    norm: 0,
    weighted: false,
  };
  const mean = { inBits: bounds.bits, low: -clip, high: clip, norm: clip, weighted: true };
  return unweighted(layout).map((segment) => ({
    size: codedSizeOf(segment),
    ...(segment.reduction === "mean" ? mean : metric),
  }));
}

/** The weight that a device counts with at most: 1 when all count alike. */
export function greatestWeight(layout: ReportLayout, bounds: SumBounds): number {
  return layout.weighting === "examples" ? bounds.max_examples : 1;
}

/** The name of a task in an invitation, 32 bytes. */
export function taskHash(task: string): Promise<Bytes> {
  return sha256(utf8(task));
}

/** The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one. */
export function sessionNumber(round: number, attempt: number): bigint {
  return (BigInt(round) << 32n) | BigInt(attempt);
}

/** The greatest session number of a round: a device that answered it takes part in no other attempt. */
export function lastSessionNumber(round: number): bigint {
  return sessionNumber(round, 0xffffffff);
}

/** The model that masks are bound to, 32 bytes: with another plan or checkpoint they do not cancel out. */
export function modelHash(plan: BlobRef, checkpoint: BlobRef): Promise<Bytes> {
  return sha256(concat(fromHex(plan.sha256), fromHex(checkpoint.sha256)));
}

/** The digest of a report layout, 32 bytes: of compact JSON, with its members in the specification's order. */
export function layoutHash({ segments, weighting, bounded, bits }: ReportLayout): Promise<Bytes> {
  const listed = segments.map(({ name, size, reduction, labels, codecs }) => {
    return { name, size, reduction, labels, codecs: codecs.map(ordered) };
  });
  return sha256(utf8(JSON.stringify({ segments: listed, weighting, bounded, bits })));
}

function ordered(codec: Codec): Codec {
  return codec.codec === "rotation"
    ? { codec: "rotation", block: codec.block }
    : { codec: "subsample", kept: codec.kept };
}
