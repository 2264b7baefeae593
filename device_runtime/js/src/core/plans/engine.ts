/** The engine of ONNX graphs: any implementation of `onnxruntime-common`'s interface, on one thread.
 *
 * onnxruntime-node, onnxruntime-web and onnxruntime-react-native have that interface, each with its own copy of the
 * package, so apps pass the engine in; it is never imported here. Traps, found by experiment: wasm ignores preallocated
 * outputs, so the engine allocates them; React Native ignores a view's offset, so every array has its own buffer.
 */

import type { InferenceSession, Tensor } from "onnxruntime-common";
import type { Bytes } from "../bytes.ts";
import { PlanRefused, RuntimeFailed } from "../errors.ts";
import { checkGraph } from "./onnx-check.ts";
import type { BlobRef } from "./plan.ts";

/** What an implementation of ONNX Runtime must offer. */
export interface OnnxRuntime {
  readonly InferenceSession: {
    /** A session that runs a graph. */
    create(model: Bytes, options?: InferenceSession.SessionOptions): Promise<InferenceSession>;
  };
  readonly Tensor: new (
    type: "float32" | "int64" | "int32" | "uint8",
    data: Float32Array | BigInt64Array | Int32Array | Uint8Array,
    dims: readonly number[],
  ) => Tensor;
}

/** An implementation, with its name and version as stated to a coordinator. */
export interface Engine {
  readonly ort: OnnxRuntime;
  readonly name: string;
}

export type Tensors = Readonly<Record<string, Tensor>>;

/** A flat vector at the edge of a graph: numbers, or codes of weights. */
export function flatTensor({ ort }: Engine, values: Float32Array | Uint8Array): Tensor {
  return new ort.Tensor(values instanceof Uint8Array ? "uint8" : "float32", values, [values.length]);
}

/** Flat vectors at the edge of a graph, by names that begin with a prefix. */
export function flatTensors(engine: Engine, prefix: string, vectors: ReadonlyMap<string, Float32Array | Uint8Array>) {
  return Object.fromEntries([...vectors].map(([name, vector]) => [`${prefix}.${name}`, flatTensor(engine, vector)]));
}

const OPTIONS: InferenceSession.SessionOptions = {
  executionProviders: ["cpu"],
  intraOpNumThreads: 1,
  interOpNumThreads: 1,
  executionMode: "sequential",
  // The last level rearranges images for convolutions whose weights are constants; ours are inputs.
  graphOptimizationLevel: "extended",
  // One block for a whole step holds more memory than the arena, which frees as it goes.
  enableMemPattern: false,
  logSeverityLevel: 4,
  extra: {
    session: { intra_op: { allow_spinning: "0" }, inter_op: { allow_spinning: "0" }, load_model_format: "ONNX" },
  },
};

/** A graph that is ready to run. */
export class Graph {
  readonly name: string;
  readonly #session: InferenceSession;

  private constructor(session: InferenceSession, name: string) {
    this.#session = session;
    this.name = name;
  }

  /** Throws PlanRefused when a plan may not contain the graph, or the engine cannot read it. */
  static async load(engine: Engine, graph: Bytes, name: string): Promise<Graph> {
    checkGraph(graph, name);
    try {
      return new Graph(await engine.ort.InferenceSession.create(graph, OPTIONS), name);
    } catch (error) {
      throw new PlanRefused(`ONNX Runtime cannot load graph ${name}: ${String(error)}`);
    }
  }

  /** The outputs `wanted` (name → shape), from those inputs that the graph declares. types: of outputs, by name.
   *
   * Throws PlanRefused when inputs or outputs are not those of the plan, RuntimeFailed when the graph fails.
   */
  async run(
    inputs: Tensors,
    wanted: ReadonlyMap<string, readonly number[]>,
    types: (name: string) => string = () => "float32",
  ): Promise<Record<string, Tensor>> {
    const { inputNames, outputNames } = this.#session;
    const missing = [
      ...inputNames.filter((name) => !Object.hasOwn(inputs, name)),
      ...[...wanted.keys()].filter((name) => !outputNames.includes(name)),
    ];
    if (missing.length > 0) {
      throw new PlanRefused(`graph ${this.name} has inputs or outputs that the plan does not: ${missing}`);
    }
    const feeds = Object.fromEntries(inputNames.map((name) => [name, inputs[name]!]));
    let found: Record<string, Tensor>;
    try {
      found = { ...(await this.#session.run(feeds, [...wanted.keys()])) };
    } catch (error) {
      throw new RuntimeFailed(`graph ${this.name} failed: ${String(error)}`);
    }
    for (const [name, shape] of wanted) {
      const { type, dims } = found[name]!;
      const wants = types(name);
      if (type !== wants || dims.length !== shape.length || dims.some((size, axis) => size !== shape[axis])) {
        throw new PlanRefused(`graph ${this.name} gives ${name} as ${type}[${dims}], the plan says ${wants}[${shape}]`);
      }
    }
    return found;
  }

  /** Free the engine's memory. */
  async release(): Promise<void> {
    await this.#session.release();
  }
}

/** Do work with graphs by name, which are released after it. blob: the bytes of a graph. */
export async function withGraphs<T>(
  engine: Engine,
  refs: Iterable<readonly [name: string, ref: BlobRef]>,
  blob: (ref: BlobRef) => Promise<Bytes>,
  work: (graphs: ReadonlyMap<string, Graph>) => Promise<T>,
): Promise<T> {
  const graphs = new Map<string, Graph>();
  try {
    for (const [name, ref] of refs) graphs.set(name, await Graph.load(engine, await blob(ref), name));
    return await work(graphs);
  } finally {
    for (const graph of graphs.values()) await graph.release();
  }
}
