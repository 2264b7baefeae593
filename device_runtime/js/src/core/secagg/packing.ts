/** Packing: from a float vector to words that can be masked and added, with noise. Spec: docs/spec/secagg.md §5, §9.
 *
 * A word of 64 bits is two numbers of 32 in an array, the lower one first: as little-endian bytes, that is the word.
 */

import { bitLength, letGo } from "../bytes.ts";
import { type Keystream, keystream, type RandomSource } from "../cryptography.ts";
import { type Float32, normOf } from "../plans/report.ts";
import * as errors from "./errors.ts";

export type Words = Uint32Array<ArrayBuffer>;

const [WORD_BITS, MOST_IN_BITS, MOST_FIELD_BITS] = [64, 20, 32];
const [LEAST_RANGE, MOST_RANGE] = [1e-40, 1e40]; // what float32 values span
const POINT = 2 ** 32;
const MANTISSA = 2 ** (MOST_IN_BITS + 32);
const ZERO_TOLERANCE = 1e-6; // of a step, by which 0 may miss one
const SLICE = 1 << 15; // values quantised at a time
const BLOCK = 4; // numbers in a block of a keystream

/** A segment's packing: `size` values in [low, high] that share one encoding.
 *
 * `inBits` of precision travel in fields of `fieldBits`. A `weighted` segment is multiplied by weight / w_max. `norm` is
 * the greatest L2 norm, to which a longer segment is scaled down; 0 is no limit. `noise` is the variance, in squared
 * steps, of the noise that a device adds; 0 is none.
 */
export interface PackedSegment {
  readonly size: number;
  readonly fieldBits: number;
  readonly inBits: number;
  readonly low: number;
  readonly high: number;
  readonly norm: number;
  readonly weighted: boolean;
  readonly noise: number;
}

/** Throws HeadroomError unless every field can hold the sum of nMax values and every range makes sense. */
export function checkHeadroom(segments: readonly PackedSegment[], nMax: number): void {
  segments.forEach((segment, place) => {
    const { inBits, fieldBits, low, high, norm } = segment;
    const widths = 1 <= inBits && inBits <= MOST_IN_BITS && inBits <= fieldBits && fieldBits <= MOST_FIELD_BITS;
    if (!widths || nMax * (2 ** inBits - 1) >= 2 ** fieldBits) {
      throw new errors.HeadroomError(
        `segment ${place}: ${nMax} values of ${inBits} bits do not fit into ${fieldBits} bits`,
      );
    }
    const range = high - low;
    if (!(low <= 0 && 0 <= high && LEAST_RANGE <= range && range <= MOST_RANGE && norm >= 0)) {
      throw new errors.HeadroomError(`segment ${place}: [${low}, ${high}] with norm ${norm} is no range to quantise`);
    }
    if (segment.noise > 0) checkNoise(segment, nMax, place);
  });
}

function checkNoise(segment: PackedSegment, nMax: number, place: number): void {
  const { size, fieldBits, inBits, low, norm, noise } = segment;
  const step = stepOf(segment);
  if (!(norm > 0 && Math.abs(zeroOf(segment) * step + low) < ZERO_TOLERANCE * step)) {
    throw new errors.HeadroomError(`segment ${place}: noise needs a norm, and a range in which 0 is one of the steps`);
  }
  if (noise > MOST_VARIANCE || nMax * (2 ** inBits - 1) + 2 * bound(nMax * noise, size) >= 2 ** fieldBits) {
    throw new errors.HeadroomError(`segment ${place}: noise of variance ${noise} does not fit into ${fieldBits} bits`);
  }
}

/** A segment's packing without the width of its fields, which only sums need. */
export type DemandedSegment = Omit<PackedSegment, "fieldBits">;

/** The noise that reaches the noise multiplier in a sum if at least `honest` devices add theirs. */
export function noiseOf(segment: Omit<DemandedSegment, "noise">, noiseMultiplier: number, honest: number): number {
  const square = mostSquare(segment.norm / stepOf(segment), segment.size);
  return Math.ceil((noiseMultiplier * noiseMultiplier * square) / honest);
}

