/** The states of a session at a device, and what the server's messages must fulfil to lead from one to the next.
 *
 * Spec: docs/spec/secagg.md §6. The state after the upload is kept, and holds secrets of other devices: protect its bytes
 * like a key.
 */

import { type Bytes, concat, equal, fromLittleEndian, littleEndian, u32 } from "../bytes.ts";
import { type PairKey, sha256 } from "../cryptography.ts";
import type { Float32 } from "../plans/report.ts";
import * as encoding from "./encoding.ts";
import * as errors from "./errors.ts";
import type { HeldModel, Invite } from "./invite.ts";
import { derive, openShares, PRIME, verify } from "./keys.ts";
import type { Advertisement, Roster, RosterEntry } from "./roster.ts";

/** The input of a device to a session.
 *
 * vector: float32 (D,). weight: an integer, 0 … w_max. lastRound: the greatest round of the task that the device ever
 * answered for. now: the device's time, in seconds since 1970; 0 if its clock cannot be trusted.
 */
export interface SessionInput extends HeldModel {
  readonly vector: Float32;
  readonly weight: number;
  readonly credential: Bytes;
  readonly lastRound: bigint;
  readonly now: bigint;
}

/** The state between M1 and M2. */
export interface Advertised {
  readonly given: SessionInput;
  readonly invite: Invite;
  readonly maskSecret: Bytes;
  readonly maskKey: PairKey;
  readonly boxKey: PairKey;
  readonly device: Advertisement;
}

/** The state between M3 and M4. Secrets are by the position of a neighbour. */
export interface Shared {
  readonly given: SessionInput;
  readonly invite: Invite;
  readonly roster: Roster;
  readonly sid: Bytes;
  readonly seed: bigint;
  readonly maskSecrets: ReadonlyMap<number, Bytes>;
  readonly boxSecrets: ReadonlyMap<number, Bytes>;
}

/** The state between M5 and M6. delivered: U0. peers: the neighbours in it whose boxes opened, with their shares. */
export interface Opened {
  readonly before: Shared;
  readonly delivered: ReadonlySet<number>;
  readonly peers: readonly Peer[];
  readonly accused: ReadonlySet<number>;
}

const FORMAT = 1;
const [SEED_SHARE, KEY_SHARE] = [0, 1];

/** The last step that a device took after M6. It only increases. */
export const STAGE = { MASKED: 0, CONFIRMED: 1, REVEALED: 2 } as const;
type Stage = (typeof STAGE)[keyof typeof STAGE];

/** A neighbour that shared its secrets: its id, and a share of each secret; 0 replaces a share that must not leave. */
interface Peer {
  readonly position: number;
  readonly id: Bytes;
  readonly seedShare: bigint;
  readonly keyShare: bigint;
}

/** The state that must be durable before M7 leaves, and again before M9 and M11. */
export interface ClientState {
  readonly sid: Bytes;
  readonly n: number;
  readonly t: number;
  readonly minSum: number;
  readonly position: number;
  readonly shared: ReadonlySet<number>;
  readonly peers: readonly Peer[];
  readonly stage: Stage;
  readonly alive: ReadonlySet<number>;
}

/** The digest of the survivors that a device signs in M9, of U1 and U2. */
export function survivorsDigest({ shared, alive, n }: ClientState): Promise<Bytes> {
  return sha256(concat(encoding.bitmap(shared, n), encoding.bitmap(alive, n)));
}

/** The state after revealing one share of every peer. It no longer has the other shares. */
export function reveal(state: ClientState): ClientState {
  const peers = state.peers.map((peer) => ({
    ...peer,
    [state.alive.has(peer.position) ? "keyShare" : "seedShare"]: 0n,
  }));
  return { ...state, stage: STAGE.REVEALED, peers };
}

