/** Blocks of work that `muster bench devices_js` asks for, on any platform; it measures the CPU time of each itself.
 *
 * `{"load": PATH}` loads the work there, `{"train": null}` trains on it, `{"pack": {…}}` packs a vector of zeros, and
 * `{"mask": STREAMS}` masks what was packed by so many streams.
 */

import type { Bytes } from "../src/core/bytes.ts";
import { platformRandom } from "../src/core/cryptography.ts";
import { decodeFrozen, decodeVectors } from "../src/core/plans/checkpoint.ts";
import { type Engine, Graph, type OnnxRuntime } from "../src/core/plans/engine.ts";
import { checkExamples } from "../src/core/plans/examples.ts";
import { decodePlan } from "../src/core/plans/plan.ts";
import { execute, type Work } from "../src/core/plans/runner.ts";
import { addMasks } from "../src/core/secagg/keys.ts";
import { pack, type Words } from "../src/core/secagg/packing.ts";
import { examplesOf } from "../src/node/npz-arrays.ts";

/** A vector of `size` zeros that is packed with that variance of noise. */
interface Packing {
  readonly size: number;
  readonly noise: number;
}

export interface Asked {
  readonly load?: string;
  readonly train?: null;
  readonly pack?: Packing;
  readonly mask?: number;
}

type Read = (path: string) => Promise<Bytes>;

/** What answers. filesAt: what reads the files at a path. cpuMs: the process's CPU time, where the platform tells it. */
export class Blocks {
  readonly #engine: Engine;
  readonly #filesAt: (path: string) => Read;
  readonly #cpuMs: () => number;
  #work: Work | null = null;
  #words: Words = new Uint32Array();
  #insideMs = 0;
  #insideCpuMs = 0;

  constructor(engine: Engine, filesAt: (path: string) => Read, cpuMs: () => number = () => 0) {
    this.#cpuMs = cpuMs;
    const create: OnnxRuntime["InferenceSession"]["create"] = (...given) => this.#measured(engine, ...given);
    this.#engine = { name: engine.name, ort: { Tensor: engine.ort.Tensor, InferenceSession: { create } } };
    this.#filesAt = filesAt;
  }

  /** Do what is asked. It says the engine's name; of a training the seconds outside of ONNX Runtime, by the wall, and
   * the CPU seconds inside.
   */
  async answer({ load, pack: packing, mask: streams }: Asked): Promise<object> {
    if (load !== undefined) {
      this.#work = await workOf(this.#filesAt(load), this.#engine);
    } else if (packing !== undefined) {
      this.#words = await packed(packing);
    } else if (streams !== undefined) {
      await addMasks(this.#words, masks(streams));
    } else if (this.#work !== null) {
      [this.#insideMs, this.#insideCpuMs] = [0, 0];
      const begin = performance.now();
      await execute(this.#work);
      const outside = performance.now() - begin - this.#insideMs;
      return { outside_s: outside / 1000, inside_cpu_s: this.#insideCpuMs / 1000 };
    }
    return { engine: this.#engine.name };
  }

  /** A session that adds up the time that is spent inside of it. */
  async #measured(engine: Engine, ...given: Parameters<OnnxRuntime["InferenceSession"]["create"]>) {
    const session = await engine.ort.InferenceSession.create(...given);
    const run = session.run.bind(session) as (...given: unknown[]) => ReturnType<typeof session.run>;
    session.run = async (...given: unknown[]) => {
      const [begin, cpuBegin] = [performance.now(), this.#cpuMs()];
      const outputs = await run(...given);
      this.#insideCpuMs += this.#cpuMs() - cpuBegin;
      this.#insideMs += performance.now() - begin;
      return outputs;
    };
    return session;
  }
}

function packed({ size, noise }: Packing): Promise<Words> {
  const encoding = { fieldBits: 26, inBits: 16, low: -(2 ** 15) / (2 ** 15 - 1), high: 1, norm: 1, weighted: false };
  return pack([{ ...encoding, size, noise }], new Float32Array(size), 1, 1, platformRandom);
}

function masks(streams: number) {
  const keys = Array.from({ length: streams }, (_, place) => new Uint8Array(32).fill(place));
  return keys.map((key, place) => ({ key, sign: place % 2 ? -1 : 1 }) as const);
}

/** The work in files, with its graphs loaded. read: the bytes of a file by its path. */
export async function workOf(read: (path: string) => Promise<Bytes>, engine: Engine): Promise<Work> {
  const given = JSON.parse(new TextDecoder().decode(await read("key.json"))) as Record<string, string>;
  const [seed, round, slot] = [BigInt(given["seed"]!), Number(given["round"]), BigInt(given["slot"]!)];
  const plan = decodePlan(await read("plan.json"), round);
  const graphs = new Map<string, Graph>();
  for (const name of Object.keys(plan.graphs["onnx"] ?? {})) {
    graphs.set(name, await Graph.load(engine, await read(`graphs/${name}`), name));
  }
  const examples = examplesOf(await read("examples.npz"));
  checkExamples(plan, examples);
  const broadcast = decodeVectors(await read("checkpoint.safetensors"), plan.broadcast);
  const { vectors } = plan.frozen ?? { vectors: null };
  const frozen = vectors === null ? new Map() : decodeFrozen(await read("frozen.safetensors"), vectors);
  const key = { seed, round, slot, secret: new Uint8Array() };
  return { engine, plan, graphs, broadcast, frozen, examples, key, keepGoing: () => true };
}
