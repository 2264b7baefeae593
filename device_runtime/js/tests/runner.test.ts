/** The runner gives Python's report, bit for bit, and refuses what it must before anything runs. */

import { expect, test, vi } from "vitest";
import { fromHex, hex, utf8 } from "../src/core/bytes.ts";
import { DeadlinePassed, NonFiniteReport, PlanRefused } from "../src/core/errors.ts";
import { noise } from "../src/core/plans/batches.ts";
import { Graph, type Tensors } from "../src/core/plans/engine.ts";
import { checkExamples, type Examples, ExamplesError } from "../src/core/plans/examples.ts";
import { checkGraph } from "../src/core/plans/onnx-check.ts";
import { batchBytes, decodePlan } from "../src/core/plans/plan.ts";
import { execute, type Work } from "../src/core/plans/runner.ts";
import { nodeEngine } from "../src/node/engine.ts";
import { bytesOf, floats, type Vector, vectors } from "./vectors.ts";

const { runner, refused_graphs: refused, loop } = vectors("device.json");
const plan = decodePlan(utf8(runner.plan), 1);

async function work(changes: Partial<Work> = {}, written: Record<string, string> = runner.graphs): Promise<Work> {
  const graphs = new Map<string, Graph>();
  for (const [name, bytes] of Object.entries(written)) {
    graphs.set(name, await Graph.load(nodeEngine, fromHex(bytes), name));
  }
  const key = { seed: BigInt(runner.seed), round: runner.round, slot: BigInt(runner.slot), secret: new Uint8Array() };
  const broadcast = new Map([["params", floats(runner.params)]]);
  const inputs = { broadcast, frozen: new Map(), examples: examples(), key };
  return { engine: nodeEngine, plan, graphs, ...inputs, keepGoing: () => true, ...changes };
}

function examples(): Examples {
  const columns = new Map([
    ["x", { shape: [3], values: floats(runner.x) }],
    ["y", { shape: [], values: floats(runner.y) }],
  ]);
  return { count: runner.examples, columns };
}

test("two passes give Python's values, weight and steps", async () => {
  const found = await execute(await work());
  expect(hex(bytesOf(found.values))).toBe(runner.values);
  expect([found.weight, found.steps, found.examples]).toEqual([runner.weight, runner.steps, runner.examples]);
});

test("many steps in a call give the same values, and noise and masks of each", async () => {
  const many = decodePlan(utf8(runner.many_plan), 1);
  const noisy = many.passes.map((pass) => ({ ...pass, noise: pass.name === "sweep" }));
  const given = await work({ plan: { ...many, passes: noisy } }, runner.many_graphs);
  const runs = vi.spyOn(given.graphs.get("sweep.steps")!, "run");
  const found = await execute(given);
  expect(hex(bytesOf(found.values))).toBe(runner.values);
  expect([found.weight, found.steps, found.examples]).toEqual([runner.weight, runner.steps, runner.examples]);
  expect(runs).toHaveBeenCalledTimes(1);
  const [{ noise: fed }] = runs.mock.calls[0]! as unknown as [Tensors];
  expect(fed!.dims).toEqual([4, 4]);
  const drawn = await Promise.all([0, 1, 2, 3].map((step) => noise(given.key, 1, step, 4)));
  expect(Array.from(fed!.data as Int32Array)).toEqual(drawn.flatMap((values) => [...values]));
});

test("what calls of many steps hold counts in the estimate of a plan's memory", () => {
  expect(batchBytes(plan)).toBe(4 * (12 + 4 + 8));
  expect(batchBytes(decodePlan(utf8(runner.many_plan), 1))).toBe(2 * 2 ** 19);
});

test("work of many steps in a call stops between two calls", async () => {
  let left = 1;
  const many = decodePlan(utf8(runner.many_plan), 1);
  const stopped = execute(await work({ plan: many, keepGoing: () => left-- > 0 }, runner.many_graphs));
  await expect(stopped).rejects.toThrow("in pass train after 4 steps");
});

test("what graphs made for a report is given back when it is made", async () => {
  const given = await work();
  const made: number[] = [];
  const runs = [...given.graphs.values()].map((graph) => vi.spyOn(graph, "run"));
  await execute(given);
  for (const run of runs) {
    for (const { value } of run.mock.settledResults) {
      const { metrics: _, ...vectors } = value as Record<string, { readonly data: Float32Array }>;
      made.push(...Object.values(vectors).map(({ data }) => data.length));
    }
  }
  expect(made.length).toBeGreaterThan(runner.steps);
  expect(Math.max(...made)).toBe(0);
});

