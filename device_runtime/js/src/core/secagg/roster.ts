/** The roster, M2, as one device sees it: the neighbour graph, Merkle paths, and its neighbours' advertisements.
 *
 * Spec: docs/spec/secagg.md §3, §4, §6.
 */

import { type Bytes, concat, equal, hex, littleEndian, u32 } from "../bytes.ts";
import { keystream, sha256 } from "../cryptography.ts";
import * as encoding from "./encoding.ts";
import * as errors from "./errors.ts";
import { type AggregationPolicy, checkParameters, type GraphParameters, type Invite } from "./invite.ts";
import { NO_CONTEXT, verify } from "./keys.ts";

const DEVICE_BYTES = 16;
const CREDENTIAL_BYTES = DEVICE_BYTES + 8 + encoding.SIGNATURE_BYTES;
const BEACON_BYTES = encoding.SIGNATURE_BYTES;

/** M1. A device's id and its keys for this session, signed, and its credential. */
export interface Advertisement {
  readonly id: Bytes;
  readonly maskKey: Bytes;
  readonly boxKey: Bytes;
  readonly signature: Bytes;
  readonly credential: Bytes;
}

/** A neighbour in M2: its position, its advertisement, and the path of its leaf. */
export interface RosterEntry {
  readonly position: number;
  readonly device: Advertisement;
  readonly path: Bytes;
}

/** M2. A device's view of the roster: its own position, and its neighbours by rank. */
export interface Roster extends GraphParameters {
  readonly root: Bytes;
  readonly beacon: Bytes;
  readonly position: number;
  readonly path: Bytes;
  readonly neighbours: readonly RosterEntry[];
}

/** M1. */
export function encodeAdvertisement(inviteHash: Bytes, device: Advertisement): Bytes {
  return encoding.message(encoding.M.ADVERTISE, inviteHash, leafOf(device), device.signature, device.credential);
}

/** The roster as sent to one device. Throws Malformed. */
export function decodeRoster(data: Bytes, inviteHash: Bytes, nMax: number): Roster {
  const reader = encoding.openMessage(data, encoding.M.ROSTER, "the roster", inviteHash);
  const [n, k, t] = [reader.integer(4), reader.integer(4), reader.integer(4)];
  if (n === 0 || n > nMax || k >= n) {
    throw new errors.Malformed(`a roster of ${n} with ${k} neighbours each does not exist among at most ${nMax}`);
  }
  const [root, beacon, position] = [reader.take(encoding.DIGEST_BYTES), reader.take(BEACON_BYTES), reader.integer(4)];
  const length = encoding.DIGEST_BYTES * depth(n);
  const path = reader.take(length);
  const neighbours = Array.from({ length: k }, () => ({
    position: reader.integer(4),
    device: readAdvertisement(reader),
    path: reader.take(length),
  }));
  reader.close();
  if ([position, ...neighbours.map((entry) => entry.position)].some((place) => place >= n)) {
    throw new errors.Malformed(`the roster names a position that is not below ${n}`);
  }
  return { n, k, t, root, beacon, position, path, neighbours };
}

/** Throws a SecaggError unless the roster holds this device as it is, with the neighbours that it must have.
 *
 * now: the device's time, in seconds since 1970; the credentials of its neighbours must be valid then.
 */
export async function checkRoster(
  policy: AggregationPolicy,
  invite: Invite,
  own: Advertisement,
  roster: Roster,
  now: bigint,
): Promise<void> {
  checkParameters(roster);
  if (roster.n < invite.minSum) {
    throw new errors.BelowThreshold(`the roster has ${roster.n} devices, and a sum must have ${invite.minSum}`);
  }
  if (!equal(await climb(leafOf(own), roster.position, roster.path), roster.root)) {
    throw new errors.SelfMismatch("the roster does not hold this device with the keys that it sent");
  }
  await checkBeacon(policy.authority, invite, roster);
  const expected = await neighboursOf(roster.position, roster, roster.root, roster.beacon);
  if (roster.neighbours.some((peer, rank) => peer.position !== expected[rank])) {
    throw new errors.GraphMismatch("the neighbours are not those that roster and beacon imply");
  }
  for (const { position, device, path } of roster.neighbours) {
    if (!equal(await climb(leafOf(device), position, path), roster.root)) {
      throw new errors.GraphMismatch(`position ${position} is not what the roster holds there`);
    }
  }
  checkDistinct([own, ...roster.neighbours.map((peer) => peer.device)]);
  const until = now > invite.deadline ? now : invite.deadline;
  await Promise.all(roster.neighbours.map((peer) => checkAdvertisement(policy.authority, invite, peer.device, until)));
}

