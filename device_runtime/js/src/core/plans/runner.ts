/** The runner: it loops over batches, runs graphs and concatenates the report. It contains no algorithm.
 *
 * Spec: docs/spec/plan.md §2, §3.
 */

import type { Tensor } from "onnxruntime-common";
import { type Bytes, letGo } from "../bytes.ts";
import { DeadlinePassed, NonFiniteReport, PlanRefused } from "../errors.ts";
import { batches, noise, type StreamKey } from "./batches.ts";
import { type Engine, flatTensors, type Graph, type Tensors } from "./engine.ts";
import type { Examples, Values } from "./examples.ts";
import * as plans from "./plan.ts";
import * as reports from "./report.ts";

/** Words of a row at most that are copied one by one, as that takes less time than to make a view of them. */
const NARROW = 128;

/** The unweighted `values` (V,) of a report, its `weight`, the number of local `examples`, and the steps in all. */
export interface TrainingResult {
  readonly values: reports.Float32;
  readonly weight: number;
  readonly examples: number;
  readonly steps: number;
}

/** The work of one assignment: a plan, its loaded graphs by name, and their inputs; at least one example.
 *
 * keepGoing: asked before every call of a graph of steps; what it throws ends the work, and so does false, with DeadlinePassed.
 */
export interface Work {
  readonly engine: Engine;
  readonly plan: plans.Plan;
  readonly graphs: ReadonlyMap<string, Graph>;
  readonly broadcast: ReadonlyMap<string, reports.Float32>;
  readonly frozen: ReadonlyMap<string, reports.Float32 | Bytes>;
  readonly examples: Examples;
  readonly key: StreamKey;
  readonly keepGoing: () => boolean;
}

/** The end of a pass: its last carry, its metric sums and those of its first step, its steps, and the steps before a
 * non-finite sum. */
export interface Swept {
  readonly carry: Record<string, Tensor>;
  readonly metrics: reports.Float32;
  readonly first: reports.Float32;
  readonly steps: number;
  readonly finite: number;
}

/** Run every pass of the plan and make the report.
 *
 * Throws PlanRefused when the plan contradicts itself or its graphs, RuntimeFailed when a graph fails, DeadlinePassed,
 * and NonFiniteReport, which says where it began.
 */
export async function execute(work: Work): Promise<TrainingResult> {
  const { plan, engine, examples } = work;
  checkSums(plan);
  const known = {
    ...flatTensors(engine, "broadcast", work.broadcast),
    ...flatTensors(engine, "frozen", work.frozen),
  };
  const parts = new Map<string, reports.Float32>();
  const carries: Tensor[] = [];
  let [steps, finite] = [0, 0];
  let first: reports.Float32 | undefined;
  for (const [index, pass] of plan.passes.entries()) {
    const swept = await sweep(work, known, pass, index);
    Object.assign(known, prefixed(`${pass.name}.carry`, swept.carry));
    carries.push(...Object.values(swept.carry));
    parts.set(reports.metricsSegment(pass.name), swept.metrics);
    finite += finite === steps ? swept.finite : 0;
    steps += swept.steps;
    first ??= swept.first;
    if (plan.report.segments.some(reports.countsLosses))
      parts.set(reports.LOSSES, reports.countLosses(first, swept.metrics));
  }
  const means = plan.report.segments.filter((segment) => segment.reduction === "mean");
  const made = await graphOf(work, plans.REPORT).run(known, new Map(means.map(({ name, size }) => [name, [size]])));
  letGoOf(carries);
  const outputs = new Map(Object.entries(made).map(([name, tensor]) => [name, floats(tensor)]));
  for (const [name, values] of await reports.encodeMeans(plan.report, outputs, work.key)) {
    parts.set(name, values);
  }
  const weight = reports.weightOf(plan.report, examples.count);
  try {
    const clip = plan.report.bounded ? work.broadcast.get(reports.CLIP)?.[0] : undefined;
    const values = reports.concatenate(plan.report, parts, weight, clip);
    letGoOf(Object.values(made));
    return { values, weight, examples: examples.count, steps };
  } catch (error) {
    throw error instanceof NonFiniteReport ? new NonFiniteReport(`${error.message}: ${cause(steps, finite)}`) : error;
  }
}

