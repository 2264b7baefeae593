/** The engine of Node: onnxruntime-node. */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import * as ort from "onnxruntime-node";
import type { Engine, OnnxRuntime } from "../core/engine.ts";

const { version } = JSON.parse(
  readFileSync(createRequire(import.meta.url).resolve("onnxruntime-node/package.json"), "utf-8"),
) as { version: string };

/** ONNX Runtime on this machine's processor. */
export const nodeEngine: Engine = { ort: ort as unknown as OnnxRuntime, name: `onnxruntime-node ${version}` };
