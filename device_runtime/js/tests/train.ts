/** A plan on local examples without a coordinator: node tests/train.ts FOLDER…
 *
 * A folder has the files of `bench/blocks.ts`. The report is written to `report.safetensors` in it, weighed, as a device would upload
 * it. Python's runner must come to the same bytes.
 */

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { workOf } from "../bench/blocks.ts";
import { filesIn } from "../bench/folder.ts";
import { encodeVector } from "../src/core/plans/checkpoint.ts";
import { weigh } from "../src/core/plans/report.ts";
import { execute } from "../src/core/plans/runner.ts";
import { nodeEngine } from "../src/node/engine.ts";

/** Train on what a folder holds. */
export async function trainIn(folder: string): Promise<void> {
  const work = await workOf(filesIn(folder), nodeEngine);
  const { values, weight } = await execute(work);
  await writeFile(join(folder, "report.safetensors"), encodeVector("report", weigh(work.plan.report, values, weight)));
}

for (const folder of process.argv.slice(2)) await trainIn(folder);
