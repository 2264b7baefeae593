/** Orders and noise are Python's, and batches visit what the specification says. */

import { expect, test } from "vitest";
import { hex } from "../src/core/bytes.ts";
import { sha256 } from "../src/core/cryptography.ts";
import { argsort, type Batches, batches, noise, permutation } from "../src/core/plans/batches.ts";
import { stepCount } from "../src/core/plans/plan.ts";
import { bytesOf, keyOf, type Vector, vectors } from "./vectors.ts";

test.for<Vector>(vectors("order.json"))("order of $examples examples is Python's", async (one) => {
  expect(Array.from(await permutation(keyOf(one), one.pass, one.epoch, one.examples))).toEqual(one.order);
});

test.for<Vector>(vectors("noise.json"))("noise of $size places is Python's", async (one) => {
  expect(Array.from(await noise(keyOf(one), one.pass, one.step, one.size))).toEqual(one.noise);
});

test.for<Vector>(vectors("device.json").orders)("a seed beyond 2^53 and secret noise are Python's", async (one) => {
  const order = await permutation(keyOf(one), 1, 2, one.size);
  expect(hex(await sha256(bytesOf(order)))).toBe(one.order_sha256);
  expect(hex(await sha256(bytesOf(await noise(keyOf(one), 1, 2, one.size))))).toBe(one.noise_sha256);
});

test("places are sorted by all bits of their words, and places of equal words stay in order", () => {
  const words = BigUint64Array.of(2n ** 63n, 7n, 5n, 6n, 5n, 2n ** 63n + 1n, 0n, 5n);
  expect(Array.from(argsort(words))).toEqual([6, 2, 4, 7, 3, 1, 0, 5]);
  expect(words[0]).toBe(2n ** 63n);
  expect(argsort(words.subarray(0, 1))).toEqual(Uint32Array.of(0));
  expect(argsort(words.subarray(0, 0))).toHaveLength(0);
});

test.for<Vector>(vectors("device.json").plan.steps)(
  "a loop %o over %i examples has %i steps",
  async ([given, examples, steps]) => {
    const loop = { epochs: 1, steps: null, shuffle: true, ...given };
    const made: Batches[] = [];
    for await (const batch of batches(loop, examples, keyOf({ seed: 1, round: 1, slot: 1 }), 0, 1)) made.push(batch);
    expect(stepCount(loop, examples)).toBe(steps);
    expect(made).toHaveLength(steps);
    for (const { indices, mask } of made) {
      expect([indices.length, mask.length]).toEqual([loop.batch_size, loop.batch_size]);
      const real = mask.indexOf(0) < 0 ? mask.length : mask.indexOf(0);
      expect(new Set(indices.slice(0, real)).size).toBe(real);
      expect(indices.slice(real).every((index) => index === indices[0])).toBe(true);
    }
  },
);
