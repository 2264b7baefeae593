/** Sharing: the boxes of M4 opened, and the neighbours that M6 leaves. Spec: docs/spec/secagg.md §6. */

import { type Bytes, fromLittleEndian } from "../bytes.ts";
import { type ClientState, type Peer, STAGE } from "./client-state.ts";
import { M, openMessage, readSet, SHARE_BYTES } from "./encoding.ts";
import { BadCiphertext, BelowThreshold, InconsistentSurvivors, SelfMarkedDead, TooFewNeighbours } from "./errors.ts";
import { derive, openShares } from "./keys.ts";
import type { RosterEntry } from "./roster.ts";
import type { Opened, Shared } from "./session.ts";
import { PRIME } from "./shamir.ts";

const BOX_BYTES = 2 * SHARE_BYTES + 16;

/** The shares in M4, of every neighbour whose box opens; the others are accused. */
export async function openBoxes(state: Shared, data: Bytes): Promise<Opened> {
  const { roster, sid } = state;
  const reader = openMessage(data, M.DELIVER, "the delivery", sid);
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
      if (!(error instanceof BadCiphertext)) throw error;
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
  const [seedShare, keyShare] = [pair.slice(0, SHARE_BYTES), pair.slice(SHARE_BYTES)].map(fromLittleEndian);
  if (seedShare! >= PRIME || keyShare! >= PRIME) {
    throw new BadCiphertext(`the box from position ${sender} holds no shares`, [sender]);
  }
  return { position: sender, id: entry.device.id, seedShare: seedShare!, keyShare: keyShare! };
}

/** The state to keep after M6: the shares of every neighbour that stays in the session. */
export function included({ before, delivered, peers: opened, accused }: Opened, data: Bytes): ClientState {
  const { roster, invite, sid } = before;
  const { n, t, position } = roster;
  const shared = readSet(data, M.INCLUDED, "the included devices", sid, n);
  const strangers = [...shared].filter((device) => !delivered.has(device));
  if (strangers.length > 0) {
    throw new InconsistentSurvivors("devices are included that never shared", strangers);
  }
  const refused = [...shared].filter((device) => accused.has(device));
  if (refused.length > 0) {
    throw new BadCiphertext("devices are included whose boxes did not open", refused);
  }
  const peers = opened.filter((peer) => shared.has(peer.position));
  checkShared(before, shared, peers.length);
  return { sid, n, t, minSum: invite.minSum, position, shared, peers, stage: STAGE.MASKED, alive: new Set() };
}

function checkShared({ roster, invite }: Shared, shared: ReadonlySet<number>, neighbours: number): void {
  if (!shared.has(roster.position)) {
    throw new SelfMarkedDead(`position ${roster.position} sent its shares, but is listed as gone`);
  }
  if (neighbours < roster.t) {
    throw new TooFewNeighbours(`${neighbours} neighbours are left, and ${roster.t} must be`);
  }
  if (shared.size < invite.minSum) {
    throw new BelowThreshold(`${shared.size} devices shared, and ${invite.minSum} must`);
  }
}
