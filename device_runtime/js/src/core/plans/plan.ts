/** A plan: the loops, graphs by digest, examples and report of a device, as data. Spec: docs/spec/plan.md.
 *
 * A plan names no algorithm, so a device runs new algorithms without new code. The names of graphs, and of their inputs
 * and outputs, are those of §2.
 */

import * as v from "valibot";
import { type Bytes, checked, count, digest, finite, hex, parseJson } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import { FormatError, PlanRefused } from "../errors.ts";
import { checkLayout, layoutSchema } from "./report.ts";

const PLAN_VERSION = 1;
/** The format of graphs that this runtime runs. */
export const FORMAT = "onnx";
/** The longest plan, in bytes of JSON. */
export const MOST_PLAN_BYTES = 4 * 2 ** 20;
/** The name of the graph that makes the mean segments of the report. */
export const REPORT = "report";
const KEPT = ["kept.first", "kept.next"];
/** The name of the graph that gives the model's outputs for examples. */
export const PREDICT = "predict";

/** The steps of one call, if a graph takes many: enough to make the cost of the call small, and few enough to ask
 * `keepGoing` often.
 */
export const MOST_STEPS = 64;
export const MOST_CALL_BYTES = 2 ** 19;
/** The kinds of calls that keep their buffers: a full one, and the last of an epoch. */
export const CALLS_HELD = 2;

const ELEMENT_BYTES = { float32: 4, int64: 8, int32: 4, uint8: 1 } as const;
const positive = v.pipe(count, v.minValue(1));
const vectorSchema = v.object({ name: v.string(), size: count });
export const blobSchema = v.object({ sha256: digest, size: count });
const loopSchema = v.object({
  batch_size: positive,
  epochs: v.optional(positive, 1),
  steps: v.nullish(positive, null),
  shuffle: v.optional(v.boolean(), true),
});
const passSchema = v.object({
  name: v.string(),
  loop: loopSchema,
  carry: v.array(vectorSchema),
  metrics: v.array(v.string()),
  noise: v.optional(v.boolean(), false),
});
const fieldSchema = v.object({
  name: v.string(),
  dtype: v.picklist(Object.keys(ELEMENT_BYTES) as (keyof typeof ELEMENT_BYTES)[]),
  shape: v.optional(v.array(count), []),
  high: v.nullish(v.union([v.pipe(v.number(), v.integer()), v.bigint()]), null),
  tokenizer: v.exactOptional(
    v.object({
      blob: blobSchema,
      padding: v.optional(count, 0),
      trial: v.optional(v.array(v.tuple([v.string(), v.array(count)])), []),
    }),
  ),
  ignored: v.exactOptional(v.pipe(v.number(), v.integer(), v.minValue(-(2 ** 31)), v.maxValue(-1))),
});
const holdOutSchema = v.object({
  share: v.pipe(finite, v.gtValue(0), v.ltValue(1)),
  side: v.optional(v.picklist(["train", "held-out"]), "train"),
});
const frozenSchema = v.object({
  ...vectorSchema.entries,
  dtype: v.optional(v.picklist(["float32", "uint8"]), "float32"),
});
const predictSchema = v.object({
  inputs: v.array(v.string()),
  outputs: v.array(fieldSchema),
  batch_size: positive,
  graphs: v.record(v.string(), blobSchema),
});
const tripMembers = {
  broadcast: v.array(vectorSchema),
  passes: v.array(passSchema),
  report: layoutSchema,
  graphs: v.record(v.string(), v.record(v.string(), blobSchema)),
};
const tripSchema = v.object(tripMembers);
const planSchema = v.object({
  ...tripMembers,
  name: v.string(),
  schema: v.object({ tensors: v.array(v.object({ name: v.string(), shape: v.array(count) })) }),
  examples: v.object({
    fields: v.array(fieldSchema),
    collection: v.optional(v.string(), "default"),
    hold_out: v.nullish(holdOutSchema, null),
  }),
  frozen: v.nullish(v.object({ blob: blobSchema, vectors: v.array(frozenSchema) }), null),
  second: v.nullish(tripSchema, null),
  kept: v.optional(v.array(vectorSchema), []),
  predict: v.nullish(predictSchema, null),
  question: v.exactOptional(v.pipe(v.string(), v.regex(/^.{1,4000}$/su))),
});