/** M11: a share of the seed of every peer that survived, and of the mask key of the others. */
export function encodeUnmask({ sid, alive, peers }: ClientState): Bytes {
  const entries = [...peers]
    .sort((a, b) => a.position - b.position)
    .map(({ position, seedShare, keyShare }) => {
      const [kind, share] = alive.has(position) ? [SEED_SHARE, seedShare] : [KEY_SHARE, keyShare];
      return concat(u32(position), Uint8Array.of(kind), littleEndian(share, encoding.SHARE_BYTES));
    });
  return encoding.message(encoding.M.UNMASK, sid, littleEndian(entries.length, 2), ...entries);
}

/** The state as bytes. */
export function encodeState(state: ClientState): Bytes {
  const { n, t, minSum, position, peers } = state;
  const shares = peers.map((peer) =>
    concat(
      u32(peer.position),
      peer.id,
      littleEndian(peer.seedShare, encoding.SHARE_BYTES),
      littleEndian(peer.keyShare, encoding.SHARE_BYTES),
    ),
  );
  const sets = concat(encoding.bitmap(state.shared, n), encoding.bitmap(state.alive, n));
  const head = Uint8Array.of(FORMAT, state.stage);
  return concat(head, state.sid, u32(n, t, minSum, position, peers.length), sets, ...shares);
}

/** The inverse of `encodeState`. Throws Malformed. */
export function decodeState(data: Bytes): ClientState {
  const reader = new encoding.Reader(data, "the kept state");
  const [format, stage] = reader.take(2);
  if (format !== FORMAT || stage === undefined || stage > STAGE.REVEALED) {
    throw new errors.Malformed(
      "the kept state is damaged, or of another version: the session is lost, and nothing else",
    );
  }
  const sid = reader.take(encoding.DIGEST_BYTES);
  const [n, t, minSum, position, count] = Array.from({ length: 5 }, () => reader.integer(4)) as [number, ...number[]];
  const [shared, alive] = [reader.bitmap(n), reader.bitmap(n)];
  const peers = Array.from({ length: count! }, () => ({
    position: reader.integer(4),
    id: reader.take(encoding.KEY_BYTES),
    seedShare: reader.wide(encoding.SHARE_BYTES),
    keyShare: reader.wide(encoding.SHARE_BYTES),
  }));
  reader.close();
  if (peers.some(({ seedShare, keyShare }) => seedShare >= PRIME || keyShare >= PRIME)) {
    throw new errors.Malformed("the kept state holds a share that is too large");
  }
  return { sid, n, t: t!, minSum: minSum!, position: position!, shared, peers, stage: stage as Stage, alive };
}

const BOX_BYTES = 2 * encoding.SHARE_BYTES + 16;

/** The shares in M4, of every neighbour whose box opens; the others are accused. */
export async function openBoxes(state: Shared, data: Bytes): Promise<Opened> {
  const { roster, sid } = state;
  const reader = encoding.openMessage(data, encoding.M.DELIVER, "the delivery", sid);
  const delivered = reader.bitmap(roster.n);
  const near = roster.neighbours.filter((peer) => delivered.has(peer.position));
  const boxes = near.map(() => reader.take(BOX_BYTES));
  reader.close();
  checkShared(state, delivered, near.length);
  const [peers, accused] = [[] as Peer[], new Set<number>()];
  for (const [place, entry] of near.entries()) {
    try {
      peers.push(await openPeer(state, entry, boxes[place]!));
    } catch (error) {
      if (!(error instanceof errors.BadCiphertext)) throw error;
      accused.add(entry.position);
    }
  }
  return { before: state, delivered, peers, accused };
}

/** A neighbour's two shares. Throws BadCiphertext. */
async function openPeer({ roster, sid, boxSecrets }: Shared, entry: RosterEntry, box: Bytes): Promise<Peer> {
  const [sender, receiver] = [entry.position, roster.position];
  const key = await derive(boxSecrets.get(sender)!, sid, "box", sender, receiver);
  const pair = await openShares(key, box, sid, sender, receiver);
  const [seedShare, keyShare] = [pair.slice(0, encoding.SHARE_BYTES), pair.slice(encoding.SHARE_BYTES)].map(
    fromLittleEndian,
  );
  if (seedShare! >= PRIME || keyShare! >= PRIME) {
    throw new errors.BadCiphertext(`the box from position ${sender} holds no shares`);
  }
  return { position: sender, id: entry.device.id, seedShare: seedShare!, keyShare: keyShare! };
}

