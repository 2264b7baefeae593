/** The runner: it loops over batches, runs graphs and concatenates the report. It contains no algorithm.
 *
 * Spec: docs/spec/plan.md §2, §3.
 */

import type { Tensor } from "onnxruntime-common";
import { batches, noise, type StreamKey } from "./batching.ts";
import { letGo } from "./bytes.ts";
import type { Engine, Graph, Tensors } from "./engine.ts";
import { DeadlinePassed, NonFiniteReport, PlanRefused } from "./errors.ts";
import type { Examples, Values } from "./examples.ts";
import { type PassPlan, type Plan, REPORT } from "./plan.ts";
import { CLIP, concatenate, encodeMeans, type Float32, metricsSegment, unweighted, weightOf } from "./report.ts";

/** The unweighted `values` (V,) of a report and its `weight`, from so many local `examples`; steps of all passes. */
export interface TrainingResult {
  readonly values: Float32;
  readonly weight: number;
  readonly examples: number;
  readonly steps: number;
}

/** The work of one assignment: a plan, its loaded graphs by name, and their inputs; at least one example.
 *
 * keepGoing: asked before every step; what it throws ends the work, and so does false, with DeadlinePassed.
 */
export interface Work {
  readonly engine: Engine;
  readonly plan: Plan;
  readonly graphs: ReadonlyMap<string, Graph>;
  readonly broadcast: ReadonlyMap<string, Float32>;
  readonly frozen: ReadonlyMap<string, Float32>;
  readonly examples: Examples;
  readonly key: StreamKey;
  readonly keepGoing: () => boolean;
}

/** The end of a pass: its last carry, its metric sums, its steps, and how many of the first had finite metrics. */
interface Swept {
  readonly carry: Record<string, Tensor>;
  readonly metrics: Float32;
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
  const known: Record<string, Tensor> = {};
  for (const [prefix, vectors] of Object.entries({ broadcast: work.broadcast, frozen: work.frozen })) {
    for (const [name, vector] of vectors) {
      known[`${prefix}.${name}`] = new engine.ort.Tensor("float32", vector, [vector.length]);
    }
  }
  const parts = new Map<string, Float32>();
  const carries: Tensor[] = [];
  let [steps, finite] = [0, 0];
  for (const [index, pass] of plan.passes.entries()) {
    const swept = await sweep(work, known, pass, index);
    Object.assign(known, prefixed(`${pass.name}.carry`, swept.carry));
    carries.push(...Object.values(swept.carry));
    parts.set(metricsSegment(pass.name), swept.metrics);
    finite += finite === steps ? swept.finite : 0;
    steps += swept.steps;
  }
  const means = plan.report.segments.filter((segment) => segment.reduction === "mean");
  const made = await graphOf(work, REPORT).run(known, new Map(means.map(({ name, size }) => [name, size])));
  letGoOf(carries);
  const outputs = new Map(Object.entries(made).map(([name, tensor]) => [name, floats(tensor)]));
  for (const [name, values] of await encodeMeans(plan.report, outputs, work.key)) {
    parts.set(name, values);
  }
  const weight = weightOf(plan.report, examples.count);
  try {
    const clip = plan.report.bounded ? work.broadcast.get(CLIP)?.[0] : undefined;
    const values = concatenate(plan.report, parts, weight, clip);
    letGoOf(Object.values(made));
    return { values, weight, examples: examples.count, steps };
  } catch (error) {
    throw error instanceof NonFiniteReport ? new NonFiniteReport(`${error.message}: ${cause(steps, finite)}`) : error;
  }
}

