/** Philox: the counter-based generator Philox4x64 with 10 rounds (Salmon et al. 2011), as raw 64-bit words.
 *
 * The stream is that of NumPy's `Philox(key=key).random_raw`: the counter starts at 1. Spec: docs/spec/plan.md §4.
 */

const ROUNDS = 10;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n] as const;
const WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn] as const;
const LOW = (1n << 64n) - 1n;

/** The first `size` words of the stream under a key of two 64-bit words. */
export function philox(key: readonly [bigint, bigint], size: number): BigUint64Array<ArrayBuffer> {
  const words = new BigUint64Array(4 * Math.ceil(size / 4));
  for (let start = 0, counter = 1n; start < size; start += 4, counter++) {
    words.set(block(counter, key), start);
  }
  return words.subarray(0, size);
}

function block(counter: bigint, key: readonly [bigint, bigint]): bigint[] {
  let [a, b, c, d] = [counter, 0n, 0n, 0n];
  let [left, right] = key;
  for (let round = 0; round < ROUNDS; round++) {
    const first = MULTIPLIERS[0] * a;
    const second = MULTIPLIERS[1] * c;
    [a, b, c, d] = [(second >> 64n) ^ b ^ left, second & LOW, (first >> 64n) ^ d ^ right, first & LOW];
    left = (left + WEYL[0]) & LOW;
    right = (right + WEYL[1]) & LOW;
  }
  return [a, b, c, d];
}
