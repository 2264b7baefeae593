/** Work of a device in a folder, without a coordinator: what tests and benchmarks train on.
 *
 * The folder holds `plan.json`, `graphs/<name>`, `checkpoint.safetensors`, of a plan with frozen vectors
 * `frozen.safetensors`, `examples.npz` and `key.json`, the seed, round and slot as texts.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Bytes } from "../core/bytes.ts";
import { decodeVectors } from "../core/checkpoint.ts";
import { type Engine, Graph } from "../core/engine.ts";
import { checkExamples } from "../core/examples.ts";
import { decodePlan } from "../core/plan.ts";
import type { Work } from "../core/runner.ts";
import { NpzExamples } from "./npz.ts";

/** The work in a folder, with its graphs loaded. */
export async function workIn(folder: string, engine: Engine): Promise<Work> {
  const bytes = async (name: string): Promise<Bytes> => Uint8Array.from(await readFile(join(folder, name)));
  const given = JSON.parse(await readFile(join(folder, "key.json"), "utf-8")) as Record<string, string>;
  const [seed, round, slot] = [BigInt(given["seed"]!), Number(given["round"]), BigInt(given["slot"]!)];
  const plan = decodePlan(await bytes("plan.json"), round);
  const graphs = new Map<string, Graph>();
  for (const name of Object.keys(plan.graphs["onnx"] ?? {})) {
    graphs.set(name, await Graph.load(engine, await bytes(join("graphs", name)), name));
  }
  const examples = await new NpzExamples(join(folder, "examples.npz")).load("default");
  checkExamples(plan, examples);
  const broadcast = decodeVectors(await bytes("checkpoint.safetensors"), plan.broadcast);
  const { vectors } = plan.frozen ?? { vectors: null };
  const frozen = vectors === null ? new Map() : decodeVectors(await bytes("frozen.safetensors"), vectors);
  const key = { seed, round, slot, secret: new Uint8Array() };
  return { engine, plan, graphs, broadcast, frozen, examples, key, keepGoing: () => true };
}
