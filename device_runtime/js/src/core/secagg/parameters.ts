/** Parameters: the number of neighbours and shares that a cohort needs, as a device checks it.
 *
 * Spec: docs/spec/secagg.md §2.
 *
 * All arithmetic is exact, so that every implementation accepts the same numbers.
 */

import { PolicyViolation } from "./errors.ts";

/** A sum over fewer devices reveals too much about each. */
export const LEAST_COHORT = 8;
const COMPLETE_UP_TO = 64;
const LARGEST_COHORT = 1 << 20;
const MOST_NEIGHBOURS = 1000;
const SECURITY_BITS = 40n;

/** A roster of n devices with k neighbours each, of which t reveal a secret. */
export interface GraphParameters {
  readonly n: number;
  readonly k: number;
  readonly t: number;
}

/** Throws PolicyViolation if a server can collect both secrets of a device with probability above 2^-40. */
export function checkParameters({ n, k, t }: GraphParameters): void {
  if (n < LEAST_COHORT || n > LARGEST_COHORT) {
    throw new PolicyViolation(`a cohort of ${n} devices is refused: it must have ${LEAST_COHORT} to ${LARGEST_COHORT}`);
  }
  const ring = n > COMPLETE_UP_TO && k < n - 1 && k <= MOST_NEIGHBOURS && k % 2 === 0;
  if (t > k || !(k === n - 1 || ring) || !isSecure(n, k, t)) {
    throw new PolicyViolation(`${t} shares among ${k} neighbours are too weak for ${n} devices`);
  }
}

/** The fewest honest devices in a sum of minSum or more, when a roster has up to nMax devices; 0 when all may be corrupt.
 *
 * It assumes that as many devices are corrupt, and survive, as a graph of any size in this range must tolerate.
 */
export function leastHonest(minSum: number, nMax: number): number {
  return Math.max(0, minSum - Math.max(mostCorrupt(nMax), mostCorrupt(Math.min(nMax, COMPLETE_UP_TO))));
}

function mostCorrupt(n: number): number {
  return n <= COMPLETE_UP_TO ? Math.max(2, Math.ceil(n / 5)) : Math.floor(n / 10);
}

function isSecure(n: number, k: number, t: number): boolean {
  // Honest neighbours give one share of either secret, corrupt ones both: 2t shares need 2t − k corrupt ones.
  if (2 * t <= k) {
    return false;
  }
  if (k === n - 1) {
    return 2 * t - k > mostCorrupt(n);
  }
  return isRare(n, k, 2 * t - k);
}

/** Whether the expected number of devices with at least `bad` bad neighbours is below 2^-40.
 *
 * A tenth of the n devices is bad, the k neighbours are drawn from the n − 1 others: a hypergeometric tail.
 */
function isRare(n: number, k: number, bad: number): boolean {
  const c = Math.floor(n / 10);
  let ways = 0n;
  for (let x = bad; x <= Math.min(c, k); x++) {
    ways += choose(c, x) * choose(n - 1 - c, k - x);
  }
  return (BigInt(n) * ways) << SECURITY_BITS < choose(n - 1, k);
}

function choose(n: number, k: number): bigint {
  let ways = k > n ? 0n : 1n;
  for (let i = 0; i < k && ways > 0n; i++) {
    ways = (ways * BigInt(n - i)) / BigInt(i + 1);
  }
  return ways;
}
