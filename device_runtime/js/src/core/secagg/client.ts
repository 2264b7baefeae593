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
import * as encoding from "./encoding.ts";
import * as errors from "./errors.ts";
import { type AggregationPolicy, acceptInvitation } from "./invite.ts";
import * as keys from "./keys.ts";
import { pack } from "./packing.ts";
import { type Advertisement, checkRoster, decodeRoster, encodeAdvertisement, type Roster } from "./roster.ts";
import * as states from "./states.ts";

/** The answer to a message: the bytes to send next, none after the last, and the state that must be durable before. */
interface Reply {
  readonly message?: Bytes;
  readonly keep?: Bytes;
}

/** M12: whether the session came to a sum, and the server's signed account of it. */
export interface SessionResult {
  readonly summed: boolean;
  readonly aggregateHash: Bytes;
  readonly transcriptRoot: Bytes;
}

/** By the numbers of the messages that may come next, what answers them. */
type Due = Readonly<Record<number, (data: Bytes) => Promise<Reply>>>;

/** A device in one session. */
export class Client {
  readonly #identity: SigningKey;
  readonly #policy: AggregationPolicy;
  readonly #random: RandomSource;
  /** null once the session is over. */
  #due: Due | null;
  #result: SessionResult | null = null;

  /** `begin` is the device's input at the start of a session; to continue a session use `restore`. */
  constructor(
    identity: SigningKey,
    policy: AggregationPolicy,
    begin: states.SessionInput | states.ClientState,
    random = platformRandom,
  ) {
    this.#identity = identity;
    this.#policy = policy;
    this.#random = random;
    this.#due =
      "stage" in begin ? this.#afterM7(begin) : { [encoding.M.INVITE]: (data) => this.#advertise(begin, data) };
  }

  /** The client of a restarted device, from the last `Reply.keep`. Throws Malformed. */
  static restore(identity: SigningKey, policy: AggregationPolicy, keep: Bytes): Client {
    return new Client(identity, policy, states.decodeState(keep));
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
    const due = this.#due;
    this.#due = null; // so that an error leaves nothing
    if (due === null) {
      throw new errors.OutOfOrder("the session is over: this device answers nothing more");
    }
    const number = encoding.numberOf(data);
    const answer = due[number];
    if (answer === undefined) {
      throw new errors.OutOfOrder(`M${number} is not due: a device answers in order, and once`);
    }
    return answer(data);
  }

