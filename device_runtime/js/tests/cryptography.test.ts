/** Cryptography: the primitives give published answers, whether WebCrypto or JavaScript computes them. */

import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { fromHex, hex, utf8 } from "../src/core/bytes.ts";
import type { Suite } from "../src/core/cryptography.ts";
import * as primitives from "../src/core/cryptography.ts";
import { nodeFunctions } from "../src/node/engine.ts";
import { type Vector, vectors } from "./vectors.ts";

const known = vectors("secagg/known_answers.json");
const { subtle } = crypto;

/** WebCrypto as some platforms have it: no curves, and counters that it does not count from. */
const incomplete = new Proxy(subtle, {
  get(target, name: keyof SubtleCrypto) {
    const whole = (target[name] as (...words: unknown[]) => unknown).bind(target);
    return (...words: unknown[]) => {
      if (JSON.stringify(words).includes("25519")) throw new DOMException("unknown curve", "NotSupportedError");
      const [how] = words as [{ name?: string }];
      return how?.name === "AES-CTR"
        ? whole({ ...how, counter: new Uint8Array(16) }, ...words.slice(1))
        : whole(...words);
    };
  },
});

describe.each<[string, SubtleCrypto | undefined, Partial<Suite>?]>([
  ["WebCrypto", subtle],
  ["JavaScript", undefined],
  ["a WebCrypto that lacks much", incomplete],
  ["Node's own functions", subtle, nodeFunctions],
])("by %s", (_, implementation, others = {}) => {
  beforeAll(() => primitives.useWebCrypto(implementation, others));
  afterAll(() => primitives.useWebCrypto(subtle));

  test.for<Vector>(known.x25519.vectors)("X25519 gives the RFC's secret", async ({ scalar, u, output }) => {
    const point = fromHex(u);
    point[31]! &= 0x7f;
    expect(hex(await (await primitives.pairKey(fromHex(scalar))).agree(point))).toBe(output);
  });

  test("a point of low order gives no secret", async () => {
    const key = await primitives.pairKey(new Uint8Array(32).fill(1));
    await expect(key.agree(new Uint8Array(32))).rejects.toThrow();
  });

  test.for<Vector>(known.ed25519.vectors)("Ed25519 gives the RFC's signature", async (one) => {
    const key = await primitives.signingKey(fromHex(one.private));
    expect(hex(key.public)).toBe(one.public);
    expect(hex(await key.sign(fromHex(one.message)))).toBe(one.signature);
    expect(await primitives.verifies(key.public, fromHex(one.signature), fromHex(one.message))).toBe(true);
    expect(await primitives.verifies(key.public, fromHex(one.signature), fromHex(`${one.message}00`))).toBe(false);
    expect(await primitives.verifies(key.public, new Uint8Array(3), fromHex(one.message))).toBe(false);
  });

  test("HKDF gives the RFC's first bytes", async () => {
    for (const { ikm, salt, info, okm } of known.hkdf_sha256.vectors) {
      expect(hex(await primitives.hkdf(fromHex(ikm), fromHex(salt), fromHex(info)))).toBe(okm.slice(0, 64));
    }
  });

  test("SHA-256 gives the standard's digest", async () => {
    const digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    expect(hex(await primitives.sha256(utf8("abc")))).toBe(digest);
  });

  test("a keystream can be read from any block on", async () => {
    const stream = await primitives.keystream(new Uint8Array(32).fill(9));
    const [whole, piece] = [new Uint8Array(160), new Uint8Array(48)];
    await stream.fill(whole, 0);
    await stream.fill(piece, 3);
    expect(hex(piece)).toBe(hex(whole.slice(48, 96)));
  });

  test("a box opens for its key alone, and not once it was altered", async () => {
    const [key, about] = [new Uint8Array(32).fill(4), Uint8Array.of(1)];
    const box = await primitives.seal(key, Uint8Array.of(1, 2, 3), about);
    expect(await primitives.openBox(key, box, about)).toEqual(Uint8Array.of(1, 2, 3));
    await expect(primitives.openBox(new Uint8Array(32), box, about)).rejects.toThrow();
    box[0]! ^= 1;
    await expect(primitives.openBox(key, box, about)).rejects.toThrow();
  });
});