function stepOf({ low, high, inBits }: Pick<PackedSegment, "low" | "high" | "inBits">): number {
  return (high - low) / (2 ** inBits - 1);
}

/** The quantised value of 0, if 0 is one of the steps. */
function zeroOf(segment: PackedSegment): number {
  return Math.round(-segment.low / stepOf(segment));
}

/** The words of one device, ready to be masked: its weight, the packed segments, the check word. Throws BadInput.
 *
 * Trap: values outside [low, high] are clamped, which adds bias; choose norm and range so that it is rare.
 */
export async function pack(
  segments: readonly PackedSegment[],
  vector: Float32,
  weight: number,
  wMax: number,
  random: RandomSource,
): Promise<Words> {
  if (!(Number.isInteger(weight) && 0 <= weight && weight <= wMax)) {
    throw new errors.BadInput(`the weight must be 0 to ${wMax}, not ${weight}`);
  }
  const size = segments.reduce((sum, segment) => sum + segment.size, 0);
  if (vector.length !== size) {
    throw new errors.BadInput(`the vector must have ${size} values, not ${vector.length}`);
  }
  const uniform = new Uniform(await keystream(random(32)));
  const words = new Uint32Array(2 * (2 + segments.reduce((sum, segment) => sum + wordsOf(segment), 0)));
  words[0] = weight;
  let [begin, at] = [0, 2];
  for (const segment of segments) {
    const values = vector.subarray(begin, begin + segment.size);
    const target = words.subarray(at, at + 2 * wordsOf(segment));
    const factor = factorOf(segment, values, weight / wMax);
    let square = await quantise(segment, values, factor, uniform, target);
    if (segment.noise > 0) {
      while (square > mostSquare(segment.norm / stepOf(segment), segment.size)) {
        target.fill(0);
        square = await quantise(segment, values, factor, uniform, target);
      }
      await addNoise(segment, new Uniform(await keystream(random(32))), target);
    }
    begin += segment.size;
    at += target.length;
  }
  new BigUint64Array(words.buffer)[words.length / 2 - 1] = checkWord(words);
  return words;
}

/** A stream of uniform numbers, read from front to end. */
class Uniform {
  readonly #stream: Keystream;
  #taken = 0;

  constructor(stream: Keystream) {
    this.#stream = stream;
  }

  /** The next numbers, uniform over 32 bits. */
  async take(count: number): Promise<Words> {
    const skip = this.#taken % BLOCK;
    const numbers = new Uint32Array(skip + count);
    await this.#stream.fill(new Uint8Array(numbers.buffer), (this.#taken - skip) / BLOCK);
    this.#taken += count;
    return numbers.subarray(skip);
  }
}

function wordsOf({ size, fieldBits }: PackedSegment): number {
  return Math.ceil(size / Math.floor(WORD_BITS / fieldBits));
}

/** The factor of a segment: clipping to its norm, times `share` if it is weighted. Reports are weighted only here. */
function factorOf(segment: PackedSegment, values: Float32, share: number): number {
  const norm = normOf(values);
  if (!Number.isFinite(norm)) {
    throw new errors.BadInput(
      "the vector holds a value that is not finite: the training diverged, and nothing is sent",
    );
  }
  const scale = 0 < segment.norm && segment.norm < norm ? segment.norm / norm : 1;
  return segment.weighted ? scale * share : scale;
}

/** Quantise and pack: value v goes into word v mod P, at field ⌊v / P⌋. Gives the squared norm in steps from 0. */
async function quantise(segment: PackedSegment, values: Float32, factor: number, uniform: Uniform, target: Words) {
  const scale = POINT / stepOf(segment);
  const rule: Rule = {
    slope: factor * scale,
    offset: MANTISSA - segment.low * scale,
    most: POINT * (2 ** segment.inBits - 1),
    zero: zeroOf(segment),
  };
  let square = 0;
  for (const { start, first, last, shift } of slices(segment)) {
    const drawn = await uniform.take(last - first);
    const words = target.subarray(2 * (first - start));
    square += quantiseSlice(rule, values.subarray(first, last), drawn, words, shift);
    letGo(drawn);
  }
  return square;
}

