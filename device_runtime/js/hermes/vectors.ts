/** The vectors of Python's implementation, in the virtual machine of Hermes: cryptography is that in JavaScript. */

import "./missing.ts";
import { fromHex, hex, utf8 } from "../src/core/bytes.ts";
import { hkdf, keystream, pairKey, sha256, signingKey, verifies } from "../src/core/cryptography.ts";
import { noise, permutation, places } from "../src/core/plans/batches.ts";
import { decodeVectors } from "../src/core/plans/checkpoint.ts";
import { encode } from "../src/core/plans/codecs.ts";
import { Client } from "../src/core/secagg/client.ts";
import { pack } from "../src/core/secagg/packing.ts";
import { decodeAnswer } from "../src/core/wire/messages.ts";
import { bytesOf, examplesOf, floats, keyOf, segmentsOf, type Vector, values, vectorsIn } from "../tests/values.ts";

declare const print: (line: string) => void;
/** The texts of the vectors by the names of their files. */
declare const VECTORS: Readonly<Record<string, string>>;
const read = (name: string): Vector => vectorsIn(VECTORS[name]!);
const [device, known, session] = [read("device"), read("secagg/known_answers"), read("secagg/transcript")];

/** Run a part, count its answers, and say how long it took. */
async function part(name: string, answers: () => AsyncGenerator<readonly [unknown, unknown]>): Promise<void> {
  const begin = Date.now();
  let count = 0;
  for await (const [found, expected] of answers()) {
    if (String(found) !== String(expected)) throw new Error(`${name}, answer ${count}: ${found}, not ${expected}`);
    count += 1;
  }
  print(`${name}: ${count} equal, ${Date.now() - begin} ms`);
}

async function main(): Promise<void> {
  await part("orders", async function* () {
    for (const one of read("order"))
      yield [await permutation(keyOf(one), one.pass, one.epoch, one.examples), one.order];
  });
  await part("noise", async function* () {
    for (const one of read("noise")) yield [await noise(keyOf(one), one.pass, one.step, one.size), one.noise];
  });
  await part("hold-outs", async function* () {
    for (const one of device.hold_outs) {
      yield [await places({ examples: one.examples }, examplesOf(one)), one.kept];
    }
  });
  await part("messages and checkpoints", async function* () {
    const given = decodeAnswer("assignment", utf8(device.messages.good.assignment[0]));
    yield [(given as { seed: bigint }).seed, device.messages.seed];
    for (const one of device.checkpoints) {
      const specs = Object.entries<number[]>(one.vectors).map(([name, values]) => ({ name, size: values.length }));
      const found = decodeVectors(fromHex(one.bytes), specs);
      for (const { name } of specs) yield [found.get(name), one.vectors[name]];
    }
  });
  await part("codecs", async function* () {
    for (const one of device.codecs.filter(({ size }: Vector) => size <= 3000)) {
      const key = { seed: BigInt(one.seed), round: one.round };
      const coded = await encode(one.codecs, floats(one.values), key, one.segment);
      yield [hex(await sha256(bytesOf(coded))), one.coded_sha256];
    }
  });
  await part("X25519", async function* () {
    for (const { scalar, u, output } of known.x25519.vectors) {
      const point = fromHex(u);
      point[31]! &= 0x7f;
      yield [hex(await (await pairKey(fromHex(scalar))).agree(point)), output];
    }
  });
  await part("Ed25519", async function* () {
    for (const one of known.ed25519.vectors) {
      const key = await signingKey(fromHex(one.private));
      yield [hex(await key.sign(fromHex(one.message))), one.signature];
      yield [await verifies(key.public, fromHex(one.signature), fromHex(one.message)), true];
    }
  });
  await part("HKDF", async function* () {
    for (const { ikm, salt, info, okm } of known.hkdf_sha256.vectors) {
      yield [hex(await hkdf(fromHex(ikm), fromHex(salt), fromHex(info))), okm.slice(0, 64)];
    }
  });
  await part("packed words", async function* () {
    for (const one of device.packings.filter(({ words }: Vector) => words <= 2000)) yield await packed(one);
  });
  await part("a session of secure aggregation", transcript);
  await part("a keystream of 256 KiB", async function* () {
    const stream = await keystream(new Uint8Array(32));
    const drawn = new Uint8Array(1 << 18);
    await stream.fill(drawn, 0);
    yield [drawn.some((byte) => byte > 0), true];
  });
}

async function packed(one: Vector): Promise<readonly [unknown, unknown]> {
  const segments = segmentsOf(one);
  const size = segments.reduce((sum: number, segment: Vector) => sum + segment.size, 0);
  const vector = one.vector === null ? values(size) : Float32Array.from(one.vector as number[]);
  const words = await pack(segments, vector, one.weight, one.w_max, (length) => new Uint8Array(length).fill(7));
  return [hex(await sha256(bytesOf(words))), one.sha256];
}

async function* transcript() {
  const slot = "10";
  const keys = [session.identity_private_keys[slot], session.server_private_key, session.authority_private_key];
  const [identity, server, authority] = await Promise.all(keys.map((key) => signingKey(fromHex(key))));
  const begin = {
    vector: Float32Array.from(session.vectors[slot] as number[]),
    weight: Number(slot),
    modelHash: new Uint8Array(32).fill(1),
    layoutHash: new Uint8Array(32).fill(2),
    credential: fromHex(session.sent.M1[slot]).slice(-88),
    lastRound: -1n,
    now: 0n,
  };
  let drawn = 0;
  const policy = { serverKey: server!.public, authority: authority!.public, minSum: 2 };
  const client = new Client(identity!, policy, begin, () => fromHex(session.drawn[slot][drawn++]));
  for (let number = 0; number < 12; number += 2) {
    const got = number === 0 ? session.M0 : session.got_by_slot_10[`M${number}`];
    const { message } = await client.receive(fromHex(got));
    yield [hex(message!), session.sent[`M${number + 1}`][slot]] as const;
  }
}

main().catch((error: unknown) => {
  print(`FAILED ${String(error)} ${(error as Error).stack}`);
  throw error;
});
