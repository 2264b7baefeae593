/** Personal models: a plan's own local steps from a released model, measured on examples that they leave out.
 *
 * A plan that trains has no graph that only measures, but each step tells the loss of its batch at the parameters that it
 * starts from. So one step from given parameters measures them, and what it makes of them is dropped.
 */

import type { Bytes } from "../bytes.ts";
import { NonFiniteReport, PlanRefused } from "../errors.ts";
import { only, places } from "../plans/batches.ts";
import { decodeVectors, frozenOf } from "../plans/checkpoint.ts";
import { flatTensors, withGraphs } from "../plans/engine.ts";
import { checkExamples, type Examples, ExamplesError } from "../plans/examples.ts";
import { type BlobRef, loopGraph, type PassPlan, type Plan, parameterCount, runGraphs } from "../plans/plan.ts";
import type { Float32 } from "../plans/report.ts";
import { letGoOf, type Swept, sweep, type Work } from "../plans/runner.ts";
import type { Visit } from "../protocol/enrolment.ts";
import { tokenized } from "../texts/tokenizer.ts";
import type { ModelRelease } from "../wire/statements.ts";

/** The share of examples that are left out, where the plan holds out no larger one. */
const SHARE = 0.2;
/** The fewest examples to train on, and to measure on. */
const LEAST = 10;
/** Into how many groups the examples to measure on are divided, unless there are fewer, or a batch holds less. */
const PAIRS = 32;
/** How many of its own standard errors the mean gain must exceed: chance alone does so 4 times in 100 at most. */
const CERTAIN = 2;
const PARAMS = "params";

/** The personal parameters, and the mean losses of all examples left out, at the released and at the personal ones.
 *
 * isBetter: whether the mean of the differences, of groups of examples, is above 0 by enough of its standard errors.
 */
interface Measured {
  readonly params: Float32;
  readonly before: number;
  readonly after: number;
  readonly steps: number;
  readonly isBetter: boolean;
}

/** The index of the pass whose last carry `params` is a local model. Throws PlanRefused when there is none. */
function localPass(plan: Plan): number {
  if (plan.trips > 1) {
    throw new PlanRefused(
      `plan ${plan.name} has two trips, and the steps of the second need what devices sent in the first: ` +
        "only models of plans with one trip become personal",
    );
  }
  const size = parameterCount(plan);
  const index = plan.passes.findIndex(({ carry }) => carry.some((one) => one.name === PARAMS && one.size === size));
  if (index < 0) {
    const names = plan.passes.map(({ name }) => name);
    throw new PlanRefused(`no pass of plan ${plan.name} makes a local model: none of ${names} carries ${PARAMS}`);
  }
  const { name, metrics } = plan.passes[index]!;
  if (!metrics.includes("loss") || !metrics.includes("examples")) {
    throw new PlanRefused(`pass ${name} of plan ${plan.name} measures ${metrics}, no loss`);
  }
  return index;
}

/** The graphs that local steps need, by name. Throws PlanRefused where there is no local model, or not this format. */
function localGraphs(plan: Plan): ReadonlyMap<string, BlobRef> {
  const { name } = plan.passes[localPass(plan)]!;
  const graphs = runGraphs(plan);
  return new Map([`${name}.begin`, loopGraph(Object.keys(graphs), name)].map((graph) => [graph, graphs[graph]!]));
}

/** The examples to train on, and those to measure on, by the hash that holds out examples; they must fit the plan.
 *
 * What the plan holds out is among the latter. Throws ExamplesError when either are too few.
 */
async function divided(plan: Plan, all: Examples): Promise<[train: Examples, leftOut: Examples]> {
  const share = Math.max(SHARE, plan.examples.hold_out?.share ?? 0);
  const kept = await places({ examples: { ...plan.examples, hold_out: { share, side: "train" } } }, all);
  const inside = new Set(kept);
  const rest = Array.from({ length: all.count }, (_, place) => place).filter((place) => !inside.has(place));
  if (Math.min(kept.length, rest.length) < LEAST) {
    throw new ExamplesError(
      "too-few-examples",
      `of ${all.count} examples of collection ${plan.examples.collection}, ${rest.length} are left out to measure on ` +
        `and ${kept.length} remain to train on; a personal model needs ${LEAST} of each`,
    );
  }
  return [only(plan, all, kept), only(plan, all, rest)];
}

/** Measure the released parameters, take the plan's local steps from them, and measure again.
 *
 * work: with `localGraphs`, the broadcast `params` alone, and the examples to train on. Throws as `execute`.
 */