/** Quantised is x · slope + offset - 2^52, in [0, most], with 32 bits behind the point; `zero` is the 0 of the sums. */
interface Rule {
  readonly slope: number;
  readonly offset: number;
  readonly most: number;
  readonly zero: number;
}

// The loops over values are functions of their own: in an asynchronous one V8 takes three times as long for them.

/** Quantise values into a field of as many words, and give their squared norm in steps from 0.
 *
 * The offset makes a value a double between 2^52 and 2^53, where neighbours differ by one: what is left without it is an
 * integer. Adding the uniform bits to it, and leaving out those behind the point, rounds without bias.
 */
function quantiseSlice(rule: Rule, values: Float32, drawn: Words, words: Words, shift: number): number {
  const { slope, offset, most, zero } = rule;
  let square = 0;
  for (let place = 0; place < values.length; place++) {
    const fixed = values[place]! * slope + offset - MANTISSA;
    const q = Math.floor((Math.min(Math.max(fixed, 0), most) + drawn[place]!) / POINT);
    square += (q - zero) ** 2;
    orInto(words, 2 * place, q, shift);
  }
  return square;
}

/** Add noise to every value: what a field lacks it borrows from the next, modulo 2^64. */
async function addNoise(segment: PackedSegment, uniform: Uniform, target: Words): Promise<void> {
  const table = new Skellam(segment.noise);
  for (const { start, first, last, shift } of slices(segment)) {
    const drawn = await uniform.take(2 * (last - first));
    const words = target.subarray(2 * (first - start));
    for (const place of addNoiseSlice(table, drawn, words, shift)) {
      const number = table.exactly(drawn[2 * place]!, drawn[2 * place + 1]!, await uniform.take(2));
      addInto(words, 2 * place, number, shift);
    }
    letGo(drawn);
  }
}

/** Add noise to a field of words, and give the places of those whose noise only further bits can tell. */
function addNoiseSlice(table: Skellam, drawn: Words, words: Words, shift: number): number[] {
  const left: number[] = [];
  for (let place = 0; 2 * place < drawn.length; place++) {
    const number = table.number(drawn[2 * place]!, drawn[2 * place + 1]!);
    if (number === null) left.push(place);
    else addInto(words, 2 * place, number, shift);
  }
  return left;
}

/** The values of a segment in slices: `first` to `last` are in the words from `first - start` on, at bit `shift`. */
function* slices(segment: PackedSegment) {
  const words = wordsOf(segment);
  for (let plane = 0, start = 0; start < segment.size; plane++, start += words) {
    const [shift, end] = [plane * segment.fieldBits, Math.min(start + words, segment.size)];
    for (let first = start; first < end; first += SLICE) {
      yield { start, first, last: Math.min(first + SLICE, end), shift };
    }
  }
}

/** Set the bits of a number of up to 20 bits in the word at `at`, from bit `shift` on. */
function orInto(words: Words, at: number, bits: number, shift: number): void {
  if (shift >= 32) {
    words[at + 1]! |= bits << (shift - 32);
  } else {
    words[at]! |= bits << shift;
    words[at + 1]! |= shift ? bits >>> (32 - shift) : 0;
  }
}

/** Add a number of up to 31 bits and a sign to the word at `at`, from bit `shift` on, modulo 2^64. */
function addInto(words: Words, at: number, number: number, shift: number): void {
  if (shift >= 32) {
    words[at + 1]! += number << (shift - 32);
  } else {
    const before = words[at]!;
    words[at] = before + (number << shift);
    words[at + 1]! += (number >> (shift ? 32 - shift : 31)) + (words[at]! < before ? 1 : 0);
  }
}

/** Σ (2m + 1) · word m over all words but the last: linear, so it adds up, and no two words have the same factor. */
function checkWord(words: Words): bigint {
  let [total, factor] = [0n, 1n];
  const whole = new BigUint64Array(words.buffer);
  for (let m = 0; m < whole.length - 1; m++) {
    total = BigInt.asUintN(64, total + BigInt.asUintN(64, factor * whole[m]!));
    factor = BigInt.asUintN(64, factor + 2n);
  }
  return total;
}

const MOST_VARIANCE = 2 ** 26;
const RARE_BITS = 40;
const TAIL_BITS = 130;
const [COARSE, FINE] = [63n, 64n];
const GUIDE_SHIFT = 18;

