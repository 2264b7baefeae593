/** A device's report: one float32 vector of named segments. Reports are only ever summed. Spec: docs/spec/plan.md §5.
 *
 * A device keeps its report unweighted until it sends it: the values (V,), which are all segments but the weight, and
 * the weight beside them. The report is weighted once: here before an unencrypted upload, or in packing when it is
 * masked.
 */

import * as v from "valibot";
import { count, finite } from "../bytes.ts";
import { FormatError, NonFiniteReport } from "../errors.ts";
import { codecSchema, codedSize, encode, type RoundKey } from "./codecs.ts";

const WEIGHT = "weight";
/** The most segments of a report: a coordinator goes over all of them for each report that comes. */
const MOST_SEGMENTS = 64;
/** The vector of a broadcast that holds the bound of bounded reports. */
export const CLIP = "clip";
/** Twice the relative error that rounding to float32 may add to a norm. */
const ROUNDING = 2 ** -23;
const MOST_RANGE_BITS = 20;
/** The widths of a range: its steps, too, are then normal numbers in float32. */
const [LEAST_WIDTH, MOST_WIDTH] = [1e-30, 1e30];

const rangeSchema = v.object({ low: finite, high: finite, bits: count });
const segmentSchema = v.object({
  name: v.string(),
  size: count,
  reduction: v.picklist(["mean", "sum"]),
  labels: v.optional(v.array(v.string()), []),
  codecs: v.optional(v.array(codecSchema), []),
  range: v.exactOptional(rangeSchema),
});
export const layoutSchema = v.object({
  segments: v.array(segmentSchema),
  weighting: v.picklist(["examples", "uniform"]),
  bounded: v.optional(v.boolean(), false),
  bits: v.optional(v.literal(0), 0),
});

export type Segment = v.InferOutput<typeof segmentSchema>;
/** The segments of a report, in order. Exactly one of them is the device's weight. */
export type ReportLayout = v.InferOutput<typeof layoutSchema>;
export type Float32 = Float32Array<ArrayBuffer>;

/** Throws FormatError unless segments are few and distinct, one is the weight, and codecs, ranges and a bound fit. */
export function checkLayout(layout: ReportLayout): void {
  if (layout.segments.length > MOST_SEGMENTS) {
    throw new FormatError(`a report has ${layout.segments.length} segments; there may be ${MOST_SEGMENTS}`);
  }
  const names = layout.segments.map((segment) => segment.name);
  const weight = layout.segments.find((segment) => segment.name === WEIGHT);
  if (new Set(names).size !== names.length || weight?.size !== 1 || weight.reduction !== "sum") {
    throw new FormatError(`segments must be distinct and hold one ${WEIGHT}, a single value that is summed: ${names}`);
  }
  for (const { name, size, reduction, codecs } of layout.segments) {
    if (codecs.length > 0 && reduction !== "mean") {
      throw new FormatError(`segment ${name} is a sum of metrics, which no codec may change`);
    }
    codedSize(codecs, size);
  }
  for (const segment of layout.segments) checkRange(layout, segment);
  const sums = layout.segments.filter((segment) => segment.reduction === "sum").length;
  if (layout.bounded && (layout.weighting !== "uniform" || sums !== 1)) {
    throw new FormatError(`a bounded report weighs 1 and has no sums, not ${layout.weighting} weights and ${names}`);
  }
}

function checkRange({ bounded, weighting }: ReportLayout, { name, reduction, codecs, range }: Segment): void {
  if (range === undefined) return;
  const { low, high, bits } = range;
  const width = high - low;
  if (!(low <= 0 && 0 <= high && LEAST_WIDTH <= width && width <= MOST_WIDTH && 1 <= bits && bits <= MOST_RANGE_BITS)) {
    throw new FormatError(`segment ${name} has a range from ${low} to ${high} of ${bits} bits, which cannot be`);
  }
  if (bounded || codecs.length > 0 || name === WEIGHT || (reduction === "mean" && weighting !== "uniform")) {
    throw new FormatError(`segment ${name} has a range: none has the weight, what is clipped, coded or weighted`);
  }
}

/** L, the length of the report vector. */
export function reportSize(layout: ReportLayout): number {
  return layout.segments.reduce((sum, segment) => sum + codedSizeOf(segment), 0);
}

/** Whether segments have codecs. Then only reports that are encoded with the same key add up. */
export function hasCodecs({ segments }: ReportLayout): boolean {
  return segments.some(({ codecs }) => codecs.length > 0);
}