export type VectorSpec = v.InferOutput<typeof vectorSchema>;
/** A vector that no round changes. uint8: codes of weights in few bits. */
export type FrozenVector = v.InferOutput<typeof frozenSchema>;
export type BlobRef = v.InferOutput<typeof blobSchema>;
export type Loop = v.InferOutput<typeof loopSchema>;
export type PassPlan = v.InferOutput<typeof passSchema>;
export type Field = v.InferOutput<typeof fieldSchema>;
type TripPlan = v.InferOutput<typeof tripSchema>;
/** A plan as one round runs it: of several `trips`, it has the members of the round's trip. `question`: what a plan that
 * trains nothing asks of the examples, in words for people.
 */
export type Plan = Omit<v.InferOutput<typeof planSchema>, "second"> & { readonly trips: number };

/** The plan that round `round` runs, from 1. Throws PlanRefused for malformed bytes, or another version. */
export function decodePlan(data: Bytes, round: number): Plan {
  if (data.length > MOST_PLAN_BYTES) {
    throw new PlanRefused(`a plan of ${data.length} bytes, at most ${MOST_PLAN_BYTES} are read`);
  }
  try {
    const value = parseJson(data, "plan");
    const { version } = checked(v.object({ version: count }), value, "plan");
    if (version !== PLAN_VERSION) {
      throw new PlanRefused(`plan of version ${version}, this device knows ${PLAN_VERSION}; update the older side`);
    }
    const { second, ...first } = checked(planSchema, value, "plan");
    const trips: TripPlan[] = second === null ? [first] : [first, second];
    for (const trip of trips) checkTrip(trip, first.kept.length > 0);
    for (const field of first.examples.fields) checkField(field);
    checkPredict(first);
    return { ...first, ...trips[(round - 1) % trips.length], trips: trips.length };
  } catch (error) {
    throw error instanceof FormatError ? new PlanRefused(error.message) : error;
  }
}

/** The plan that round `round` trains by. Throws PlanRefused as `decodePlan`, and where devices keep vectors. */
export function decodeTraining(data: Bytes, round: number): Plan {
  const plan = decodePlan(data, round);
  if (plan.kept.length > 0) {
    throw new PlanRefused(`plan ${plan.name} has devices keep vectors between rounds: it needs the runtime in Python`);
  }
  return plan;
}

function checkTrip(trip: TripPlan, keeps: boolean): void {
  checkLayout(trip.report);
  for (const [format, graphs] of Object.entries(trip.graphs)) {
    const wanted = [
      ...trip.passes.flatMap(({ name }) => [`${name}.begin`, loopGraph(Object.keys(graphs), name)]),
      REPORT,
      ...(keeps ? KEPT : []),
    ];
    if (Object.keys(graphs).sort().join() !== [...new Set(wanted)].sort().join()) {
      throw new FormatError(`format ${format} has graphs ${Object.keys(graphs).sort()}, the passes need ${wanted}`);
    }
  }
}

function checkField({ name, dtype, shape, high, tokenizer, ignored }: Field): void {
  if (ignored !== undefined && (!dtype.startsWith("int") || high === null)) {
    throw new FormatError(`field ${name} ignores ${ignored}: it must be int32 or int64, and have a high`);
  }
  if (tokenizer === undefined) return;
  if (dtype !== "int32" || shape.length !== 1 || shape[0] === 0 || high === null) {
    throw new FormatError(
      `field ${name} has a tokenizer and is ${dtype}[${shape}]; tokens are int32[length], with the size of the ` +
        "vocabulary as high",
    );
  }
  if (tokenizer.padding >= high) {
    throw new FormatError(`field ${name} is padded with ${tokenizer.padding}; tokens are below ${high}, its high`);
  }
}

