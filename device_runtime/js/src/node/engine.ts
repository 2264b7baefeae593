/** What computes on Node: onnxruntime-node, and functions of cryptography that WebCrypto would make tasks of another thread. */

import { createCipheriv, hash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { letGo } from "../core/bytes.ts";
import { type Suite, streamOf } from "../core/cryptography.ts";
import type { Engine, OnnxRuntime } from "../core/plans/engine.ts";

process.env["ORT_DISABLE_TELEMETRY"] = "1";
const ort = await import("onnxruntime-node");
const { version } = JSON.parse(
  readFileSync(createRequire(import.meta.url).resolve("onnxruntime-node/package.json"), "utf-8"),
) as { version: string };

/** ONNX Runtime on this machine's processor. */
export const nodeEngine: Engine = { ort: ort as unknown as OnnxRuntime, name: `onnxruntime-node ${version}` };

/** SHA-256, and streams of AES-256-CTR. */
export const nodeFunctions: Pick<Suite, "sha256" | "keystream"> = {
  async sha256(data) {
    return Uint8Array.from(hash("sha256", data, "buffer"));
  },
  async keystream(key) {
    return streamOf((counter, zeros) => createCipheriv("aes-256-ctr", key, counter).update(zeros), letGo);
  },
};
