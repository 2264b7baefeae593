/** The invitation to a session, M0, and a device's conditions for accepting one.
 *
 * Spec: docs/spec/secagg.md §4, §6.
 */

import { type Bytes, equal } from "../bytes.ts";
import { sha256 } from "../primitives.ts";
import { M, openMessage, type Reader, SIGNATURE_BYTES } from "./encoding.ts";
import { Malformed, ModelMismatch, PolicyViolation, ReplayedRound, UnsupportedSuite } from "./errors.ts";
import { NO_CONTEXT, verify } from "./keys.ts";
import { checkHeadroom, type PackedSegment } from "./packing.ts";
import { LEAST_COHORT } from "./parameters.ts";

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
    throw new PolicyViolation("the session has no signatures (mode honest), which is for simulations");
  }
  await verify(policy.serverKey, signature, "invite", NO_CONTEXT, invite.hash);
  if (invite.round <= lastRound) {
    throw new ReplayedRound(`round ${invite.round} is over for this device: it answered for ${lastRound}`);
  }
  checkStrength(policy, invite);
  checkHeadroom(invite.segments, invite.nMax);
  if (!equal(invite.modelHash, held.modelHash) || !equal(invite.layoutHash, held.layoutHash)) {
    throw new ModelMismatch("the invitation is for another model or layout than this device holds");
  }
  return invite;
}

function checkStrength(policy: AggregationPolicy, { nMax, minSum }: Invite): void {
  if (nMax < LEAST_COHORT) {
    throw new PolicyViolation(`a cohort of at most ${nMax} devices is refused: it must have ${LEAST_COHORT}`);
  }
  if (minSum < Math.max(policy.minSum, 1) || minSum > nMax) {
    throw new PolicyViolation(
      `the sum would be over at least ${minSum} of at most ${nMax} devices; this device insists on ${policy.minSum}`,
    );
  }
}

async function decodeInvite(data: Bytes): Promise<{ mode: number; invite: Invite; signature: Bytes }> {
  const reader = openMessage(data, M.INVITE, "the invitation");
  const [suite, mode] = reader.take(2);
  if (suite !== SUITE) {
    throw new UnsupportedSuite(`the invitation asks for suite ${suite}; this end knows ${SUITE}: update it`);
  }
  if (mode === undefined || mode > ACTIVE) {
    throw new Malformed(`mode ${mode} does not exist`);
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
    throw new Malformed("a greatest weight of 0 has no meaning");
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
    throw new Malformed("a segment has a flag or a width that does not exist");
  }
  return { size, fieldBits, inBits, low, high, norm, weighted: weighted === 1, noise };
}