function checkPredict({ predict, examples, graphs }: Omit<Plan, "trips">): void {
  if (predict === null) {
    return;
  }
  const names = predict.outputs.map(({ name }) => name);
  const known = predict.inputs.every((input) => examples.fields.some(({ name }) => name === input));
  if (!known || predict.inputs.length === 0 || names.length === 0 || new Set(names).size < names.length) {
    throw new FormatError(`the predict graph reads ${predict.inputs} and gives ${names}`);
  }
  if (Object.keys(predict.graphs).sort().join() !== Object.keys(graphs).sort().join()) {
    throw new FormatError(
      `it predicts in ${Object.keys(predict.graphs)}, its other graphs are in ${Object.keys(graphs)}`,
    );
  }
}

/** The name of a pass's graph of many steps, which runs any number of batches. */
export function stepsGraph(pass: string): string {
  return `${pass}.steps`;
}

/** The name of the pass's loop graph that is in `graphs`: of one step, or of many. */
export function loopGraph(graphs: readonly string[], pass: string): string {
  const many = stepsGraph(pass);
  return graphs.includes(many) ? many : `${pass}.step`;
}

/** The graphs of a plan that this device runs, by name. Throws PlanRefused when it has none in this format. */
export function runGraphs({ name, graphs }: Plan): Readonly<Record<string, BlobRef>> {
  const found = graphs[FORMAT];
  if (found !== undefined) return found;
  throw new PlanRefused(`plan ${name} has graphs in ${Object.keys(graphs)}, this device runs ${FORMAT}`);
}

/** The blobs that a device keeps between rounds: its graphs, frozen vectors and tokenizers. */
export function keptRefs(plan: Plan): BlobRef[] {
  const frozen = plan.frozen === null ? [] : [plan.frozen.blob];
  const tokenizers = plan.examples.fields.flatMap(({ tokenizer }) => (tokenizer === undefined ? [] : [tokenizer.blob]));
  return [...Object.values(plan.graphs[FORMAT] ?? {}), ...frozen, ...tokenizers];
}

/** The number of parameters of a plan's model. */
export function parameterCount(plan: Plan): number {
  return plan.schema.tensors.reduce((sum, tensor) => sum + tensor.shape.reduce((size, axis) => size * axis, 1), 0);
}

/** The bytes of a plan's largest batch, with its mask and noise, or of the calls of many steps that are held. */
export function batchBytes(plan: Plan): number {
  const batch = exampleBytes(plan) * Math.max(0, ...plan.passes.map(({ loop }) => loop.batch_size));
  const graphs = Object.keys(plan.graphs["onnx"] ?? {});
  const many = plan.passes.some(({ name }) => graphs.includes(stepsGraph(name)));
  return many ? CALLS_HELD * Math.max(batch, MOST_CALL_BYTES) : batch;
}

/** The bytes of one example in a batch: its fields, its place in the mask and in the noise. */
export function exampleBytes({ examples }: Plan): number {
  const fields = examples.fields.map(({ dtype, shape }) =>
    shape.reduce((size, axis) => size * axis, ELEMENT_BYTES[dtype]),
  );
  return fields.reduce((sum, size) => sum + size, 2 * ELEMENT_BYTES.float32);
}

/** Whether bytes are those that a reference names, by length and digest. */
export async function isBlob(ref: BlobRef, data: Bytes): Promise<boolean> {
  return data.length === ref.size && hex(await sha256(data)) === ref.sha256;
}

/** The number of batches of a loop over `examples` examples. */
export function stepCount(loop: Loop, examples: number): number {
  return Math.min(loop.epochs * Math.ceil(examples / loop.batch_size), loop.steps ?? Infinity);
}
