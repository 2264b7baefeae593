/** The invitation to a session, M0, and a device's conditions for accepting one: how strong a session must be.
 *
 * Spec: docs/spec/secagg.md §2, §4, §6.
 */

import { type Bytes, equal } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import { M, openMessage, type Reader, SIGNATURE_BYTES } from "./encoding.ts";
import * as errors from "./errors.ts";
import { NO_CONTEXT, verify } from "./keys.ts";
import { checkHeadroom, type PackedSegment } from "./packing.ts";

const SUITE = 1;
const ACTIVE = 1;

/** M0. The terms of a session: segments to sum, number of devices, round. `hash` is `invite_hash`.
 *
 * `deadline` is in Unix seconds: credentials must be valid until then. `round` counts attempts too, so it is a bigint.
 */
export interface Invite {
  readonly task: Bytes;
  readonly round: bigint;
  readonly deadline: bigint;
  readonly nMax: number;
  readonly minSum: number;
  readonly wMax: number;
  readonly layoutHash: Bytes;
  readonly modelHash: Bytes;
  readonly segments: readonly PackedSegment[];
  readonly hash: Bytes;
}

/** Constants of the device, which no server can change.
 *
 * serverKey, authority: Ed25519 public keys of 32 bytes. minSum: the least number of devices that a sum may have.
 */
export interface AggregationPolicy {
  readonly serverKey: Bytes;
  readonly authority: Bytes;
  readonly minSum: number;
}

/** The hashes of the model and the report layout that a device holds, 32 bytes each. */
export interface HeldModel {
  readonly modelHash: Bytes;
  readonly layoutHash: Bytes;
}

/** The invitation in M0, if this device may accept it. This checks one signature, so call it before other work.
 *
 * lastRound: the greatest round of the task that the device ever answered for. Throws a SecaggError. The mode without
 * signatures, which is for simulations, is never followed.
 */
export async function acceptInvitation(
  policy: AggregationPolicy,
  message: Bytes,
  held: HeldModel,
  lastRound: bigint,
): Promise<Invite> {
  const { mode, invite, signature } = await decodeInvite(message);
  if (mode !== ACTIVE) {
    throw new errors.PolicyViolation("the session has no signatures (mode honest), which is for simulations");
  }
  await verify(policy.serverKey, signature, "invite", NO_CONTEXT, invite.hash);
  if (invite.round <= lastRound) {
    throw new errors.ReplayedRound(`round ${invite.round} is over for this device: it answered for ${lastRound}`);
  }
  checkStrength(policy, invite);
  checkHeadroom(invite.segments, invite.nMax);
  if (!equal(invite.modelHash, held.modelHash) || !equal(invite.layoutHash, held.layoutHash)) {
    throw new errors.ModelMismatch("the invitation is for another model or layout than this device holds");
  }
  return invite;
}

function checkStrength(policy: AggregationPolicy, { nMax, minSum }: Invite): void {
  if (nMax < LEAST_COHORT) {
    throw new errors.PolicyViolation(`a cohort of at most ${nMax} devices is refused: it must have ${LEAST_COHORT}`);
  }
  if (minSum < Math.max(policy.minSum, 1) || minSum > nMax) {
    throw new errors.PolicyViolation(
      `the sum would be over at least ${minSum} of at most ${nMax} devices; this device insists on ${policy.minSum}`,
    );
  }
}

async function decodeInvite(data: Bytes): Promise<{ mode: number; invite: Invite; signature: Bytes }> {
  const reader = openMessage(data, M.INVITE, "the invitation");
  const [suite, mode] = reader.take(2);
  if (suite !== SUITE) {
    throw new errors.UnsupportedSuite(`the invitation asks for suite ${suite}; this end knows ${SUITE}: update it`);
  }
  if (mode === undefined || mode > ACTIVE) {
    throw new errors.Malformed(`mode ${mode} does not exist`);
  }
  const terms = {
    task: reader.take(32),
    round: reader.wide(8),
    deadline: reader.wide(8),
    nMax: reader.integer(4),
    minSum: reader.integer(4),
    wMax: reader.integer(4),
    layoutHash: reader.take(32),
    modelHash: reader.take(32),
  };
  if (terms.wMax === 0) {
    throw new errors.Malformed("a greatest weight of 0 has no meaning");
  }
  const segments = Array.from({ length: reader.integer(2) }, () => readSegment(reader));
  const signature = reader.take(SIGNATURE_BYTES);
  reader.close();
  const hash = await sha256(data.slice(0, data.length - SIGNATURE_BYTES));
  return { mode, invite: { ...terms, segments, hash }, signature };
}

function readSegment(reader: Reader): PackedSegment {
  const size = reader.integer(4);
  const [fieldBits = 0, inBits = 0, weighted = 0] = reader.take(3);
  const [low, high, norm] = [reader.double(), reader.double(), reader.double()];
  const noise = reader.integer(4);
  if (weighted > 1 || fieldBits === 0) {
    throw new errors.Malformed("a segment has a flag or a width that does not exist");
  }
  return { size, fieldBits, inBits, low, high, norm, weighted: weighted === 1, noise };
}

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
    throw new errors.PolicyViolation(
      `a cohort of ${n} devices is refused: it must have ${LEAST_COHORT} to ${LARGEST_COHORT}`,
    );
  }
  const ring = n > COMPLETE_UP_TO && k < n - 1 && k <= MOST_NEIGHBOURS && k % 2 === 0;
  if (t > k || !(k === n - 1 || ring) || !isSecure(n, k, t)) {
    throw new errors.PolicyViolation(`${t} shares among ${k} neighbours are too weak for ${n} devices`);
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