/** The greatest squared L2 norm of a rounded vector of `size` values, in steps, whose own norm is at most `norm` steps. */
function mostSquare(norm: number, size: number): number {
  const root = Math.sqrt(size);
  const likely = norm * norm + size / 4 + Math.sqrt(2 * RARE_BITS * Math.LN2) * (norm + root / 2);
  return Math.floor(Math.min(likely, (norm + root) * (norm + root)));
}

/** A number that noise exceeds at none of `size` values, but with a chance below 2^-40. */
function bound(variance: number, size: number): number {
  const exponent = (RARE_BITS + 1 + bitLength(size)) * Math.LN2;
  return variance === 0 ? 0 : Math.ceil(Math.sqrt(2 * variance * exponent) + exponent / 3);
}

/** The distribution of a device's noise: 2^127 · P[|X| ≤ k] for k = 0, 1, …, and the same times 2^-64. */
export class Skellam {
  readonly #exact: readonly bigint[];
  readonly #coarse: BigUint64Array;
  /** The upper halves of `coarse`, and for each prefix of a half the first of them that may reach it. */
  readonly #upper: Float64Array;
  readonly #guide: Uint32Array;

  /** P[X = k] = e^-v I_k(v): Bessel functions by Miller's recurrence, downwards in integers, from where they vanish. */
  constructor(variance: number) {
    if (variance < 1 || variance > MOST_VARIANCE) {
      throw new errors.HeadroomError(`noise of variance ${variance} cannot be drawn: it must be 1 to ${MOST_VARIANCE}`);
    }
    const exponent = TAIL_BITS * Math.LN2;
    const last = Math.ceil(Math.sqrt(2 * variance * exponent) + exponent / 3);
    let [after, here] = [0n, 1n << 128n];
    const bessel = [here];
    for (let order = last; order > 0; order--) {
      [after, here] = [here, after + (2n * BigInt(order) * here) / BigInt(variance)];
      bessel.push(here);
    }
    bessel.reverse();
    const total = 2n * bessel.reduce((sum, value) => sum + value) - bessel[0]!;
    let below = -bessel[0]!;
    this.#exact = bessel.map((value) => {
      below += 2n * value;
      return (below << (COARSE + FINE)) / total;
    });
    this.#coarse = BigUint64Array.from(this.#exact, (threshold) => threshold >> FINE);
    this.#upper = Float64Array.from(this.#coarse, (threshold) => Number(threshold >> 31n));
    this.#guide = new Uint32Array(2 ** (32 - GUIDE_SHIFT));
    let found = 0;
    for (let prefix = 0; prefix < this.#guide.length; prefix++) {
      while (this.#upper[found]! < prefix * 2 ** GUIDE_SHIFT) found += 1;
      this.#guide[prefix] = found;
    }
  }

  /** The number that 64 uniform bits stand for, given as halves; null where only further bits can tell. */
  number(low: number, high: number): number | null {
    let found = this.#guide[high >>> GUIDE_SHIFT]!;
    while (this.#upper[found]! < high) found += 1;
    if (this.#upper[found] !== high) return signed(found, low);
    const word = joined(low, high) >> 1n;
    found = place(this.#coarse, word);
    return this.#coarse[found - 1] === word ? null : signed(found, low);
  }

  /** The number that 64 uniform bits stand for with 64 further ones, both as halves. */
  exactly(low: number, high: number, more: ArrayLike<number>): number {
    const drawn = ((joined(low, high) >> 1n) << FINE) | joined(more[0]!, more[1]!);
    return signed(place(this.#exact, drawn), low);
  }
}

function joined(low: number, high: number): bigint {
  return (BigInt(high) << 32n) | BigInt(low);
}

function signed(magnitude: number, word: number): number {
  return word & 1 ? -magnitude : magnitude;
}

/** How many thresholds are not above a number. */
function place(thresholds: ArrayLike<bigint>, number: bigint): number {
  let [low, high] = [0, thresholds.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    [low, high] = thresholds[middle]! <= number ? [middle + 1, high] : [low, middle];
  }
  return low;
}
