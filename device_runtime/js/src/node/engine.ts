/** The engine of Node: onnxruntime-node, its telemetry turned off before it is loaded. */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import type { Engine, OnnxRuntime } from "../core/engine.ts";

process.env["ORT_DISABLE_TELEMETRY"] = "1";
const ort = await import("onnxruntime-node");
const { version } = JSON.parse(
  readFileSync(createRequire(import.meta.url).resolve("onnxruntime-node/package.json"), "utf-8"),
) as { version: string };

/** ONNX Runtime on this machine's processor. */
export const nodeEngine: Engine = { ort: ort as unknown as OnnxRuntime, name: `onnxruntime-node ${version}` };