/** Run all steps of a pass. */
async function sweep(work: Work, known: Tensors, pass: PassPlan, index: number): Promise<Swept> {
  const { examples, key } = work;
  const size = pass.loop.batch_size;
  const sizes = new Map(pass.carry.map((vector) => [`next.${vector.name}`, vector.size]));
  const batch = new BatchBuffers(work, size);
  const totals = new Float64Array(pass.metrics.length);
  let carry = unprefixed(await graphOf(work, `${pass.name}.begin`).run(known, sizes));
  const step = graphOf(work, `${pass.name}.step`);
  const wanted = new Map([...sizes, ["metrics", totals.length]]);
  let [steps, finite] = [0, 0];
  for await (const { indices, mask } of batches(pass.loop, examples.count, key, index)) {
    if (!work.keepGoing()) {
      throw new DeadlinePassed(`stopped in pass ${pass.name} after ${steps} steps: the report would come too late`);
    }
    const drawn = pass.noise ? await noise(key, index, steps, size) : null;
    const inputs = batch.fill(indices, mask, drawn);
    const { metrics, ...next } = await step.run({ ...known, ...inputs, ...prefixed("carry", carry) }, wanted);
    letGoOf(Object.values(carry));
    carry = unprefixed(next);
    const sums = floats(metrics!);
    sums.forEach((value, place) => {
      totals[place]! += value;
    });
    finite += Number(finite === steps && sums.every(Number.isFinite));
    steps += 1;
  }
  return { carry, metrics: Float32Array.from(totals), steps, finite };
}

/** The inputs of a step that change from batch to batch: tensors whose buffers are filled again and again. */
class BatchBuffers {
  readonly #examples: Examples;
  readonly #mask: Float32;
  readonly #noise: Int32Array<ArrayBuffer>;
  readonly #columns: ReadonlyMap<string, Values>;
  readonly #tensors: Tensors;

  constructor({ engine, plan, examples }: Work, size: number) {
    const { Tensor } = engine.ort;
    this.#examples = examples;
    [this.#mask, this.#noise] = [new Float32Array(size), new Int32Array(size)];
    const tensors: Record<string, Tensor> = {
      mask: new Tensor("float32", this.#mask, [size]),
      noise: new Tensor("int32", this.#noise, [size]),
    };
    const columns = new Map<string, Values>();
    for (const { name, dtype, shape } of plan.examples.fields) {
      const { values } = examples.columns.get(name)!;
      const width = values.length / examples.count;
      const buffer = new (values.constructor as new (size: number) => Values)(size * width);
      columns.set(name, buffer);
      tensors[`example.${name}`] = new Tensor(dtype, buffer, [size, ...shape]);
    }
    this.#columns = columns;
    this.#tensors = tensors;
  }

  fill(indices: readonly number[], mask: Float32, noise: Int32Array | null): Tensors {
    this.#mask.set(mask);
    this.#noise.set(noise ?? []);
    for (const [name, buffer] of this.#columns) {
      const { values } = this.#examples.columns.get(name)!;
      const width = values.length / this.#examples.count;
      indices.forEach((index, place) => {
        buffer.set(values.subarray(index * width, (index + 1) * width) as never, place * width);
      });
    }
    return this.#tensors;
  }
}

function graphOf(work: Work, name: string): Graph {
  const graph = work.graphs.get(name);
  if (graph === undefined) {
    throw new PlanRefused(`plan ${work.plan.name} has no graph ${name}`);
  }
  return graph;
}

function floats(tensor: Tensor): Float32 {
  return tensor.data as Float32;
}

/** Give the memory of tensors back that the engine made, and that nothing reads any more. */
function letGoOf(tensors: readonly Tensor[]): void {
  for (const tensor of tensors) letGo(floats(tensor));
}

function prefixed(prefix: string, tensors: Tensors): Record<string, Tensor> {
  return Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [`${prefix}.${name}`, tensor]));
}

function unprefixed(tensors: Tensors): Record<string, Tensor> {
  return Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name.slice("next.".length), tensor]));
}

/** The reason that a report is not finite, when the loss was finite in so many of the first steps. */
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
function checkSums(plan: Plan): void {
  if (plan.examples.fields.length === 0) {
    throw new PlanRefused(`plan ${plan.name} names no example field, so there is nothing to count`);
  }
  if (plan.report.bounded && !plan.broadcast.some(({ name, size }) => name === CLIP && size === 1)) {
    throw new PlanRefused(`plan ${plan.name} bounds the report, and its broadcast has no ${CLIP}: the bound`);
  }
  const sums = new Map(plan.passes.map((pass) => [metricsSegment(pass.name), pass.metrics.length]));
  for (const { name, size, reduction } of unweighted(plan.report)) {
    if (reduction === "sum" && sums.get(name) !== size) {
      throw new PlanRefused(`plan ${plan.name} wants ${size} sums in segment ${name}, which no pass makes`);
    }
  }
}
