/** Noise: Skellam-distributed integers that a device adds to its quantised values. Spec: docs/spec/secagg.md §9. */

import { bitLength } from "../bytes.ts";
import { HeadroomError } from "./errors.ts";

export const MOST_VARIANCE = 2 ** 26;
const RARE_BITS = 40;
const TAIL_BITS = 130;
const [COARSE, FINE] = [63n, 64n];
const GUIDE_SHIFT = 18;

/** The greatest squared L2 norm of a rounded vector of `size` values, in steps, whose own norm is at most `norm` steps. */
export function mostSquare(norm: number, size: number): number {
  const root = Math.sqrt(size);
  const likely = norm * norm + size / 4 + Math.sqrt(2 * RARE_BITS * Math.LN2) * (norm + root / 2);
  return Math.floor(Math.min(likely, (norm + root) * (norm + root)));
}

/** The variance of one device's noise with which that of `honest` devices has the noise multiplier asked for. */
export function shareOf(noiseMultiplier: number, square: number, honest: number): number {
  return Math.ceil((noiseMultiplier * noiseMultiplier * square) / honest);
}

/** A number that noise exceeds at none of `size` values, but with a chance below 2^-40. */
export function bound(variance: number, size: number): number {
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
      throw new HeadroomError(`noise of variance ${variance} cannot be drawn: it must be 1 to ${MOST_VARIANCE}`);
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
