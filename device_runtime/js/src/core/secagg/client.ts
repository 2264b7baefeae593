/** Client: the device's end of a session of SA1, as a state machine. Spec: docs/spec/secagg.md §6.
 *
 *     const client = new Client(identity, policy, { vector, weight, modelHash, layoutHash, credential, lastRound, now })
 *     const reply = await client.receive(message)
 *
 * `receive` takes every message of the server, in the order M0, M2, M4, M6, M8, M10, M12, and gives the message to send
 * next. The host must keep two promises:
 *
 * - `reply.keep`, if there is one, is durable before `reply.message` leaves.
 * - The round is noted, durably, before M1 leaves: `lastRound` of every later session of the task is at least this round.
 *
 * `receive` may throw any SecaggError. The session is then over for this device, and its secrets are dropped.
 */

import { type Bytes, concat, littleEndian, u32 } from "../bytes.ts";
import { type PairKey, pairKey, platformRandom, type RandomSource, type SigningKey, sha256 } from "../cryptography.ts";
import {
  bitmap,
  DIGEST_BYTES,
  KEY_BYTES,
  M,
  message,
  numberOf,
  openMessage,
  readSet,
  SHARE_BYTES,
  SIGNATURE_BYTES,
  tag,
} from "./encoding.ts";
import * as errors from "./errors.ts";
import { type AggregationPolicy, acceptInvitation } from "./invite.ts";
import { agree, derive, randomBelowPrime, scalarOf, sealShares, sign, split, verify } from "./keys.ts";
import { addMasks, type Mask } from "./masking.ts";
import { pack } from "./packing.ts";
import { type Advertisement, checkRoster, decodeRoster, encodeAdvertisement, type Roster } from "./roster.ts";
import {
  type Advertised,
  type ClientState,
  checkConfirmations,
  checkSurvivors,
  decodeState,
  encodeState,
  encodeUnmask,
  included,
  type Opened,
  openBoxes,
  reveal,
  type SessionInput,
  type Shared,
  STAGE,
  survivorsDigest,
} from "./states.ts";

/** The answer to a message: the bytes to send next, the state that must be durable before, and whether it was the last. */
interface Reply {
  readonly message?: Bytes;
  readonly keep?: Bytes;
  readonly done: boolean;
}

/** M12: whether the session came to a sum, and the server's signed account of it. */
export interface SessionResult {
  readonly summed: boolean;
  readonly aggregateHash: Bytes;
  readonly transcriptRoot: Bytes;
}

type State =
  | { readonly due: typeof M.INVITE; readonly is: SessionInput }
  | { readonly due: typeof M.ROSTER; readonly is: Advertised }
  | { readonly due: typeof M.DELIVER; readonly is: Shared }
  | { readonly due: typeof M.INCLUDED; readonly is: Opened }
  | { readonly due: "after M7"; readonly is: ClientState };
type Step = readonly [State | null, Reply];

/** A device in one session. */
export class Client {
  readonly #identity: SigningKey;
  readonly #policy: AggregationPolicy;
  readonly #random: RandomSource;
  #state: State | null;
  #result: SessionResult | null = null;

  /** `begin` is the device's input at the start of a session; to continue a session use `restore`. */
  constructor(
    identity: SigningKey,
    policy: AggregationPolicy,
    begin: SessionInput | ClientState,
    random = platformRandom,
  ) {
    this.#identity = identity;
    this.#policy = policy;
    this.#random = random;
    this.#state = "stage" in begin ? { due: "after M7", is: begin } : { due: M.INVITE, is: begin };
  }

  /** The client of a restarted device, from the last `Reply.keep`. Throws Malformed. */
  static restore(identity: SigningKey, policy: AggregationPolicy, keep: Bytes): Client {
    return new Client(identity, policy, decodeState(keep));
  }

  /** The server's signed result of the session. Throws OutOfOrder before M12 was received. */
  get result(): SessionResult {
    if (this.#result === null) {
      throw new errors.OutOfOrder("the session has no result: M12 has not come");
    }
    return this.#result;
  }