/** Run all steps of a pass. */
export async function sweep(work: Work, known: Tensors, pass: plans.PassPlan, index: number): Promise<Swept> {
  const [{ examples, key }, size] = [work, pass.loop.batch_size];
  const sizes = new Map(pass.carry.map((vector) => [`next.${vector.name}`, [vector.size]]));
  const totals = new Float64Array(pass.metrics.length);
  let carry = unprefixed(await graphOf(work, `${pass.name}.begin`).run(known, sizes));
  const graph = graphOf(work, plans.loopGraph([...work.graphs.keys()], pass.name));
  const buffers = new Buffers(work, pass);
  let [steps, finite] = [0, 0];
  let first = new Float32Array(totals.length);
  for await (const { indices, mask } of batches(pass.loop, examples.count, key, index, buffers.most)) {
    if (!work.keepGoing()) {
      throw new DeadlinePassed(`stopped in pass ${pass.name} after ${steps} steps: the report would come too late`);
    }
    const count = mask.length / size;
    const inputs = buffers.fill(indices, mask, pass.noise ? await drawn(key, index, steps, count, size) : null);
    const wanted = new Map([...sizes, ["metrics", buffers.shape(count, totals.length)]]);
    const { metrics, ...next } = await graph.run({ ...known, ...inputs, ...prefixed("carry", carry) }, wanted);
    letGoOf(Object.values(carry));
    carry = unprefixed(next);
    const sums = floats(metrics!);
    sums.forEach((value, place) => {
      totals[place % totals.length]! += value;
    });
    if (steps === 0) first = sums.slice(0, totals.length);
    finite += finite === steps ? finiteSteps(sums, count) : 0;
    steps += count;
  }
  return { carry, metrics: Float32Array.from(totals), first, steps, finite };
}

/** The noise of the steps from `first` on. */
async function drawn(key: StreamKey, pass: number, first: number, steps: number, size: number) {
  const values = new Int32Array(steps * size);
  for (let step = 0; step < steps; step++) {
    values.set(await noise(key, pass, first + step, size), step * size);
  }
  return values;
}

/** How many of the first steps have finite sums alone, of the sums of so many. */
function finiteSteps(sums: reports.Float32, steps: number): number {
  const at = sums.findIndex((value) => !Number.isFinite(value));
  return at < 0 ? steps : Math.floor((at * steps) / sums.length);
}

/** The inputs of a pass's steps that change from call to call: tensors whose buffers are filled again and again.
 *
 * most: the steps of a call. A graph of many steps has an axis for them, a graph of one has not.
 */
class Buffers {
  readonly most: number;
  readonly #work: Work;
  readonly #size: number;
  readonly #many: boolean;
  readonly #tensors = new Map<number, Record<string, Tensor>>();
  readonly #rows: ReadonlyMap<string, Words>;

