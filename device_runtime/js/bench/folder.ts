/** The files of a folder, on Node. */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Bytes } from "../src/core/bytes.ts";

export function filesIn(folder: string): (path: string) => Promise<Bytes> {
  return async (path) => Uint8Array.from(await readFile(join(folder, path)));
}
