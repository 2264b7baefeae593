/** Shamir's secret sharing over the prime 2^256 − 189 (CACM 1979), the dealer's end. Spec: docs/spec/secagg.md §6. */

import { fromLittleEndian } from "../bytes.ts";
import type { RandomSource } from "../primitives.ts";

export const PRIME = (1n << 256n) - 189n;

/** A random integer below PRIME. */
export function randomBelowPrime(random: RandomSource): bigint {
  for (;;) {
    const value = fromLittleEndian(random(32));
    if (value < PRIME) {
      return value;
    }
  }
}

/** Shares of a secret below PRIME for ranks 1 … k. Any t of them recover it; fewer reveal nothing. */
export function split(secret: bigint, k: number, t: number, random: RandomSource): bigint[] {
  const polynomial = [secret, ...Array.from({ length: t - 1 }, () => randomBelowPrime(random))];
  return Array.from({ length: k }, (_, index) => evaluate(polynomial, BigInt(index + 1)));
}

function evaluate(polynomial: readonly bigint[], x: bigint): bigint {
  return polynomial.reduceRight((value, coefficient) => (value * x + coefficient) % PRIME, 0n);
}
