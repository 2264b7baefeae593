/** Secure aggregation: a device replays Python's session byte by byte. */

import { beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { type Bytes, concat, fromHex, fromLittleEndian, hex, littleEndian, utf8 } from "../src/core/bytes.ts";
import {
  pairKey,
  type RandomSource,
  type SigningKey,
  sha256,
  signingKey,
  useWebCrypto,
} from "../src/core/cryptography.ts";
import { Client } from "../src/core/secagg/client.ts";
import * as errors from "../src/core/secagg/errors.ts";
import { acceptInvitation, checkParameters, leastHonest } from "../src/core/secagg/invite.ts";
import { adderInJavaScript, addMasks, agree, CHUNK_BYTES, newAdder, PRIME, split } from "../src/core/secagg/keys.ts";
import { pack, Skellam } from "../src/core/secagg/packing.ts";
import { checkRoster, decodeRoster, type RosterEntry } from "../src/core/secagg/roster.ts";
import { decodeState, included, openBoxes, type SessionInput } from "../src/core/secagg/states.ts";
import { PATIENCE_MS, refusals, TIMES } from "./damage.ts";
import { bytesOf, segmentsOf, type Vector, values, vectors } from "./vectors.ts";

const device = vectors("device.json");
const session = vectors("secagg/transcript.json");
const SLOT = "10";

test("any t shares give a secret back", () => {
  const drawn = [77n, 154n];
  const shares = split(12345n, 5, 3, () => littleEndian(drawn.pop()!, 32));
  const ranks = [2n, 3n, 5n];
  const power = (base: bigint, exponent: bigint): bigint =>
    exponent === 0n ? 1n : (power((base * base) % PRIME, exponent >> 1n) * (exponent & 1n ? base : 1n)) % PRIME;
  const secret = ranks.reduce((sum, x) => {
    const others = ranks.filter((one) => one !== x);
    const [top, below] = [others.reduce((a, b) => a * b, 1n), others.reduce((a, b) => a * (b - x), 1n)];
    return sum + shares[Number(x) - 1]! * top * power(((below % PRIME) + PRIME) % PRIME, PRIME - 2n);
  }, 0n);
  expect(secret % PRIME).toBe(12345n);
});

test.for<Vector>(device.packings)("packed words are Python's: $name", async (one) => {
  const segments = segmentsOf(one);
  const size = segments.reduce((sum: number, segment: Vector) => sum + segment.size, 0);
  const vector = one.vector === null ? values(size) : Float32Array.from(one.vector);
  const words = await pack(segments, vector, one.weight, one.w_max, (length) => new Uint8Array(length).fill(7));
  expect(words).toHaveLength(2 * one.words);
  expect(hex(await sha256(bytesOf(words)))).toBe(one.sha256);
});

test("a number that falls on a threshold of the noise needs further bits", () => {
  const table = new Skellam(4);
  const halves = (word: bigint) => [Number(word & 0xffffffffn), Number(word >> 32n)] as const;
  let [below, above] = [0n, (1n << 63n) - 1n]; // without the bit of the sign: 0 stands for 0, the last for more
  while (above - below > 1n) {
    const middle = (below + above) / 2n;
    if (table.number(...halves(middle << 1n)) === 0) below = middle;
    else above = middle;
  }
  const [low, high] = halves(above << 1n);
  expect(table.number(low, high)).toBeNull();
  expect(table.exactly(low, high, [0, 0])).toBe(0);
  expect(table.exactly(low, high, [0xffffffff, 0xffffffff])).toBe(1);
  expect(table.number(...halves((above << 1n) + 2n))).toBe(1);
});

test("WebAssembly and JavaScript add and subtract words modulo 2^64", () => {
  const edges = [0n, 1n, 2n ** 32n - 1n, 2n ** 32n, 2n ** 63n, 2n ** 64n - 2n ** 32n, 2n ** 64n - 1n];
  const pairs = edges.flatMap((a) => edges.map((b) => [a, b] as const));
  const size = 8 * pairs.length; // an odd number of words, of which WebAssembly adds two at a time
  const adders = [newAdder(), adderInJavaScript()];
  expect(adders.map(({ memory }) => memory instanceof WebAssembly.Memory)).toEqual([true, false]);
  for (const { memory, add, subtract } of adders) {
    const words = new BigUint64Array(memory.buffer, 0, pairs.length);
    new BigUint64Array(memory.buffer, CHUNK_BYTES).set(pairs.map(([, b]) => b));
    words.set(pairs.map(([a]) => a));
    add(size);
    expect([...words]).toEqual(pairs.map(([a, b]) => BigInt.asUintN(64, a + b)));
    words.set(pairs.map(([a]) => a));
    subtract(size);
    expect([...words]).toEqual(pairs.map(([a, b]) => BigInt.asUintN(64, a - b)));
  }
});

test("masks of both signs cancel out, over several chunks", async () => {
  const words = new Uint32Array(2 * 150_001).map((_, place) => place * 2_654_435_761);
  const before = hex(await sha256(bytesOf(words)));
  const key = new Uint8Array(32).fill(3);
  await addMasks(words, [{ key, sign: 1 }]);
  expect(hex(await sha256(bytesOf(words)))).not.toBe(before);
  await addMasks(words, [{ key, sign: -1 }]);
  expect(hex(await sha256(bytesOf(words)))).toBe(before);
});

test.for<Vector>(device.least_honest)("a sum of %i from a roster of up to %i: %i are honest", ([sum, most, honest]) => {
  expect(leastHonest(sum, most)).toBe(honest);
});

test.for<Vector>(device.parameters)("n = %i, k = %i, t = %i: accepted is %s", ([n, k, t, accepted]) => {
  const check = () => checkParameters({ n, k, t });
  accepted ? check() : expect(check).toThrow(errors.PolicyViolation);
});

/** Draw i of a device is SHA-256("SA1" ‖ its slot ‖ i): as in Python's transcript, whose digests are listed. */
const chance = (): RandomSource => {
  let drawn = 0;
  return () => fromHex(session.drawn[SLOT][drawn++]);
};

describe("the session of the transcript", () => {
  let identity: SigningKey;
  const input = (): SessionInput => ({
    vector: Float32Array.from(session.vectors[SLOT]),
    weight: Number(SLOT),
    modelHash: new Uint8Array(32).fill(1),
    layoutHash: new Uint8Array(32).fill(2),
    credential: fromHex(session.sent.M1[SLOT]).slice(-88),
    lastRound: -1n,
    now: 0n,
  });
  let policy: { serverKey: Bytes; authority: Bytes; minSum: number };

  beforeAll(async () => {
    identity = await signingKey(fromHex(session.identity_private_keys[SLOT]));
    const serverKey = (await signingKey(fromHex(session.server_private_key))).public;
    const authority = (await signingKey(fromHex(session.authority_private_key))).public;
    policy = { serverKey, authority, minSum: 2 };
  });

  const got = (number: number): Bytes => fromHex(number === 0 ? session.M0 : session.got_by_slot_10[`M${number}`]);
  const client = (changes: Partial<SessionInput> = {}) =>
    new Client(identity, policy, { ...input(), ...changes }, chance());
  const upTo = async (last: number) => {
    const one = client();
    for (let number = 0; number < last; number += 2) await one.receive(got(number));
    return one;
  };

  test.each([
    ["WebCrypto", crypto.subtle],
    ["JavaScript", undefined],
  ])("every message of the device is Python's, byte by byte, by %s", async (_, subtle) => {
    useWebCrypto(subtle);
    onTestFinished(() => useWebCrypto(crypto.subtle));
    const one = client();
    for (let number = 0; number < 12; number += 2) {
      const reply = await one.receive(got(number));
      expect(hex(reply.message!)).toBe(session.sent[`M${number + 1}`][SLOT]);
      expect(reply.keep === undefined).toBe(number < 6);
    }
    expect(await one.receive(got(12))).toEqual({});
    expect(one.result.summed).toBe(true);
    expect(hex(one.result.aggregateHash)).toBe(session.aggregate.digest);
  });

  test("a device that was restarted says again what it said", async () => {
    const one = await upTo(6);
    const { keep } = await one.receive(got(6));
    for (const number of [8, 10]) {
      const again = Client.restore(identity, policy, keep!);
      if (number === 10) await again.receive(got(8));
      expect(hex((await again.receive(got(number))).message!)).toBe(session.sent[`M${number + 1}`][SLOT]);
    }
  });

  test("a message that is not due is refused, and ends the session", async () => {
    const one = await upTo(4);
    await expect(one.receive(got(2))).rejects.toThrow(errors.OutOfOrder);
    await expect(one.receive(got(4))).rejects.toThrow(errors.OutOfOrder);
  });

  test.each([0, 2, 4, 6, 8, 10, 12])(
    "M%i with a changed bit, or of another length, is refused or complained of",
    async (number) => {
      const message = got(number);
      const places = [0, 1, 2, 20, 40, Math.floor(message.length / 2), message.length - 1];
      for (const place of places.filter((one) => one < message.length)) {
        const one = await upTo(number);
        const bad = message.slice();
        bad[place]! ^= 1;
        const reply = await one.receive(bad).catch((error: unknown) => error);
        const complained = number === 4 && reply !== undefined && !(reply instanceof Error);
        expect(complained || reply instanceof errors.SecaggError).toBe(true);
      }
      await expect((await upTo(number)).receive(concat(message, Uint8Array.of(0)))).rejects.toThrow(errors.SecaggError);
      await expect((await upTo(number)).receive(message.slice(0, -1))).rejects.toThrow(errors.SecaggError);
    },
  );

  /** What reads a message of the server, given all that came before: the session itself takes far longer. */
  const reader = async (number: number): Promise<(data: Bytes) => Promise<unknown>> => {
    const invite = await acceptInvitation(policy, got(0), input(), -1n);
    if (number === 0) return (data) => acceptInvitation(policy, data, input(), -1n);
    const [maskKey, boxKey] = await Promise.all(session.drawn[SLOT].slice(0, 2).map(fromHex).map(pairKey));
    const { credential } = input();
    const own = {
      id: identity.public,
      maskKey: maskKey.public,
      boxKey: boxKey.public,
      signature: credential,
      credential,
    };
    const rosterOf = async (data: Bytes) => {
      const roster = decodeRoster(data, invite.hash, invite.nMax);
      await checkRoster(policy, invite, own, roster, 0n);
      return roster;
    };
    if (number === 2) return rosterOf;
    const roster = await rosterOf(got(2));
    const secret = async ({ position, device }: RosterEntry) => [position, await agree(boxKey, device.boxKey)] as const;
    const boxSecrets = new Map(await Promise.all(roster.neighbours.map(secret)));
    const sid = fromHex(session.sid);
    const shared = { given: input(), invite, roster, sid, seed: 0n, maskSecrets: new Map(), boxSecrets };
    if (number === 4) return (data) => openBoxes(shared, data);
    const opened = await openBoxes(shared, got(4));
    if (number === 6) return async (data) => included(opened, data);
    const one = await upTo(number - 2);
    const { keep } = await one.receive(got(number - 2));
    return (data) => Client.restore(identity, policy, keep!).receive(data);
  };

  test.each([0, 2, 4, 6, 8, 10, 12])(
    "damaged bytes of M%i are refused by name, or complained of",
    async (number) => {
      const read = await reader(number);
      await read(got(number));
      expect(await refusals(got(number), read, errors.SecaggError)).toBeGreaterThan(TIMES / 10);
    },
    PATIENCE_MS,
  );

  test(
    "a damaged state of a device is refused by name",
    async () => {
      const { keep } = await (await upTo(6)).receive(got(6));
      expect(await refusals(keep!, decodeState, errors.SecaggError)).toBeGreaterThan(TIMES / 10);
    },
    PATIENCE_MS,
  );

  test.each([
    ["a round that was answered", { lastRound: 7n }, errors.ReplayedRound],
    ["another model", { modelHash: new Uint8Array(32) }, errors.ModelMismatch],
    ["another layout", { layoutHash: new Uint8Array(32) }, errors.ModelMismatch],
  ])("an invitation for %s is refused", async (_, changes, kind) => {
    await expect(client(changes).receive(got(0))).rejects.toThrow(kind);
  });

  test("a policy that wants a larger sum refuses the invitation", async () => {
    policy = { ...policy, minSum: 5 };
    await expect(client().receive(got(0))).rejects.toThrow(errors.PolicyViolation);
    policy = { ...policy, minSum: 2 };
  });

  test.each([
    ["a value that is not finite", { vector: new Float32Array(7).fill(Number.NaN) }],
    ["a vector of another length", { vector: new Float32Array(6) }],
    ["a weight above the greatest", { weight: 65 }],
  ])("%s is refused before it is masked", async (_, changes) => {
    const one = client(changes);
    for (const number of [0, 2, 4]) await one.receive(got(number));
    await expect(one.receive(got(6))).rejects.toThrow(errors.BadInput);
  });

  test("a peer's credential that ended is refused", async () => {
    const one = client({ now: 2_000_000_002n });
    await one.receive(got(0));
    await expect(one.receive(got(2))).rejects.toThrow(errors.ExpiredCredential);
  });
});

test("integers of any size survive their bytes", () => {
  for (const value of [0n, 255n, PRIME - 1n]) expect(fromLittleEndian(littleEndian(value, 32))).toBe(value);
  expect(hex(utf8("é"))).toBe("c3a9");
});
