/** Derived values of a secure round, the same at both ends: hashes, fixed-point numbers, weight.
 *
 * Spec: docs/spec/wire.md §8.
 */

import { type Bytes, bitLength, concat, fromHex, u64, utf8 } from "./bytes.ts";
import { codecSchema } from "./codecs.ts";
import { checked } from "./json.ts";
import type { BlobRef } from "./plan.ts";
import { sha256 } from "./primitives.ts";
import type { SumBounds } from "./release.ts";
import { codedSizeOf, type Float32, hasCodecs, type ReportLayout, type Segment, unweighted } from "./report.ts";
import type { DemandedSegment } from "./secagg/packing.ts";

/** A sum without a range is sent as two numbers: whole units, and the rest in steps. */
const [METRIC_BITS, METRIC_UNIT, METRIC_STEP] = [20, 16, 2 ** -14];
const CLAMPED_BITS = 10;

/** How the values of a segment become fixed-point numbers of `bits` in [low, high]. */
type FixedPoint = Omit<DemandedSegment, "noise">;

/** The fixed-point formats of all values that a round sums, as `summedValues` has them. Plan and release determine them.
 *
 * With noise, all mean segments are treated as one, whatever their ranges: they are scaled down together, and 0 is one
 * of the steps.
 */
export function fixedPoints(layout: ReportLayout, bounds: SumBounds): FixedPoint[] {
  if (bounds.noise_multiplier > 0) return [noisyFixedPoint(layout, bounds)];
  return unweighted(layout).flatMap((segment) => formats(segment, bounds));
}

/** Those of a segment without noise: two of a sum without a range, which is split, else one. */
function formats(segment: Segment, bounds: SumBounds): FixedPoint[] {
  const { size, range } = segment;
  if (range !== undefined) {
    return [{ size, inBits: range.bits, low: range.low, high: range.high, norm: 0, weighted: false }];
  }
  if (segment.reduction === "mean") {
    const [norm, high] = [bounds.clip_norm, reach(segment, bounds.clip_norm)];
    return [{ size: codedSizeOf(segment), inBits: bounds.bits, low: -high, high, norm, weighted: true }];
  }
  const half = 2 ** (METRIC_BITS - 1);
  return [1, METRIC_STEP].map((step) => {
    return { size, inBits: METRIC_BITS, low: -half * step, high: (half - 1) * step, norm: 0, weighted: false };
  });
}

function noisyFixedPoint(layout: ReportLayout, { bits, clip_norm: clip }: SumBounds): FixedPoint {
  const means = unweighted(layout).filter(({ reduction }) => reduction === "mean");
  const half = 2 ** (bits - 1);
  const step = Math.max(...means.map((segment) => reach(segment, clip))) / (half - 1);
  const size = means.reduce((sum, segment) => sum + codedSizeOf(segment), 0);
  return { size, inBits: bits, low: -half * step, high: (half - 1) * step, norm: clip, weighted: true };
}

/** The greatest absolute value in a mean segment; rotated values exceed it with probability below 2^-10. */
function reach(segment: Segment, clip: number): number {
  const last = segment.codecs.findLast(({ codec }) => codec !== "subsample");
  if (last?.codec !== "rotation") return clip;
  const exponent = (CLAMPED_BITS + 1 + bitLength(codedSizeOf(segment))) * Math.LN2;
  return clip * Math.min(1, Math.sqrt((2 * exponent) / last.block));
}

/** What a round sums of the values of a report: sums without a range in two parts.
 *
 * With noise there are no metrics, as nothing would hide them.
 */
export function summedValues(layout: ReportLayout, bounds: SumBounds, values: Float32): Float32 {
  const noisy = bounds.noise_multiplier > 0;
  const summed = new Float32Array(fixedPoints(layout, bounds).reduce((sum, { size }) => sum + size, 0));
  let [begin, end] = [0, 0];
  for (const segment of unweighted(layout)) {
    const part = values.subarray(begin, begin + codedSizeOf(segment));
    begin += part.length;
    if (segment.reduction === "mean" || (segment.range !== undefined && !noisy)) {
      summed.set(part, end);
      end += part.length;
    } else if (!noisy) {
      const units = part.map((value) => Math.trunc(value / METRIC_UNIT));
      summed.set(units, end);
      summed.set(
        part.map((value, place) => value - METRIC_UNIT * units[place]!),
        end + part.length,
      );
      end += 2 * part.length;
    }
  }
  return summed;
}

/** The greatest weight of a device: 1 when all devices count equally. */
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

/** A hash of the model, 32 bytes, that masks depend on: with another plan or checkpoint they do not cancel out. */
export function modelHash(plan: BlobRef, checkpoint: BlobRef): Promise<Bytes> {
  return sha256(concat(fromHex(plan.sha256), fromHex(checkpoint.sha256)));
}

/** The digest of a report layout, 32 bytes. With codecs it covers the task's seed, which keys them.
 *
 * The layout is compact JSON, with its members in the specification's order, as schemas list them. Ranges are covered
 * as bytes, since languages write the same number in different ways.
 */
export function layoutHash(layout: ReportLayout, seed: bigint): Promise<Bytes> {
  const { segments, weighting, bounded, bits } = layout;
  const key = hasCodecs(layout) ? u64(seed) : new Uint8Array();
  const listed = segments.map(({ name, size, reduction, labels, codecs }) => {
    return { name, size, reduction, labels, codecs: codecs.map((codec) => checked(codecSchema, codec, "codec")) };
  });
  const ranges = segments.map(({ range }, index) => (range === undefined ? new Uint8Array() : packed(range, index)));
  return sha256(concat(utf8(JSON.stringify({ segments: listed, weighting, bounded, bits })), key, ...ranges));
}

/** The range of a segment, with the segment's index. */
function packed({ low, high, bits }: NonNullable<Segment["range"]>, index: number): Bytes {
  const ends = new DataView(new ArrayBuffer(16));
  ends.setFloat64(0, low, true);
  ends.setFloat64(8, high, true);
  return concat(u64(BigInt(index)), new Uint8Array(ends.buffer), Uint8Array.of(bits));
}
