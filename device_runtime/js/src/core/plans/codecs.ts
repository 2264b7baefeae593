/** Codecs: linear maps between a report as a graph makes it and as it is sent. Spec: docs/spec/plan.md §5.1.
 *
 * A device only encodes. Operations follow the specification in its order, so the bits equal Python's, except for
 * low-rank factors, whose sums have no specified order.
 */

import * as v from "valibot";
import { count, utf8 } from "../bytes.ts";
import { FormatError } from "../errors.ts";
import { stream } from "./streams.ts";

const rotationSchema = v.object({ codec: v.literal("rotation"), block: count });
const subsampleSchema = v.object({ codec: v.literal("subsample"), kept: count });
const sketchSchema = v.object({ codec: v.literal("count_sketch"), rows: count, columns: count });
const shape = v.tuple([count, count]);
const lowRankSchema = v.object({ codec: v.literal("low_rank"), rank: count, matrices: v.array(shape) });
export const codecSchema = v.variant("codec", [rotationSchema, subsampleSchema, sketchSchema, lowRankSchema]);

export type Codec = v.InferOutput<typeof codecSchema>;
type Rotation = v.InferOutput<typeof rotationSchema>;
type Subsample = v.InferOutput<typeof subsampleSchema>;
type CountSketch = v.InferOutput<typeof sketchSchema>;
type LowRank = v.InferOutput<typeof lowRankSchema>;
const LABEL = utf8("muster.codec.v1");
/** The most codecs of a segment, and rows of a sketch: each goes over all values. */
const [MOST_CODECS, MOST_ROWS] = [8, 16];
type Float32 = Float32Array<ArrayBuffer>;
/** The first words of a codec's random stream. */
type Words = (size: number) => Promise<BigUint64Array<ArrayBuffer>>;

/** The public key of a round's codecs, the same for all its devices. */
export interface RoundKey {
  readonly seed: bigint;
  readonly round: number;
}

/** The number of values sent of `size`. Throws FormatError when a codec does not fit. */
export function codedSize(codecs: readonly Codec[], size: number): number {
  if (codecs.length > MOST_CODECS) {
    throw new FormatError(`${codecs.length} codecs of a segment; there may be ${MOST_CODECS}`);
  }
  return codecs.reduce(codedSizeOf, size);
}

/** The values to send. segment: the index of the values' segment in its layout. */
export async function encode(
  codecs: readonly Codec[],
  values: Float32,
  key: RoundKey,
  segment: number,
): Promise<Float32> {
  let coded = values;
  for (const [place, codec] of codecs.entries()) {
    const numbers = [key.seed, BigInt(key.round), BigInt(segment), BigInt(place)];
    coded = await encodeOne(codec, coded, (size) => stream(LABEL, numbers, size));
  }
  return coded;
}

function encodeOne(codec: Codec, values: Float32, words: Words): Promise<Float32> {
  switch (codec.codec) {
    case "rotation":
      return rotate(codec, values, words);
    case "subsample":
      return subsample(codec, values, words);
    case "count_sketch":
      return sketch(codec, values, words);
    case "low_rank":
      return project(codec, values, words);
  }
}

function codedSizeOf(size: number, codec: Codec): number {
  switch (codec.codec) {
    case "rotation":
      if (!Number.isInteger(Math.log2(codec.block)) || codec.block > Math.max(size, 1)) {
        throw new FormatError(
          `a rotation in blocks of ${codec.block}; ${size} values need a power of two up to ${size}`,
        );
      }
      return size;
    case "subsample":
      return checkedCount(codec.kept, size, "a subsample of");
    case "count_sketch":
      if (codec.rows > MOST_ROWS) throw new FormatError(`a sketch of ${codec.rows} rows; there may be ${MOST_ROWS}`);
      return checkedCount(codec.rows * codec.columns, size, "a sketch with counters:");
    case "low_rank": {
      const found = codec.matrices.reduce((sum, [rows, columns]) => sum + rows * columns, 0);
      if (codec.rank < 1 || found !== size) {
        throw new FormatError(
          `factors of rank ${codec.rank} of matrices with ${found} values; the segment has ${size}`,
        );
      }
      return codec.matrices.reduce((sum, matrix) => sum + sentOf(matrix, codec.rank), 0);
    }
  }
}

function checkedCount(coded: number, size: number, what: string): number {
  if (coded < Math.min(1, size) || coded > size) {
    throw new FormatError(`${what} ${coded}; a segment of ${size} values has at least 1 and at most as many`);
  }
  return coded;
}

/** Rotate every block; the last one ends where the values end. */
async function rotate({ block }: Rotation, values: Float32, draw: Words): Promise<Float32> {
  const rotated = values.slice();
  const blocks = Math.ceil(values.length / block);
  const signs = new Uint32Array((await draw(Math.ceil((blocks * block) / 64))).buffer);
  for (let place = 0; place < blocks; place++) {
    const part = rotated.subarray(Math.min(place * block, values.length - block)).subarray(0, block);
    for (let index = 0; index < block; index++) {
      const bit = place * block + index;
      part[index]! *= (signs[bit >>> 5]! >>> (bit & 31)) & 1 ? -1 : 1;
    }
    transform(part);
  }
  return rotated;
}

