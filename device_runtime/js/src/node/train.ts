/** A plan on local examples without a coordinator: node src/node/train.ts FOLDER
 *
 * The folder holds `plan.json`, `graphs/<name>`, `checkpoint.safetensors`, of a plan with frozen vectors
 * `frozen.safetensors`, `examples.npz` and `key.json`, the seed, round and slot as texts. The report is written to `report.safetensors`, weighed, as a device would upload it. Python's runner
 * must come to the same bytes.
 */

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { StreamKey } from "../core/batching.ts";
import type { Bytes } from "../core/bytes.ts";
import { decodeVectors, encodeVector } from "../core/checkpoint.ts";
import { Graph } from "../core/engine.ts";
import { checkExamples } from "../core/examples.ts";
import { decodePlan } from "../core/plan.ts";
import { weigh } from "../core/report.ts";
import { execute } from "../core/runner.ts";
import { nodeEngine } from "./engine.ts";
import { NpzExamples } from "./npz.ts";

/** Train on what a folder holds. */
export async function trainIn(folder: string): Promise<void> {
  const bytes = async (name: string): Promise<Bytes> => Uint8Array.from(await readFile(join(folder, name)));
  const given = JSON.parse(await readFile(join(folder, "key.json"), "utf-8")) as Record<string, string>;
  const key: StreamKey = {
    seed: BigInt(given["seed"]!),
    round: Number(given["round"]),
    slot: BigInt(given["slot"]!),
    secret: new Uint8Array(),
  };
  const plan = decodePlan(await bytes("plan.json"), key.round);
  const graphs = new Map<string, Graph>();
  for (const name of Object.keys(plan.graphs["onnx"] ?? {})) {
    graphs.set(name, await Graph.load(nodeEngine, await bytes(join("graphs", name)), name));
  }
  const examples = await new NpzExamples(join(folder, "examples.npz")).load("default");
  checkExamples(plan, examples);
  const broadcast = decodeVectors(await bytes("checkpoint.safetensors"), plan.broadcast);
  const { vectors } = plan.frozen ?? { vectors: null };
  const frozen = vectors === null ? new Map() : decodeVectors(await bytes("frozen.safetensors"), vectors);
  const work = { engine: nodeEngine, plan, graphs, broadcast, frozen, examples, key, keepGoing: () => true };
  const { values, weight } = await execute(work);
  await writeFile(join(folder, "report.safetensors"), encodeVector("report", weigh(plan.report, values, weight)));
}

await trainIn(process.argv[2] ?? ".");
