/** Functions of cryptography that Node computes at once: WebCrypto makes a task of another thread of each call. */

import { createCipheriv, hash } from "node:crypto";
import { type Bytes, letGo } from "../core/bytes.ts";
import type { Suite } from "../core/crypto/suite.ts";

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
