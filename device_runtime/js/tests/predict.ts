/** A predict graph on examples: node tests/predict.ts FOLDER
 *
 * The folder has `plan.json`, `predict.onnx`, `params.safetensors` and `examples.npz`. The first output is written to
 * `output.safetensors`, flat.
 */

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { filesIn } from "../bench/folder.ts";
import { decodeVectors, encodeVector } from "../src/core/plans/checkpoint.ts";
import { Graph } from "../src/core/plans/engine.ts";
import { decodePlan, PREDICT, parameterCount } from "../src/core/plans/plan.ts";
import { nodeEngine } from "../src/node/engine.ts";
import { examplesOf } from "../src/node/npz-arrays.ts";

const folder = process.argv[2] ?? ".";
const read = filesIn(folder);
const plan = decodePlan(await read("plan.json"), 1);
const graph = await Graph.load(nodeEngine, await read("predict.onnx"), PREDICT);
const { columns, count } = examplesOf(await read("examples.npz"));
const [size, { Tensor }] = [parameterCount(plan), nodeEngine.ort];
const params = decodeVectors(await read("params.safetensors"), [{ name: "params", size }]).get("params")!;
const inputs = Object.fromEntries(
  plan.predict!.inputs.map((name) => {
    const { dtype, shape } = plan.examples.fields.find((field) => field.name === name)!;
    return [`example.${name}`, new Tensor(dtype, columns.get(name)!.values as Float32Array, [count, ...shape])];
  }),
);
const { name, shape } = plan.predict!.outputs[0]!;
const whole = new Map([[name, [count, ...shape]]]);
const found = await graph.run({ params: new Tensor("float32", params, [size]), ...inputs }, whole);
await writeFile(
  join(folder, "output.safetensors"),
  encodeVector("output", found[name]!.data as Float32Array<ArrayBuffer>),
);
