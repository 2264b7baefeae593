/** Survivors: the checks of the survivor set (M8), and of the neighbours' signatures (M10).
 *
 * Spec: docs/spec/secagg.md §6.
 */

import { type Bytes, equal } from "../bytes.ts";
import { type ClientState, survivorsDigest } from "./client-state.ts";
import { DIGEST_BYTES, M, openMessage, SIGNATURE_BYTES } from "./encoding.ts";
import { BadSignature, BelowThreshold, InconsistentSurvivors, SelfMarkedDead } from "./errors.ts";
import { verify } from "./keys.ts";

/** Throws a SecaggError unless a sum over the survivors in M8 is allowed. */
export function checkSurvivors(kept: ClientState, alive: ReadonlySet<number>): void {
  if (!alive.has(kept.position)) {
    throw new SelfMarkedDead(`position ${kept.position} sent its vector, but is listed as gone`);
  }
  const strangers = [...alive].filter((device) => !kept.shared.has(device));
  if (strangers.length > 0) {
    throw new InconsistentSurvivors("devices are said to have survived that never shared", strangers);
  }
  const near = kept.peers.filter((peer) => alive.has(peer.position)).length;
  if (alive.size < kept.minSum || near < kept.t) {
    throw new BelowThreshold(
      `${alive.size} devices survived, ${near} of them neighbours; at least ${kept.minSum} and ${kept.t} must`,
    );
  }
}

/** Throws a SecaggError unless enough neighbours signed the survivors in M10, and none signed others. */
export async function checkConfirmations(kept: ClientState, data: Bytes): Promise<void> {
  const reader = openMessage(data, M.CONFIRMATIONS, "the confirmations", kept.sid);
  const signed = new Map<number, readonly [digest: Bytes, signature: Bytes]>();
  for (const position of reader.ascending(reader.integer(2))) {
    signed.set(position, [reader.take(DIGEST_BYTES), reader.take(SIGNATURE_BYTES)]);
  }
  reader.close();
  if (signed.size < kept.t) {
    throw new BelowThreshold(`${signed.size} neighbours confirmed the survivors, and ${kept.t} must`);
  }
  const shown = await survivorsDigest(kept);
  for (const [position, [digest, signature]] of signed) {
    const peer = kept.peers.find((one) => one.position === position && kept.alive.has(position));
    if (peer === undefined) {
      throw new BadSignature(`position ${position} confirmed, but is no neighbour that survived`, [position]);
    }
    await verify(peer.id, signature, "survivors", kept.sid, digest);
    if (!equal(digest, shown)) {
      throw new InconsistentSurvivors(`position ${position} signed another survivor set`, [position]);
    }
  }
}
