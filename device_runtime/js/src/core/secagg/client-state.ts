/** State that a device keeps after its upload: its peers' shares, its signatures, and what it revealed.
 *
 * Spec: docs/spec/secagg.md §6. The bytes hold secrets of other devices: protect them like a key.
 */

import { type Bytes, concat, littleEndian, u32 } from "../bytes.ts";
import { sha256 } from "../primitives.ts";
import { bitmap, DIGEST_BYTES, KEY_BYTES, M, message, Reader, SHARE_BYTES } from "./encoding.ts";
import { Malformed } from "./errors.ts";
import { PRIME } from "./shamir.ts";

const FORMAT = 1;
const [SEED_SHARE, KEY_SHARE] = [0, 1];

/** The last step that a device took after M6. It only increases. */
export const STAGE = { MASKED: 0, CONFIRMED: 1, REVEALED: 2 } as const;
type Stage = (typeof STAGE)[keyof typeof STAGE];

/** A neighbour that shared its secrets: its id, and a share of each secret; 0 replaces a share that must not leave. */
export interface Peer {
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
  return sha256(concat(bitmap(shared, n), bitmap(alive, n)));
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
      return concat(u32(position), Uint8Array.of(kind), littleEndian(share, SHARE_BYTES));
    });
  return message(M.UNMASK, sid, littleEndian(BigInt(entries.length), 2), ...entries);
}

/** The state as bytes. */
export function encodeState(state: ClientState): Bytes {
  const { n, t, minSum, position, peers } = state;
  const shares = peers.map((peer) =>
    concat(
      u32(peer.position),
      peer.id,
      littleEndian(peer.seedShare, SHARE_BYTES),
      littleEndian(peer.keyShare, SHARE_BYTES),
    ),
  );
  const sets = concat(bitmap(state.shared, n), bitmap(state.alive, n));
  const head = Uint8Array.of(FORMAT, state.stage);
  return concat(head, state.sid, u32(n, t, minSum, position, peers.length), sets, ...shares);
}

/** The inverse of `encodeState`. Throws Malformed. */
export function decodeState(data: Bytes): ClientState {
  const reader = new Reader(data, "the kept state");
  const [format, stage] = reader.take(2);
  if (format !== FORMAT || stage === undefined || stage > STAGE.REVEALED) {
    throw new Malformed("the kept state is damaged, or of another version: the session is lost, and nothing else");
  }
  const sid = reader.take(DIGEST_BYTES);
  const [n, t, minSum, position, count] = Array.from({ length: 5 }, () => reader.integer(4)) as [number, ...number[]];
  const [shared, alive] = [reader.bitmap(n), reader.bitmap(n)];
  const peers = Array.from({ length: count! }, () => ({
    position: reader.integer(4),
    id: reader.take(KEY_BYTES),
    seedShare: reader.wide(SHARE_BYTES),
    keyShare: reader.wide(SHARE_BYTES),
  }));
  reader.close();
  if (peers.some(({ seedShare, keyShare }) => seedShare >= PRIME || keyShare >= PRIME)) {
    throw new Malformed("the kept state holds a share that is too large");
  }
  return { sid, n, t: t!, minSum: minSum!, position: position!, shared, peers, stage: stage as Stage, alive };
}