/** One value of each of `kept` strata of neighbours. */
async function subsample({ kept }: Subsample, values: Float32, draw: Words): Promise<Float32> {
  const words = await draw(kept);
  const [width, longer] = [Math.floor(values.length / kept), values.length % kept];
  return new Float32Array(kept).map((_, stratum) => {
    const within = Number(words[stratum]! % BigInt(width + Number(stratum < longer)));
    return values[stratum * width + Math.min(stratum, longer) + within]!;
  });
}

/** The Walsh–Hadamard transform of a block in place, divided by the root of its length: its own inverse. */
function transform(block: Float32): void {
  for (let half = 1; half < block.length; half *= 2) {
    for (let begin = 0; begin < block.length; begin += 2 * half) {
      for (let left = begin; left < begin + half; left++) {
        const [a, b] = [block[left]!, block[left + half]!];
        block[left] = a + b;
        block[left + half] = a - b;
      }
    }
  }
  const scale = Math.fround(block.length ** -0.5);
  for (let index = 0; index < block.length; index++) {
    block[index]! *= scale;
  }
}

/** Counters, row by row: the sums, in float64, of the values that each has, under their signs. */
async function sketch({ rows, columns }: CountSketch, values: Float32, draw: Words): Promise<Float32> {
  const counters = new Float64Array(rows * columns);
  const halves = new Uint32Array((await draw(rows * values.length)).buffer);
  for (let row = 0; row < rows; row++) {
    for (let index = 0; index < values.length; index++) {
      const at = 2 * (row * values.length + index);
      const [low, high] = [halves[at]!, halves[at + 1]!];
      const rest = (high & 1) * 2 ** 31 + (low >>> 1); // of the word without its lowest bit, which is the sign
      const column = (((((high >>> 1) % columns) * 2 ** 16) % columns) * 2 ** 16 + rest) % columns;
      counters[row * columns + column]! += low & 1 ? -values[index]! : values[index]!;
    }
  }
  return Float32Array.from(counters);
}

/** The products of matrices with random orthonormal bases along their longer sides, matrix by matrix. */
async function project({ rank, matrices }: LowRank, values: Float32, draw: Words): Promise<Float32> {
  const sides = matrices.map((matrix) => (isWhole(matrix, rank) ? 0 : Math.max(...matrix)));
  const drawn = Float64Array.from(
    new BigInt64Array((await draw(rank * sides.reduce((sum, side) => sum + side, 0))).buffer),
    (word) => Number(word) / 2 ** 63,
  );
  const coded = new Float32Array(matrices.reduce((sum, matrix) => sum + sentOf(matrix, rank), 0));
  let [begin, used, at] = [0, 0, 0];
  for (const [place, matrix] of matrices.entries()) {
    const [size, side, sent] = [matrix[0] * matrix[1], sides[place]!, sentOf(matrix, rank)];
    const part = values.subarray(begin, begin + size);
    const basis = Float32Array.from(orthonormal(drawn.subarray(used, used + rank * side), rank));
    coded.set(side === 0 ? part : product(part, matrix, basis, rank), at);
    [begin, used, at] = [begin + size, used + rank * side, at + sent];
  }
  return coded;
}

function isWhole([rows, columns]: readonly [number, number], rank: number): boolean {
  return Math.min(rows, columns) <= rank;
}

function sentOf(matrix: readonly [number, number], rank: number): number {
  return isWhole(matrix, rank) ? matrix[0] * matrix[1] : rank * Math.min(...matrix);
}

/** The columns (n, rank) of a matrix made orthonormal, first to last, in place: Gram–Schmidt, twice against rounding. */
function orthonormal(matrix: Float64Array, rank: number): Float64Array {
  for (let column = 0; column < rank; column++) {
    for (let other = 0; other < 2 * column; other++) {
      addColumn(matrix, rank, column, other % column, -dot(matrix, rank, column, other % column));
    }
    const norm = Math.sqrt(dot(matrix, rank, column, column));
    for (let at = column; at < matrix.length; at += rank) matrix[at]! /= norm;
  }
  return matrix;
}

function dot(matrix: Float64Array, rank: number, a: number, b: number): number {
  let sum = 0;
  for (let row = 0; row < matrix.length; row += rank) sum += matrix[row + a]! * matrix[row + b]!;
  return sum;
}

function addColumn(matrix: Float64Array, rank: number, to: number, from: number, factor: number): void {
  for (let row = 0; row < matrix.length; row += rank) matrix[row + to]! += factor * matrix[row + from]!;
}

/** M Q, (rows, rank), where rows are at least as long as columns, else Qᵀ M, (rank, columns). */
function product(
  values: Float32,
  [rows, columns]: readonly [number, number],
  basis: Float32,
  rank: number,
): Float64Array {
  const found = new Float64Array(rank * Math.min(rows, columns));
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const value = values[row * columns + column]!;
      for (let factor = 0; factor < rank; factor++) {
        if (columns >= rows) found[row * rank + factor]! += value * basis[column * rank + factor]!;
        else found[factor * columns + column]! += value * basis[row * rank + factor]!;
      }
    }
  }
  return found;
}
