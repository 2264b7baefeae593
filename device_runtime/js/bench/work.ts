/** Work of a device without a coordinator: what tests and benchmarks train on.
 *
 * Its files are `plan.json`, `graphs/<name>`, `checkpoint.safetensors`, of a plan with frozen vectors
 * `frozen.safetensors`, `examples.npz` and `key.json`, the seed, round and slot as texts.
 */

import type { Bytes } from "../src/core/bytes.ts";
import { decodeFrozen, decodeVectors } from "../src/core/plans/checkpoint.ts";
import { type Engine, Graph } from "../src/core/plans/engine.ts";
import { checkExamples } from "../src/core/plans/examples.ts";
import { decodePlan } from "../src/core/plans/plan.ts";
import type { Work } from "../src/core/plans/runner.ts";
import { examplesOf } from "../src/node/npz-arrays.ts";

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