test("work that may not go on stops between two steps, and says where", async () => {
  let left = 3;
  const stopped = execute(await work({ keepGoing: () => left-- > 0 }));
  await expect(stopped).rejects.toThrow(DeadlinePassed);
  await expect(stopped).rejects.toThrow("in pass train after 3 steps");
});

test("a checkpoint that diverges gives no report, and says when it began", async () => {
  const broadcast = new Map([["params", new Float32Array(3).fill(3e38)]]);
  const diverged = execute(await work({ broadcast }));
  await expect(diverged).rejects.toThrow(NonFiniteReport);
  await expect(diverged).rejects.toThrow("not finite in the first step");
});

test("a plan whose sums no pass makes is refused", async () => {
  const segments = plan.report.segments.map((one) => (one.name === "train.metrics" ? { ...one, name: "other" } : one));
  const other = { ...plan, report: { ...plan.report, segments } };
  await expect(execute(await work({ plan: other }))).rejects.toThrow(PlanRefused);
});

test("a graph of other outputs than the plan's is refused", async () => {
  const passes = plan.passes.map((pass) => ({ ...pass, carry: [{ name: "other", size: 3 }] }));
  await expect(execute(await work({ plan: { ...plan, passes } }))).rejects.toThrow(/train.begin.*next.other/);
  const longer = plan.passes.map((pass) => ({ ...pass, carry: pass.carry.map((one) => ({ ...one, size: 4 })) }));
  await expect(execute(await work({ plan: { ...plan, passes: longer } }))).rejects.toThrow(
    /float32\[3\].*float32\[4\]/,
  );
});

test("an input with the name of what every object has is none of the plan's", async () => {
  const letters = Buffer.from(runner.graphs["train.step"], "hex")
    .toString("latin1")
    .replaceAll("example.x", "__proto__");
  const graph = await Graph.load(nodeEngine, Uint8Array.from(Buffer.from(letters, "latin1")), "train.step");
  const { graphs } = await work();
  await expect(execute(await work({ graphs: new Map([...graphs, ["train.step", graph]]) }))).rejects.toThrow(
    /train.step has inputs .*__proto__/,
  );
});

test.for<Vector>(Object.entries(refused))("a graph with more than plans use is refused: %s", ([, bytes]) => {
  expect(() => checkGraph(fromHex(bytes), "train.steps")).toThrow(PlanRefused);
  expect(() => checkGraph(fromHex(bytes), "train.steps")).toThrow("cannot load graph train.steps");
});

test("a loop over the mask is one of many steps alone", () => {
  const graph = fromHex(runner.many_graphs["train.steps"]);
  expect(() => checkGraph(graph, "train.steps")).not.toThrow();
  expect(() => checkGraph(graph, "train.step")).toThrow("have no bound");
});

test("a loop over steps that the graph holds is no reason to refuse it", () => {
  expect(() => checkGraph(fromHex(loop), "train.step")).not.toThrow();
});

test("a graph that is cut is refused, or is a graph of known operators", async () => {
  const graph = fromHex(runner.graphs["train.step"]);
  for (let end = 0; end < graph.length; end += 7) {
    await expect(Graph.load(nodeEngine, graph.slice(0, end), "g")).rejects.toThrow(PlanRefused);
  }
});

test("labels may be those that the plan ignores, and no others below 0", () => {
  const labels = (...values: number[]) => ({
    count: 2,
    columns: new Map([["y", { shape: [2], values: BigInt64Array.from(values, BigInt) }]]),
  });
  const field = { name: "y", dtype: "int64" as const, shape: [2], high: 3, ignored: -100 };
  const ignoring = { ...plan, examples: { ...plan.examples, fields: [field] } };
  expect(() => checkExamples(ignoring, labels(0, -100, 2, -100))).not.toThrow();
  expect(() => checkExamples(ignoring, labels(0, -100, 2, -99))).toThrow("field y of example 1 holds -99");
  expect(() => checkExamples(ignoring, labels(3, -100, 2, 0))).toThrow("field y of example 0 holds 3");
});

test.each<[string, Partial<Examples>, RegExp]>([
  ["none", { count: 0 }, /no examples/],
  ["too many values", { count: 12 }, /x holds Float32Array/],
  ["a missing field", { columns: new Map() }, /no field x/],
  [
    "a NaN",
    { columns: new Map([["x", { shape: [3], values: new Float32Array(39).fill(Number.NaN) }]]) },
    /example 0 holds NaN/,
  ],
  ["another type", { columns: new Map([["x", { shape: [3], values: new Int32Array(39) }]]) }, /plan wants float32/],
])("examples with %s are refused", (_, changes, words) => {
  expect(() => checkExamples(plan, { ...examples(), ...changes })).toThrow(ExamplesError);
  expect(() => checkExamples(plan, { ...examples(), ...changes })).toThrow(words);
});
