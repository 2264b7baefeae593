/** A plan on local examples without a coordinator: node src/node/train.ts FOLDER
 *
 * The folder is that of `work.ts`. The report is written to `report.safetensors` in it, weighed, as a device would upload
 * it. Python's runner must come to the same bytes.
 */

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { encodeVector } from "../core/checkpoint.ts";
import { weigh } from "../core/report.ts";
import { execute } from "../core/runner.ts";
import { nodeEngine } from "./engine.ts";
import { workIn } from "./work.ts";

/** Train on what a folder holds. */
export async function trainIn(folder: string): Promise<void> {
  const work = await workIn(folder, nodeEngine);
  const { values, weight } = await execute(work);
  await writeFile(join(folder, "report.safetensors"), encodeVector("report", weigh(work.plan.report, values, weight)));
}

await trainIn(process.argv[2] ?? ".");