/** Throws BadSignature or ExpiredCredential unless the authority issued the credential to this key, valid until
 * `until`.
 *
 * Returns the device (16 bytes) that the credential names, and when it expires.
 */
export async function checkCredential(authority: Bytes, id: Bytes, credential: Bytes, until: bigint) {
  const reader = new encoding.Reader(credential, "the credential");
  const [device, expires, signature] = [
    reader.take(DEVICE_BYTES),
    reader.wide(8),
    reader.take(encoding.SIGNATURE_BYTES),
  ];
  reader.close();
  await verify(authority, signature, "credential", NO_CONTEXT, concat(id, device, littleEndian(expires, 8)));
  if (expires < until) {
    throw new errors.ExpiredCredential(`a credential ended at ${expires}, and must be good until ${until}`);
  }
  return { device, expires };
}

async function checkBeacon(authority: Bytes, invite: Invite, { n, k, t, root, beacon }: Roster): Promise<void> {
  if (k !== n - 1) {
    await verify(authority, beacon, "beacon", invite.hash, concat(u32(n, k, t), root));
  } else if (beacon.some((byte) => byte !== 0)) {
    throw new errors.GraphMismatch("there is a beacon, and everyone is everyone's neighbour: nothing was to be drawn");
  }
}

async function checkAdvertisement(authority: Bytes, invite: Invite, device: Advertisement, until: bigint) {
  await verify(device.id, device.signature, "advertise", invite.hash, concat(device.maskKey, device.boxKey));
  await checkCredential(authority, device.id, device.credential, until);
}

/** Throws DuplicateKey when an id or a key occurs twice, in any role, or a device takes part twice. */
function checkDistinct(devices: readonly Advertisement[]): void {
  const seen = new Set<string>();
  for (const { id, maskKey, boxKey, credential } of devices) {
    for (const name of [id, maskKey, boxKey, credential.slice(0, DEVICE_BYTES)].map(hex)) {
      if (seen.has(name)) {
        throw new errors.DuplicateKey(`id or key ${name.slice(0, 12)}… occurs twice: one device plays several`);
      }
      seen.add(name);
    }
  }
}

function leafOf({ id, maskKey, boxKey }: Advertisement): Bytes {
  return concat(id, maskKey, boxKey);
}

function readAdvertisement(reader: encoding.Reader): Advertisement {
  return {
    id: reader.take(encoding.KEY_BYTES),
    maskKey: reader.take(encoding.KEY_BYTES),
    boxKey: reader.take(encoding.KEY_BYTES),
    signature: reader.take(encoding.SIGNATURE_BYTES),
    credential: reader.take(CREDENTIAL_BYTES),
  };
}

/** The k neighbours of a position; the one at index x − 1 has rank x. The relation is symmetric. */
async function neighboursOf(
  position: number,
  { n, k }: GraphParameters,
  root: Bytes,
  beacon: Bytes,
): Promise<number[]> {
  const stream = await keystream(await sha256(concat(encoding.tag("graph"), root, beacon)));
  const drawn = new Uint8Array(8 * n);
  await stream.fill(drawn, 0);
  const view = new DataView(drawn.buffer);
  const words = Array.from({ length: n }, (_, place) => view.getBigUint64(8 * place, true));
  const ring = Array.from(words.keys()).sort((a, b) => (words[a]! < words[b]! ? -1 : Number(words[a]! > words[b]!)));
  const place = ring.indexOf(position);
  const near = Array.from({ length: n - 1 }, (_, index) => index + 1).filter(
    (distance) => k === n - 1 || distance <= k / 2 || distance >= n - k / 2,
  );
  return near.map((distance) => ring[(place + distance) % n]!);
}

/** The number of siblings in a path, for n leaves. */
export function depth(n: number): number {
  return n <= 1 ? 0 : 32 - Math.clz32(n - 1);
}

/** The root that follows from a leaf, its position and its path. */
export async function climb(leaf: Bytes, position: number, path: Bytes): Promise<Bytes> {
  let node = await sha256(concat(Uint8Array.of(0), leaf));
  for (let height = 0; height < path.length / 32; height++) {
    const sibling = path.subarray(32 * height, 32 * height + 32);
    const pair = (position >> height) & 1 ? [sibling, node] : [node, sibling];
    node = await sha256(concat(Uint8Array.of(1), ...pair));
  }
  return node;
}
