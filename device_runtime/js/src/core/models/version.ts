/** A version of a model: what it is made of, and the same ready to predict. */

import type { Tensor } from "onnxruntime-common";
import type { Bytes } from "../bytes.ts";
import { FormatError, InputRefused, ModelRefused, PlanRefused } from "../errors.ts";
import { decodeFrozen } from "../plans/checkpoint.ts";
import { type Engine, flatTensor, Graph } from "../plans/engine.ts";
import { KINDS, type Values } from "../plans/examples.ts";
import * as plans from "../plans/plan.ts";
import { Work } from "../texts/characters.ts";
import { loadedTokenizer, type Tokenizer, tokensOf } from "../texts/tokenizer.ts";
import type { ModelRelease } from "../wire/statements.ts";

/** By name the values of n rows, one row after the other, each in the typed array of its element type. */
export type Columns = Readonly<Record<string, Values>>;
/** The values of inputs: of one with a tokenizer, n texts will do. */
export type Inputs = Readonly<Record<string, Values | readonly string[]>>;
type Get = (ref: plans.BlobRef) => Promise<Bytes>;

/** Rows of a trial. */
const TRIED = 3;

/** What a version is made of: its plan, and its blobs by kind: `graph`, `parameters`, `frozen` if there is any, and
 * `tokenizer.FIELD` for each. */
export interface Recipe {
  readonly plan: plans.Plan;
  readonly predict: NonNullable<plans.Plan["predict"]>;
  readonly blobs: ReadonlyMap<string, plans.BlobRef>;
}

/** The recipe of a release. get: a blob's bytes, checked. Throws ModelRefused, PlanRefused, and as `get`. */
export async function recipeOf(release: ModelRelease, get: Get): Promise<Recipe> {
  const plan = plans.decodePlan(await get(release.plan), 1);
  const graph = plan.predict?.graphs[plans.FORMAT];
  if (plan.predict === null || graph === undefined) {
    const forms = plan.predict === null ? "no format" : Object.keys(plan.predict.graphs).join(", ");
    throw new ModelRefused(`plan ${plan.name} predicts in ${forms}, this device runs ${plans.FORMAT}`);
  }
  const blobs = new Map([
    ["graph", graph],
    ["parameters", release.parameters],
  ]);
  if (plan.frozen !== null) blobs.set("frozen", plan.frozen.blob);
  for (const { name, tokenizer } of plan.examples.fields) {
    if (tokenizer !== undefined) blobs.set(`tokenizer.${name}`, tokenizer.blob);
  }
  return { plan, predict: plan.predict, blobs };
}

/** A version that predicts. Once it is retired, its memory is free when the last call that uses it has ended. */
export class Version {
  readonly number: number;
  readonly #engine: Engine;
  readonly #graph: Graph;
  readonly #constants: Readonly<Record<string, Tensor>>;
  readonly #inputs: readonly plans.Field[];
  readonly #outputs: readonly plans.Field[];
  readonly #tokenizers: ReadonlyMap<string, Tokenizer>;
  #calls = 0;
  #isRetired = false;

  private constructor(
    engine: Engine,
    number: number,
    recipe: Recipe,
    graph: Graph,
    constants: Record<string, Tensor>,
    tokenizers: ReadonlyMap<string, Tokenizer>,
  ) {
    this.#tokenizers = tokenizers;
    this.#engine = engine;
    this.number = number;
    this.#graph = graph;
    this.#constants = constants;
    const { fields } = recipe.plan.examples;
    this.#inputs = recipe.predict.inputs.map((name) => fields.find((field) => field.name === name)!);
    this.#outputs = recipe.predict.outputs;
  }

  /** The version of a release. Throws ModelRefused or PlanRefused when its parts do not fit, and as `get`. */
  static async load(engine: Engine, release: ModelRelease, recipe: Recipe, get: Get): Promise<Version> {
    const params = { name: "params", size: plans.parameterCount(recipe.plan), dtype: "float32" as const };
    const specs = new Map<string, readonly plans.FrozenVector[]>([["parameters", [params]]]);
    if (recipe.plan.frozen !== null) specs.set("frozen", recipe.plan.frozen.vectors);
    const constants: Record<string, Tensor> = {};
    for (const [kind, wanted] of specs) {
      for (const [name, values] of vectorsOf(await get(recipe.blobs.get(kind)!), wanted, kind)) {
        const edge = kind === "frozen" ? `frozen.${name}` : name;
        constants[edge] = flatTensor(engine, values);
      }
    }
    const tokenizers = new Map<string, Tokenizer>();
    for (const field of recipe.plan.examples.fields) {
      const ref = recipe.blobs.get(`tokenizer.${field.name}`);
      if (ref !== undefined) tokenizers.set(field.name, loadedTokenizer(field, await get(ref), new Work()));
    }
    const graph = await Graph.load(engine, await get(recipe.blobs.get("graph")!), plans.PREDICT);
    return new Version(engine, release.number, recipe, graph, constants, tokenizers);
  }