/** The state to keep after M6: the shares of every neighbour that stays in the session. */
export function included({ before, delivered, peers: opened, accused }: Opened, data: Bytes): ClientState {
  const { roster, invite, sid } = before;
  const { n, t, position } = roster;
  const shared = encoding.readSet(data, encoding.M.INCLUDED, "the included devices", sid, n);
  if (![...shared].every((device) => delivered.has(device))) {
    throw new errors.InconsistentSurvivors("devices are included that never shared");
  }
  if ([...shared].some((device) => accused.has(device))) {
    throw new errors.BadCiphertext("devices are included whose boxes did not open");
  }
  const peers = opened.filter((peer) => shared.has(peer.position));
  checkShared(before, shared, peers.length);
  return { sid, n, t, minSum: invite.minSum, position, shared, peers, stage: STAGE.MASKED, alive: new Set() };
}

function checkShared({ roster, invite }: Shared, shared: ReadonlySet<number>, neighbours: number): void {
  if (!shared.has(roster.position)) {
    throw new errors.SelfMarkedDead(`position ${roster.position} sent its shares, but is listed as gone`);
  }
  if (neighbours < roster.t) {
    throw new errors.TooFewNeighbours(`${neighbours} neighbours are left, and ${roster.t} must be`);
  }
  if (shared.size < invite.minSum) {
    throw new errors.BelowThreshold(`${shared.size} devices shared, and ${invite.minSum} must`);
  }
}

/** Throws a SecaggError unless a sum over the survivors in M8 is allowed. */
export function checkSurvivors(kept: ClientState, alive: ReadonlySet<number>): void {
  if (!alive.has(kept.position)) {
    throw new errors.SelfMarkedDead(`position ${kept.position} sent its vector, but is listed as gone`);
  }
  if (![...alive].every((device) => kept.shared.has(device))) {
    throw new errors.InconsistentSurvivors("devices are said to have survived that never shared");
  }
  const near = kept.peers.filter((peer) => alive.has(peer.position)).length;
  if (alive.size < kept.minSum || near < kept.t) {
    throw new errors.BelowThreshold(
      `${alive.size} devices survived, ${near} of them neighbours; at least ${kept.minSum} and ${kept.t} must`,
    );
  }
}

/** Throws a SecaggError unless enough neighbours signed the survivors in M10, and none signed others. */
export async function checkConfirmations(kept: ClientState, data: Bytes): Promise<void> {
  const reader = encoding.openMessage(data, encoding.M.CONFIRMATIONS, "the confirmations", kept.sid);
  const signed = new Map<number, readonly [digest: Bytes, signature: Bytes]>();
  for (const position of reader.ascending(reader.integer(2))) {
    signed.set(position, [reader.take(encoding.DIGEST_BYTES), reader.take(encoding.SIGNATURE_BYTES)]);
  }
  reader.close();
  if (signed.size < kept.t) {
    throw new errors.BelowThreshold(`${signed.size} neighbours confirmed the survivors, and ${kept.t} must`);
  }
  const shown = await survivorsDigest(kept);
  for (const [position, [digest, signature]] of signed) {
    const peer = kept.peers.find((one) => one.position === position && kept.alive.has(position));
    if (peer === undefined) {
      throw new errors.BadSignature(`position ${position} confirmed, but is no neighbour that survived`);
    }
    await verify(peer.id, signature, "survivors", kept.sid, digest);
    if (!equal(digest, shown)) {
      throw new errors.InconsistentSurvivors(`position ${position} signed another survivor set`);
    }
  }
}