async function personalise(work: Work, leftOut: Examples): Promise<Measured> {
  const index = localPass(work.plan);
  const pass = work.plan.passes[index]!;
  const released = work.broadcast.get(PARAMS)!;
  const before = await losses(work, leftOut, pass, index, released).catch((error: unknown) => {
    if (!(error instanceof PlanRefused)) throw error;
    const words = `the steps of plan ${work.plan.name} do not run on ${PARAMS} alone, which is all that a release holds`;
    throw new PlanRefused(`${words}: ${error.message}`);
  });
  const trained = await from(work, pass, index, released);
  const params = Float32Array.from(trained.carry[PARAMS]!.data as Float32);
  letGoOf(Object.values(trained.carry));
  const after = await losses(work, leftOut, pass, index, params);
  if (![...before, ...after].every(Number.isFinite) || !params.every(Number.isFinite)) {
    throw new NonFiniteReport("the loss is not finite, or training on this device's examples diverged");
  }
  const sizes = groups(leftOut.count, pass.loop.batch_size).map(({ length }) => length);
  const mean = (found: readonly number[]) =>
    found.reduce((sum, loss, group) => sum + loss * sizes[group]!, 0) / leftOut.count;
  const isBetter = exceeds(before.map((loss, group) => loss - after[group]!));
  return { params, before: mean(before), after: mean(after), steps: trained.steps, isBetter };
}

/** Run the steps of the pass from the given parameters. */
function from(work: Work, pass: PassPlan, index: number, params: Float32): Promise<Swept> {
  const broadcast = flatTensors(work.engine, "broadcast", new Map([[PARAMS, params]]));
  const known = { ...broadcast, ...flatTensors(work.engine, "frozen", work.frozen) };
  return sweep(work, known, pass, index);
}

/** The mean loss of each group of examples. Noise, such as dropout's, is the same for any parameters. */
async function losses(work: Work, examples: Examples, pass: PassPlan, index: number, params: Float32) {
  const batch_size = pass.loop.batch_size;
  const once = { ...pass, loop: { batch_size, epochs: 1, steps: 1, shuffle: false } };
  const found: number[] = [];
  for (const [number, rows] of groups(examples.count, batch_size).entries()) {
    const group = { ...work, examples: only(work.plan, examples, rows), key: { ...work.key, slot: BigInt(number) } };
    const { carry, metrics } = await from(group, once, index, params);
    letGoOf(Object.values(carry));
    found.push(metrics[pass.metrics.indexOf("loss")]! / metrics[pass.metrics.indexOf("examples")]!);
  }
  return found;
}

/** The places of each group of `count` examples: all equally many, or one more, and none more than a batch. */
function groups(count: number, size: number): number[][] {
  const number = Math.max(Math.ceil(count / size), Math.min(count, PAIRS));
  const [least, more] = [Math.floor(count / number), count % number];
  return Array.from({ length: number }, (_, group) => {
    const start = group * least + Math.min(group, more);
    return Array.from({ length: least + (group < more ? 1 : 0) }, (_, place) => start + place);
  });
}

/** Whether the mean of the gains exceeds 0 by more than CERTAIN of its standard errors. */
function exceeds(gains: readonly number[]): boolean {
  const mean = gains.reduce((sum, gain) => sum + gain, 0) / gains.length;
  const squares = gains.reduce((sum, gain) => sum + (gain - mean) ** 2, 0);
  return mean > CERTAIN * Math.sqrt(squares / (gains.length - 1) / gains.length);
}

/** Of the order of examples: the same examples give the same model, so nobody tries until chance says that one helps. */
const KEY = { seed: 0n, round: 0, slot: 0n, secret: new Uint8Array() };

/** What became of a personal model.
 *
 * version: the released one that it was made from. before, after: the mean loss on the `leftOut` examples, at the
 * released and at the personal parameters, which were trained on `examples`. kept: whether the personal ones are used
 * from now on; else the released ones are.
 */
export interface Personalised {
  readonly version: number;
  readonly before: number;
  readonly after: number;
  readonly examples: number;
  readonly leftOut: number;
  readonly kept: boolean;
}

/** What a training needs. mine: a blob of the version. keep: notes graphs that stay. keepGoing: asked between steps. */
interface Means {
  readonly visit: Visit;
  readonly mine: (ref: BlobRef) => Promise<Bytes>;
  readonly keep: (refs: readonly BlobRef[]) => Promise<void>;
  readonly keepGoing: () => boolean;
}

/** The local steps of a version's plan, measured, with the numbers of examples trained on and left out. */
export async function trained(
  release: ModelRelease,
  plan: Plan,
  { visit, mine, keep, keepGoing }: Means,
): Promise<Measured & { readonly examples: number; readonly leftOut: number }> {
  const { engine, examples: source } = visit.platform;
  const { collection } = plan.examples;
  const refs = localGraphs(plan);
  const count = (await source.counts()).get(collection) ?? 0;
  visit.guard.checkPlan({ plan: release.plan, checkpoint: release.parameters }, plan, count);
  const { examples: all } = await tokenized(plan, await source.load(collection), mine, keepGoing);
  checkExamples(plan, all);
  const [examples, leftOut] = await divided(plan, all);
  const broadcast = decodeVectors(await mine(release.parameters), [{ name: "params", size: parameterCount(plan) }]);
  const frozen = await frozenOf(plan, mine);
  return withGraphs(engine, refs, visit.blob, async (graphs) => {
    await keep([...refs.values()]);
    const work = { engine, plan, graphs, broadcast, frozen, examples, key: KEY, keepGoing };
    return { ...(await personalise(work, leftOut)), examples: examples.count, leftOut: leftOut.count };
  });
}