  /** M0 to M1. */
  async #advertise(given: states.SessionInput, data: Bytes): Promise<Reply> {
    const invite = await acceptInvitation(this.#policy, data, given, given.lastRound);
    const maskSecret = this.#random(encoding.KEY_BYTES);
    const [maskKey, boxKey] = [await pairKey(maskSecret), await pairKey(this.#random(encoding.KEY_BYTES))];
    const device = {
      id: this.#identity.public,
      maskKey: maskKey.public,
      boxKey: boxKey.public,
      signature: await keys.sign(this.#identity, "advertise", invite.hash, concat(maskKey.public, boxKey.public)),
      credential: given.credential,
    };
    const is = { given, invite, maskSecret, maskKey, boxKey, device };
    this.#due = { [encoding.M.ROSTER]: (roster) => this.#share(is, roster) };
    return { message: encodeAdvertisement(invite.hash, device) };
  }

  /** M2 to M3. */
  async #share({ given, invite, maskSecret, maskKey, boxKey, device }: states.Advertised, data: Bytes): Promise<Reply> {
    const roster = decodeRoster(data, invite.hash, invite.nMax);
    await checkRoster(this.#policy, invite, device, roster, given.now);
    const { n, k, t, root, beacon, position } = roster;
    const sid = await sha256(concat(encoding.tag("sid"), invite.hash, u32(n, k, t), root, beacon));
    const maskSecrets = await secretsWith(maskKey, roster, (peer) => peer.maskKey);
    const boxSecrets = await secretsWith(boxKey, roster, (peer) => peer.boxKey);
    const seed = keys.randomBelowPrime(this.#random);
    const seedShares = keys.split(seed, k, t, this.#random);
    const keyShares = keys.split(keys.scalarOf(maskSecret), k, t, this.#random);
    const boxes: Bytes[] = [];
    for (const [rank, peer] of roster.neighbours.entries()) {
      const key = await keys.derive(boxSecrets.get(peer.position)!, sid, "box", position, peer.position);
      const shares = concat(...[seedShares, keyShares].map((one) => littleEndian(one[rank]!, encoding.SHARE_BYTES)));
      boxes.push(await keys.sealShares(key, shares, sid, position, peer.position));
    }
    const commitment = await sha256(
      concat(encoding.tag("commit"), sid, u32(position), littleEndian(seed, encoding.KEY_BYTES)),
    );
    const is = { given, invite, roster, sid, seed, maskSecrets, boxSecrets };
    this.#due = { [encoding.M.DELIVER]: (delivery) => this.#complain(is, delivery) };
    return { message: encoding.message(encoding.M.SHARES, sid, commitment, ...boxes) };
  }

  /** M4 to M5: the shares of every neighbour whose box opens, and complaints about the others. */
  async #complain(shared: states.Shared, data: Bytes): Promise<Reply> {
    const opened = await states.openBoxes(shared, data);
    this.#due = { [encoding.M.INCLUDED]: (set) => this.#mask(opened, set) };
    return {
      message: encoding.message(encoding.M.COMPLAINTS, shared.sid, encoding.bitmap(opened.accused, shared.roster.n)),
    };
  }

  /** M6 to M7. Afterwards the device no longer has its own secrets. */
  async #mask(opened: states.Opened, data: Bytes): Promise<Reply> {
    const { given, invite, sid, roster, seed, maskSecrets } = opened.before;
    const kept = states.included(opened, data);
    const words = await pack(invite.segments, given.vector, given.weight, invite.wMax, this.#random);
    const own = roster.position;
    const masks: keys.Mask[] = [
      { key: await keys.derive(littleEndian(seed, encoding.KEY_BYTES), sid, "self", own), sign: 1 },
    ];
    for (const { position } of kept.peers) {
      const [low, high] = [Math.min(own, position), Math.max(own, position)];
      const key = await keys.derive(maskSecrets.get(position)!, sid, "mask", low, high);
      masks.push({ key, sign: own < position ? 1 : -1 });
    }
    await keys.addMasks(words, masks);
    const bytes = new Uint8Array(words.buffer);
    const signature = await keys.sign(this.#identity, "masked", sid, await sha256(bytes));
    return this.#keeping(kept, encoding.message(encoding.M.MASKED, sid, bytes, signature));
  }

  /** M8 to M9. The same M8 again gets the same answer, another M8 gets none. */
  async #confirm(kept: states.ClientState, data: Bytes): Promise<Reply> {
    const alive = encoding.readSet(data, encoding.M.SURVIVORS, "the survivor set", kept.sid, kept.n);
    if (kept.stage !== states.STAGE.MASKED && !sameSet(alive, kept.alive)) {
      throw kept.stage === states.STAGE.REVEALED
        ? new errors.AlreadyRevealed("this device revealed its shares for another survivor set, and reveals no others")
        : new errors.InconsistentSurvivors("this device was shown another survivor set before, and signs one");
    }
    states.checkSurvivors(kept, alive);
    const settled = kept.stage === states.STAGE.MASKED ? { ...kept, stage: states.STAGE.CONFIRMED, alive } : kept;
    const signature = await keys.sign(this.#identity, "survivors", settled.sid, await states.survivorsDigest(settled));
    return this.#keeping(settled, encoding.message(encoding.M.CONFIRM, settled.sid, signature));
  }

  /** M10 to M11: one share of every neighbour. */
  async #checkAndReveal(kept: states.ClientState, data: Bytes): Promise<Reply> {
    if (kept.stage === states.STAGE.MASKED) {
      throw new errors.OutOfOrder("confirmations came before survivors were settled");
    }
    await states.checkConfirmations(kept, data);
    const revealed = states.reveal(kept);
    return this.#keeping(revealed, states.encodeUnmask(revealed));
  }

  /** M12. The client drops its state, and the host can delete the kept one. */
  async #finish(kept: states.ClientState, data: Bytes): Promise<Reply> {
    const reader = encoding.openMessage(data, encoding.M.RESULT, "the result", kept.sid);
    const [status, aggregateHash, transcriptRoot] = [
      reader.take(1),
      reader.take(encoding.DIGEST_BYTES),
      reader.take(encoding.DIGEST_BYTES),
    ];
    const signature = reader.take(encoding.SIGNATURE_BYTES);
    reader.close();
    if (status[0]! > 1) {
      throw new errors.Malformed(`status ${status[0]} does not exist`);
    }
    await keys.verify(
      this.#policy.serverKey,
      signature,
      "result",
      kept.sid,
      concat(status, aggregateHash, transcriptRoot),
    );
    this.#result = { summed: status[0] === 0, aggregateHash, transcriptRoot };
    return {};
  }

  /** A reply whose state must be durable first. */
  #keeping(state: states.ClientState, message: Bytes): Reply {
    this.#due = this.#afterM7(state);
    return { message, keep: states.encodeState(state) };
  }

  #afterM7(kept: states.ClientState): Due {
    return {
      [encoding.M.SURVIVORS]: (data) => this.#confirm(kept, data),
      [encoding.M.CONFIRMATIONS]: (data) => this.#checkAndReveal(kept, data),
      [encoding.M.RESULT]: (data) => this.#finish(kept, data),
    };
  }
}

async function secretsWith(key: PairKey, roster: Roster, of: (peer: Advertisement) => Bytes) {
  const secrets = new Map<number, Bytes>();
  for (const peer of roster.neighbours) {
    secrets.set(peer.position, await keys.agree(key, of(peer.device)));
  }
  return secrets;
}

function sameSet(a: ReadonlySet<number>, b: ReadonlySet<number>): boolean {
  return a.size === b.size && [...a].every((one) => b.has(one));
}
