/** A device runs on the examples that Python's would, and on no other. */

import { expect, test } from "vitest";
import { utf8 } from "../src/core/bytes.ts";
import { onSide } from "../src/core/plans/batches.ts";
import { checkExamples, ExamplesError } from "../src/core/plans/examples.ts";
import { decodePlan, type Plan } from "../src/core/plans/plan.ts";
import { bytesOf, examplesOf, type Vector, vectors } from "./vectors.ts";

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