  /** Handle a message of the server. Any SecaggError ends the session and drops its secrets. */
  async receive(data: Bytes): Promise<Reply> {
    const state = this.#state;
    this.#state = null; // so that an error leaves nothing
    const [after, reply] = await this.#step(state, data);
    this.#state = after;
    return reply;
  }

  #step(state: State | null, data: Bytes): Promise<Step> {
    if (state === null) {
      throw new errors.OutOfOrder("the session is over: this device answers nothing more");
    }
    const number = numberOf(data);
    if (state.due === M.INVITE && number === M.INVITE) return this.#advertise(state.is, data);
    if (state.due === M.ROSTER && number === M.ROSTER) return this.#share(state.is, data);
    if (state.due === M.DELIVER && number === M.DELIVER) return complain(state.is, data);
    if (state.due === M.INCLUDED && number === M.INCLUDED) return this.#mask(state.is, data);
    if (state.due === "after M7") {
      if (number === M.SURVIVORS) return this.#confirm(state.is, data);
      if (number === M.CONFIRMATIONS) return this.#checkAndReveal(state.is, data);
      if (number === M.RESULT) return this.#finish(state.is, data);
    }
    throw new errors.OutOfOrder(`M${number} is not due: a device answers in order, and once`);
  }

  /** M0 to M1. */
  async #advertise(given: SessionInput, data: Bytes): Promise<Step> {
    const invite = await acceptInvitation(this.#policy, data, given, given.lastRound);
    const maskSecret = this.#random(KEY_BYTES);
    const [maskKey, boxKey] = [await pairKey(maskSecret), await pairKey(this.#random(KEY_BYTES))];
    const device = {
      id: this.#identity.public,
      maskKey: maskKey.public,
      boxKey: boxKey.public,
      signature: await sign(this.#identity, "advertise", invite.hash, concat(maskKey.public, boxKey.public)),
      credential: given.credential,
    };
    const is = { given, invite, maskSecret, maskKey, boxKey, device };
    return [
      { due: M.ROSTER, is },
      { message: encodeAdvertisement(invite.hash, device), done: false },
    ];
  }

  /** M2 to M3. */
  async #share({ given, invite, maskSecret, maskKey, boxKey, device }: Advertised, data: Bytes): Promise<Step> {
    const roster = decodeRoster(data, invite.hash, invite.nMax);
    await checkRoster(this.#policy, invite, device, roster, given.now);
    const { n, k, t, root, beacon, position } = roster;
    const sid = await sha256(concat(tag("sid"), invite.hash, u32(n, k, t), root, beacon));
    const maskSecrets = await secretsWith(maskKey, roster, (peer) => peer.maskKey);
    const boxSecrets = await secretsWith(boxKey, roster, (peer) => peer.boxKey);
    const seed = randomBelowPrime(this.#random);
    const seedShares = split(seed, k, t, this.#random);
    const keyShares = split(scalarOf(maskSecret), k, t, this.#random);
    const boxes: Bytes[] = [];
    for (const [rank, peer] of roster.neighbours.entries()) {
      const key = await derive(boxSecrets.get(peer.position)!, sid, "box", position, peer.position);
      const shares = concat(...[seedShares, keyShares].map((one) => littleEndian(one[rank]!, SHARE_BYTES)));
      boxes.push(await sealShares(key, shares, sid, position, peer.position));
    }
    const commitment = await sha256(concat(tag("commit"), sid, u32(position), littleEndian(seed, KEY_BYTES)));
    const is = { given, invite, roster, sid, seed, maskSecrets, boxSecrets };
    return [
      { due: M.DELIVER, is },
      { message: message(M.SHARES, sid, commitment, ...boxes), done: false },
    ];
  }

  /** M6 to M7. Afterwards the device no longer has its own secrets. */
  async #mask(opened: Opened, data: Bytes): Promise<Step> {
    const { given, invite, sid, roster, seed, maskSecrets } = opened.before;
    const kept = included(opened, data);
    const words = await pack(invite.segments, given.vector, given.weight, invite.wMax, this.#random);
    const own = roster.position;
    const masks: Mask[] = [{ key: await derive(littleEndian(seed, KEY_BYTES), sid, "self", own), sign: 1 }];
    for (const { position } of kept.peers) {
      const [low, high] = [Math.min(own, position), Math.max(own, position)];
      const key = await derive(maskSecrets.get(position)!, sid, "mask", low, high);
      masks.push({ key, sign: own < position ? 1 : -1 });
    }
    await addMasks(words, masks);
    const bytes = new Uint8Array(words.buffer);
    const signature = await sign(this.#identity, "masked", sid, await sha256(bytes));
    return [
      { due: "after M7", is: kept },
      { message: message(M.MASKED, sid, bytes, signature), ...keeping(kept) },
    ];
  }

  /** M8 to M9. The same M8 again gets the same answer, another M8 gets none. */
  async #confirm(kept: ClientState, data: Bytes): Promise<Step> {
    const alive = readSet(data, M.SURVIVORS, "the survivor set", kept.sid, kept.n);
    if (kept.stage !== STAGE.MASKED && !sameSet(alive, kept.alive)) {
      throw kept.stage === STAGE.REVEALED
        ? new errors.AlreadyRevealed("this device revealed its shares for another survivor set, and reveals no others")
        : new errors.InconsistentSurvivors("this device was shown another survivor set before, and signs one", [
            kept.position,
          ]);
    }
    checkSurvivors(kept, alive);
    const settled = kept.stage === STAGE.MASKED ? { ...kept, stage: STAGE.CONFIRMED, alive } : kept;
    const signature = await sign(this.#identity, "survivors", settled.sid, await survivorsDigest(settled));
    const reply = { message: message(M.CONFIRM, settled.sid, signature), ...keeping(settled) };
    return [{ due: "after M7", is: settled }, reply];
  }

  /** M10 to M11: one share of every neighbour. */
  async #checkAndReveal(kept: ClientState, data: Bytes): Promise<Step> {
    if (kept.stage === STAGE.MASKED) {
      throw new errors.OutOfOrder("confirmations came before survivors were settled");
    }
    await checkConfirmations(kept, data);
    const revealed = reveal(kept);
    return [
      { due: "after M7", is: revealed },
      { message: encodeUnmask(revealed), ...keeping(revealed) },
    ];
  }

  /** M12. The client drops its state, and the host can delete the kept one. */
  async #finish(kept: ClientState, data: Bytes): Promise<Step> {
    const reader = openMessage(data, M.RESULT, "the result", kept.sid);
    const [status, aggregateHash, transcriptRoot, signature] = [
      reader.take(1),
      reader.take(DIGEST_BYTES),
      reader.take(DIGEST_BYTES),
      reader.take(SIGNATURE_BYTES),
    ];
    reader.close();
    if (status[0]! > 1) {
      throw new errors.Malformed(`status ${status[0]} does not exist`);
    }
    await verify(this.#policy.serverKey, signature, "result", kept.sid, concat(status, aggregateHash, transcriptRoot));
    this.#result = { summed: status[0] === 0, aggregateHash, transcriptRoot };
    return [null, { done: true }];
  }
}

/** M4 to M5: the shares of every neighbour whose box opens, and complaints about the others. */
async function complain(shared: Shared, data: Bytes): Promise<Step> {
  const opened = await openBoxes(shared, data);
  const complaints = bitmap(opened.accused, shared.roster.n);
  return [
    { due: M.INCLUDED, is: opened },
    { message: message(M.COMPLAINTS, shared.sid, complaints), done: false },
  ];
}

function keeping(state: ClientState): { keep: Bytes; done: false } {
  return { keep: encodeState(state), done: false };
}

async function secretsWith(key: PairKey, roster: Roster, of: (peer: Advertisement) => Bytes) {
  const secrets = new Map<number, Bytes>();
  for (const peer of roster.neighbours) {
    secrets.set(peer.position, await agree(key, of(peer.device)));
  }
  return secrets;
}

function sameSet(a: ReadonlySet<number>, b: ReadonlySet<number>): boolean {
  return a.size === b.size && [...a].every((one) => b.has(one));
}
