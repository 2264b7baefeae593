/** What computes on Node: onnxruntime-node, and functions of cryptography that WebCrypto would make tasks of another thread. */

import { createCipheriv, hash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { type Bytes, letGo } from "../core/bytes.ts";
import type { Suite } from "../core/cryptography.ts";
import type { Engine, OnnxRuntime } from "../core/plans/engine.ts";

process.env["ORT_DISABLE_TELEMETRY"] = "1";
const ort = await import("onnxruntime-node");
const { version } = JSON.parse(
  readFileSync(createRequire(import.meta.url).resolve("onnxruntime-node/package.json"), "utf-8"),
) as { version: string };

/** ONNX Runtime on this machine's processor. */
export const nodeEngine: Engine = { ort: ort as unknown as OnnxRuntime, name: `onnxruntime-node ${version}` };

let zeros: Bytes = new Uint8Array(0);

/** SHA-256, and streams of AES-256-CTR. */
export const nodeFunctions: Pick<Suite, "sha256" | "keystream"> = {
  async sha256(data) {
    return Uint8Array.from(hash("sha256", data, "buffer"));
  },
  async keystream(key) {
    const fill = async (target: Bytes, block: number) => {
      const counter = new Uint8Array(16);
      new DataView(counter.buffer).setUint32(12, block);
      if (zeros.length < target.length) zeros = new Uint8Array(target.length);
      const made = createCipheriv("aes-256-ctr", key, counter).update(zeros.subarray(0, target.length));
      target.set(made);
      letGo(made);
    };
    return { fill };
  },
};