  /** The outputs for n rows, at least 1. Throws InputRefused, and RuntimeFailed when an operator fails. */
  async predict(given: Inputs): Promise<Columns> {
    const [inputs, rows] = this.#tensors(given);
    this.#calls += 1;
    try {
      const wanted = new Map(this.#outputs.map(({ name, shape }) => [name, [rows, ...shape]]));
      const types = (name: string) => this.#outputs.find((field) => field.name === name)!.dtype;
      const found = await this.#graph.run({ ...this.#constants, ...inputs }, wanted, types);
      return Object.fromEntries([...wanted.keys()].map((name) => [name, found[name]!.data as Values]));
    } finally {
      this.#calls -= 1;
      await this.#letGo();
    }
  }

  /** Predict for rows that are always the same. Throws ModelRefused unless outputs are finite. */
  async tryOut(): Promise<void> {
    let outputs: Columns;
    try {
      const inputs = this.#inputs.map((field) => {
        return [field.name, this.#tokenizers.has(field.name) ? Array<string>(TRIED).fill("a") : drawn(field)] as const;
      });
      outputs = await this.predict(Object.fromEntries(inputs));
    } catch (error) {
      throw new ModelRefused(`version ${this.number} fails on trial: ${(error as Error).message}`);
    }
    for (const [name, values] of Object.entries(outputs)) {
      if (values instanceof Float32Array && !values.every(Number.isFinite)) {
        throw new ModelRefused(`version ${this.number} gives ${name} that is not finite on trial`);
      }
    }
  }

  /** Let it go after the last call. */
  async retire(): Promise<void> {
    this.#isRetired = true;
    await this.#letGo();
  }

  async #letGo(): Promise<void> {
    if (this.#isRetired && this.#calls === 0) {
      this.#isRetired = false; // once
      await this.#graph.release();
    }
  }

  /** The inputs as tensors, and n. */
  #tensors(given: Inputs): [Record<string, Tensor>, number] {
    const names = this.#inputs.map(({ name }) => name);
    const keys = Object.keys(given);
    if (keys.length !== names.length || !names.every((name) => Object.hasOwn(given, name))) {
      throw new InputRefused(`the model takes the inputs ${names.sort()}, not ${keys.sort()}`);
    }
    const tensors: Record<string, Tensor> = {};
    let rows = -1;
    for (const field of this.#inputs) {
      const values = this.#values(field, given[field.name]!);
      const count = rowsOf(field, values);
      if (count === 0 || (rows !== -1 && rows !== count)) {
        throw new InputRefused(`input ${field.name} holds ${count} rows; all must hold the same number, at least 1`);
      }
      rows = count;
      tensors[`example.${field.name}`] = new this.#engine.ort.Tensor(field.dtype, values, [count, ...field.shape]);
    }
    return [tensors, rows];
  }

  /** The values of an input, or the tokens of its texts. Throws InputRefused. */
  #values(field: plans.Field, given: Values | readonly string[]): Values {
    const tokenizer = this.#tokenizers.get(field.name);
    const isText = Array.isArray(given) && given.every((text) => typeof text === "string");
    if (tokenizer === undefined || !isText) return given as Values;
    try {
      return tokensOf(field, tokenizer, given, given.length, new Work()).ids;
    } catch (error) {
      throw error instanceof PlanRefused ? new InputRefused(error.message) : error;
    }
  }
}

/** The number of rows of an input. Throws InputRefused when it is of another type or size, or outside its range. */
function rowsOf({ name, dtype, shape, high }: plans.Field, values: Values): number {
  const width = shape.reduce((size, axis) => size * axis, 1);
  const count = values instanceof KINDS[dtype] ? values.length / width : Number.NaN;
  if (!Number.isInteger(count)) {
    const found = `${values?.constructor?.name ?? typeof values} of ${values?.length ?? "no"} values`;
    throw new InputRefused(`input ${name} is ${found}, the model takes ${KINDS[dtype].name} of n × ${width} values`);
  }
  if (high !== null && dtype !== "float32" && !(values as Int32Array).every((value) => value >= 0 && value < high)) {
    throw new InputRefused(`input ${name} holds a value outside 0 … ${BigInt(high) - 1n}`);
  }
  return count;
}

/** Rows of a trial for one input: waves, or integers from 0 on; integers without a bound are 0. */
function drawn({ dtype, shape, high }: plans.Field): Values {
  const size = TRIED * shape.reduce((sum, axis) => sum * axis, 1);
  const most = Number(high ?? 1);
  if (dtype === "float32") return Float32Array.from({ length: size }, (_, place) => Math.sin(1 + place));
  if (dtype === "int64") return BigInt64Array.from({ length: size }, (_, place) => BigInt(place % most));
  return new KINDS[dtype](Array.from({ length: size }, (_, place) => place % most));
}

function vectorsOf(data: Bytes, specs: readonly plans.FrozenVector[], kind: string) {
  try {
    const vectors = decodeFrozen(data, specs);
    for (const values of vectors.values()) {
      if (!values.every(Number.isFinite)) throw new ModelRefused(`${kind} of the version hold an infinity or NaN`);
    }
    return vectors;
  } catch (error) {
    throw error instanceof FormatError
      ? new ModelRefused(`${kind} of the version do not fit its plan: ${error.message}`)
      : error;
  }
}