/** The number of values sent for a segment. */
export function codedSizeOf({ codecs, size }: Segment): number {
  return codedSize(codecs, size);
}

/** The outputs of the report graph, by name, encoded by the codecs. */
export async function encodeMeans(layout: ReportLayout, means: ReadonlyMap<string, Float32>, key: RoundKey) {
  const coded = new Map<string, Float32>();
  for (const [index, { name, codecs, size }] of layout.segments.entries()) {
    const values = means.get(name);
    if (values?.length === size) {
      coded.set(name, await encode(codecs, values, key, index));
    }
  }
  return coded;
}

/** The segments of the values (V,), which are kept until the report is weighted: all but the weight. */
export function unweighted(layout: ReportLayout): Segment[] {
  return layout.segments.filter((segment) => segment.name !== WEIGHT);
}

/** The weight of a device with `examples` examples. */
export function weightOf(layout: ReportLayout, examples: number): number {
  return layout.weighting === "examples" ? examples : 1;
}

/** The name of the segment that holds a pass's metric sums. */
export function metricsSegment(pass: string): string {
  return `${pass}.metrics`;
}

/** The unweighted values (V,) of a report from its coded segments by name, each within its segment's range; zeros if
 * bounded and not finite.
 *
 * `clip` is the bound that devices received, if the report is bounded: the whole report is clipped to it in float64.
 * Throws NonFiniteReport when a segment is missing, of another size, or not finite once it has the weight.
 */
export function concatenate(
  layout: ReportLayout,
  parts: ReadonlyMap<string, Float32>,
  weight: number,
  clip = Number.POSITIVE_INFINITY,
): Float32 {
  const values = new Float32Array(reportSize(layout) - 1);
  let start = 0;
  for (const segment of unweighted(layout)) {
    const part = parts.get(segment.name);
    const size = codedSizeOf(segment);
    if (part?.length !== size) {
      throw new NonFiniteReport(`segment ${segment.name} must be float32[${size}]`);
    }
    if (!staysFinite(part, factorOf(segment, weight))) {
      if (layout.bounded) {
        return values.fill(0);
      }
      throw new NonFiniteReport(`segment ${segment.name} holds a non-finite value`);
    }
    values.set(part, start);
    if (segment.range !== undefined) clamp(values.subarray(start, start + size), segment.range);
    start += size;
  }
  return layout.bounded ? held(values, clip) : values;
}

// Loops over all values of a report count places: a callback for each value takes ten times as long.

/** Whether all values are finite once they are multiplied by `factor`. */
function staysFinite(values: Float32, factor: number): boolean {
  for (let place = 0; place < values.length; place++) {
    if (!Number.isFinite(Math.fround(values[place]! * factor))) return false;
  }
  return true;
}

/** Replace values in place by the nearest ones in a range. */
function clamp(values: Float32, { low, high }: { readonly low: number; readonly high: number }): void {
  const [least, most] = [Math.fround(low), Math.fround(high)];
  for (let place = 0; place < values.length; place++) {
    values[place] = Math.min(Math.max(values[place]!, least), most);
  }
}

/** The l2 norm of values, computed in float64. */
export function normOf(values: Float32): number {
  let square = 0;
  for (let place = 0; place < values.length; place++) {
    square += values[place]! * values[place]!;
  }
  return Math.sqrt(square);
}

/** Finite values, scaled down in place to an l2 norm of at most `clip`. */
function held(values: Float32, clip: number): Float32 {
  const norm = normOf(values);
  if (norm > clip) {
    const factor = (clip / norm) * (1 - ROUNDING);
    for (let place = 0; place < values.length; place++) {
      values[place]! *= factor;
    }
  }
  return values;
}

/** The report (L,) for an unencrypted upload: mean segments times the weight, and the weight itself. */
export function weigh(layout: ReportLayout, values: Float32, weight: number): Float32 {
  const report = new Float32Array(reportSize(layout));
  let [from, to] = [0, 0];
  for (const segment of layout.segments) {
    const size = codedSizeOf(segment);
    if (segment.name === WEIGHT) {
      report[to] = weight;
    } else {
      const factor = factorOf(segment, weight);
      for (let place = 0; place < size; place++) {
        report[to + place] = values[from + place]! * factor;
      }
      from += size;
    }
    to += size;
  }
  return report;
}

function factorOf(segment: Segment, weight: number): number {
  return segment.reduction === "mean" ? Math.fround(weight) : 1;
}

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