  constructor(work: Work, pass: plans.PassPlan) {
    [this.#work, this.#size, this.#many] = [work, pass.loop.batch_size, work.graphs.has(plans.stepsGraph(pass.name))];
    const fitting = Math.floor(plans.MOST_CALL_BYTES / (this.#size * plans.exampleBytes(work.plan)));
    this.most = this.#many ? Math.max(1, Math.min(plans.MOST_STEPS, fitting)) : 1;
    const { columns } = work.examples;
    this.#rows = new Map(work.plan.examples.fields.map(({ name }) => [name, words(columns.get(name)!.values)]));
  }

  /** The shape of what a call of so many steps takes or gives, by the shape of one step's. */
  shape(steps: number, ...shape: readonly number[]): number[] {
    return this.#many ? [steps, ...shape] : [...shape];
  }

  /** The tensors of a call, with those examples; mask and noise of all its steps. */
  fill(indices: Uint32Array, mask: reports.Float32, noise: Int32Array | null): Tensors {
    const { count } = this.#work.examples;
    const steps = mask.length / this.#size;
    const tensors = this.#tensors.get(steps) ?? this.#made(steps);
    floats(tensors["mask"]!).set(mask);
    (tensors["noise"]!.data as Int32Array).set(noise ?? []);
    for (const [name, from] of this.#rows) {
      take(from, indices, from.length / count, words(tensors[`example.${name}`]!.data as Values));
    }
    return tensors;
  }

  #made(steps: number): Record<string, Tensor> {
    const { engine, plan, examples } = this.#work;
    const { Tensor } = engine.ort;
    const [values, shape] = [steps * this.#size, this.shape(steps, this.#size)];
    const tensors: Record<string, Tensor> = {
      mask: new Tensor("float32", new Float32Array(values), shape),
      noise: new Tensor("int32", new Int32Array(values), shape),
    };
    for (const { name, dtype, shape: ofOne } of plan.examples.fields) {
      const column = examples.columns.get(name)!.values;
      const width = column.length / examples.count;
      const buffer = new (column.constructor as new (size: number) => Values)(values * width);
      tensors[`example.${name}`] = new Tensor(dtype, buffer, [...shape, ...ofOne]);
    }
    if (this.#tensors.size === plans.CALLS_HELD) this.#tensors.clear();
    this.#tensors.set(steps, tensors);
    return tensors;
  }
}

type Words = Uint8Array | Uint32Array;

/** Copy the rows of those indices, of so many words. */
function take(from: Words, indices: Uint32Array, width: number, into: Words): void {
  let at = 0;
  for (let place = 0; place < indices.length; place++) {
    const start = indices[place]! * width;
    if (width > NARROW) into.set(from.subarray(start, start + width), at);
    else for (let word = 0; word < width; word++) into[at + word] = from[start + word]!;
    at += width;
  }
}

/** Values as words to copy: of 32 bits, or bytes where a value is one. */
function words({ buffer, byteOffset, byteLength, BYTES_PER_ELEMENT }: Values): Words {
  return BYTES_PER_ELEMENT === 1
    ? new Uint8Array(buffer, byteOffset, byteLength)
    : new Uint32Array(buffer, byteOffset, byteLength / Uint32Array.BYTES_PER_ELEMENT);
}

function graphOf(work: Work, name: string): Graph {
  const graph = work.graphs.get(name);
  if (graph === undefined) {
    throw new PlanRefused(`plan ${work.plan.name} has no graph ${name}`);
  }
  return graph;
}

function floats(tensor: Tensor): reports.Float32 {
  return tensor.data as reports.Float32;
}

/** Free the memory of tensors that the engine made and nothing reads any more. */
export function letGoOf(tensors: readonly Tensor[]): void {
  for (const tensor of tensors) letGo(floats(tensor));
}

function prefixed(prefix: string, tensors: Tensors): Record<string, Tensor> {
  return Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [`${prefix}.${name}`, tensor]));
}

function unprefixed(tensors: Tensors): Record<string, Tensor> {
  return Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name.slice("next.".length), tensor]));
}

/** The reason for a report that is not finite, after `finite` steps with a finite loss. */
function cause(steps: number, finite: number): string {
  if (finite === 0) {
    return "the loss was not finite in the first step, before any training here, though the examples are";
  }
  if (finite === 1 && steps > 1) {
    return "after one step the loss was not finite: the gradient is not, or the learning rate is far too large";
  }
  if (finite < steps) {
    return "the loss left the finite numbers in later steps: training diverged, a lower client_lr is the remedy";
  }
  return "every loss was finite: the last gradient is not, or training diverged in the last step";
}

/** Refuse a plan whose report cannot be filled from its passes. */
function checkSums(plan: plans.Plan): void {
  if (plan.examples.fields.length === 0) {
    throw new PlanRefused(`plan ${plan.name} names no example field, so there is nothing to count`);
  }
  if (plan.report.bounded && !plan.broadcast.some(({ name, size }) => name === reports.CLIP && size === 1)) {
    throw new PlanRefused(`plan ${plan.name} bounds the report, and its broadcast has no ${reports.CLIP}: the bound`);
  }
  const sums = new Map(plan.passes.map((pass) => [reports.metricsSegment(pass.name), pass.metrics.length]));
  const measured = plan.passes.length > 0 && plan.passes.every(({ metrics }) => metrics.length >= 2);
  if (measured && plan.report.segments.some(reports.countsLosses)) sums.set(reports.LOSSES, reports.LOSSES_SIZE);
  for (const { name, size, reduction } of reports.unweighted(plan.report)) {
    if (reduction === "sum" && sums.get(name) !== size) {
      throw new PlanRefused(`plan ${plan.name} wants ${size} sums in segment ${name}, which no pass makes`);
    }
  }
}
