/** Random streams, which depend on a key alone: whoever has the key draws the same words. Spec: docs/spec/plan.md §4. */

import { type Bytes, concat, u64 } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";

const ROUNDS = 10;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n] as const;
const WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn] as const;
const BLOCK = 8; // halves of the four words that one counter gives
const PRODUCT = 4; // halves of a product of two words
const RADIX = 2 ** 32;

/** The first `size` words of the stream under a key of two 64-bit words. */
export function philox(key: readonly [bigint, bigint], size: number): BigUint64Array<ArrayBuffer> {
  const words = new BigUint64Array(4 * Math.ceil(size / 4));
  const found = new Uint32Array(words.buffer);
  const keys = roundKeys(key);
  const products = new Uint32Array(2 * PRODUCT);
  for (let start = 0, counter = 1; start < found.length; start += BLOCK, counter++) {
    found[start] = counter;
    found[start + 1] = counter / RADIX;
    for (let round = 0; round < ROUNDS; round++) {
      mix(found, start, keys, 4 * round, products);
    }
  }
  return words.subarray(0, size);
}

/** The halves of both keys of every round: each is the one before plus a constant. */
function roundKeys([left, right]: readonly [bigint, bigint]): Uint32Array {
  const keys = Array.from({ length: ROUNDS }, (_, round) => [
    left + BigInt(round) * WEYL[0],
    right + BigInt(round) * WEYL[1],
  ]);
  return halves(keys.flat());
}

function halves(words: readonly bigint[]): Uint32Array {
  return new Uint32Array(BigUint64Array.from(words).buffer);
}

const FACTORS = halves(MULTIPLIERS);

/** One round, in place, of the block at `start` under the keys at `at`. */
function mix(block: Uint32Array, start: number, keys: Uint32Array, at: number, products: Uint32Array): void {
  multiply(block[start]!, block[start + 1]!, FACTORS[0]!, FACTORS[1]!, products, 0);
  multiply(block[start + 4]!, block[start + 5]!, FACTORS[2]!, FACTORS[3]!, products, PRODUCT);
  block[start] = products[6]! ^ block[start + 2]! ^ keys[at]!;
  block[start + 1] = products[7]! ^ block[start + 3]! ^ keys[at + 1]!;
  block[start + 2] = products[4]!;
  block[start + 3] = products[5]!;
  block[start + 4] = products[2]! ^ block[start + 6]! ^ keys[at + 2]!;
  block[start + 5] = products[3]! ^ block[start + 7]! ^ keys[at + 3]!;
  block[start + 6] = products[0]!;
  block[start + 7] = products[1]!;
}

/** The product of two words by their halves, as four halves from `at` on. */
function multiply(aLow: number, aHigh: number, bLow: number, bHigh: number, product: Uint32Array, at: number): void {
  const low = Math.imul(aLow, bHigh) >>> 0;
  const high = Math.imul(aHigh, bLow) >>> 0;
  const second = upperHalf(aLow, bLow) + low + high;
  const third =
    upperHalf(aLow, bHigh) + upperHalf(aHigh, bLow) + (Math.imul(aHigh, bHigh) >>> 0) + Math.floor(second / RADIX);
  product[at] = Math.imul(aLow, bLow);
  product[at + 1] = second;
  product[at + 2] = third;
  product[at + 3] = upperHalf(aHigh, bHigh) + Math.floor(third / RADIX);
}

/** The upper 32 bits of the product of two integers of 32 bits.
 *
 * A double rounds the product, and what is left without its lower half, by less than 2^11 of 2^32.
 */
function upperHalf(a: number, b: number): number {
  return ((a * b - (Math.imul(a, b) >>> 0)) / RADIX + 0.5) >>> 0;
}

/** The first 64-bit words of the stream that a label and numbers from 0 to below 2^64 name. */
export async function stream(
  label: Bytes,
  numbers: readonly bigint[],
  words: number,
): Promise<BigUint64Array<ArrayBuffer>> {
  const digest = new DataView((await sha256(concat(label, u64(...numbers)))).buffer);
  return philox([digest.getBigUint64(0, true), digest.getBigUint64(8, true)], words);
}
