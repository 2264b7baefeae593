/** A device visits the examples that Python's would, in its order and with its noise, and no others. */

import { expect, test } from "vitest";
import { hex, utf8 } from "../src/core/bytes.ts";
import { sha256 } from "../src/core/cryptography.ts";
import { argsort, type Batches, batches, noise, onSide, permutation } from "../src/core/plans/batches.ts";
import { checkExamples, ExamplesError } from "../src/core/plans/examples.ts";
import { decodePlan, type Plan, stepCount } from "../src/core/plans/plan.ts";
import { bytesOf, examplesOf, keyOf, type Vector, vectors } from "./vectors.ts";

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

const { hold_outs, plan: planVector } = vectors("device.json");

function planOf(examples: Vector): Plan {
  return decodePlan(utf8(JSON.stringify({ ...JSON.parse(planVector.text), examples })), 1);
}

test.for<Vector>(hold_outs)(
  "examples of $examples.collection that are kept are Python's: $examples.hold_out",
  async (one) => {
    const [plan, all] = [planOf(one.examples), examplesOf(one)];
    checkExamples(plan, all);
    if (one.kept.length === 0) {
      await expect(onSide(plan, all, 0)).rejects.toThrow(/runs on 0 .* needs 1/);
      return;
    }
    const kept = await onSide(plan, all, 0);
    expect(kept.count).toBe(one.kept.length);
    for (const [name, { values }] of all.columns) {
      const width = values.length / all.count;
      const expected = one.kept.flatMap((place: number) => [...values.subarray(place * width, (place + 1) * width)]);
      expect([...kept.columns.get(name)!.values]).toEqual(expected);
    }
  },
);

test("an example is on the same side wherever it is stored", async () => {
  const [plan, all] = [planOf(hold_outs[0].examples), examplesOf(hold_outs[0])];
  const last = new Map(
    [...all.columns].map(([name, { shape, values }]) => {
      return [name, { shape, values: values.slice(-values.length / all.count) }];
    }),
  );
  const kept = await onSide(plan, { count: 1, columns: last }, 1);
  expect(bytesOf(kept.columns.get("x")!.values)).toEqual(bytesOf(last.get("x")!.values));
});

test("examples that are too few without those held out are refused", async () => {
  const [one] = hold_outs;
  const [plan, all] = [planOf(one.examples), examplesOf(one)];
  await expect(onSide(plan, all, one.kept.length)).resolves.toBeDefined();
  await expect(onSide(plan, all, one.kept.length + 1)).rejects.toThrow(ExamplesError);
  await expect(onSide(planOf({ ...one.examples, hold_out: null }), all, 41)).rejects.toThrow(/runs on 40 .* needs 41/);
});

test.each([0, 1, -0.1, 1.2, "0.5"])("a plan that holds out a share of %s is refused", (share) => {
  const { examples } = hold_outs[0];
  expect(() => planOf({ ...examples, hold_out: { share, side: "train" } })).toThrow(/share/);
  expect(() => planOf({ ...examples, hold_out: { share: 0.5, side: "both" } })).toThrow(/side/);
});
