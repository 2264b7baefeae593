/** Random streams that depend on a key alone: whoever has the key draws the same words. Spec: docs/spec/plan.md §4. */

import { type Bytes, concat, u64 } from "./bytes.ts";
import { philox } from "./philox.ts";
import { sha256 } from "./primitives.ts";

/** The first 64-bit words of the stream that a label and numbers from 0 to below 2^64 name. */
export async function stream(
  label: Bytes,
  numbers: readonly bigint[],
  words: number,
): Promise<BigUint64Array<ArrayBuffer>> {
  const digest = new DataView((await sha256(concat(label, u64(...numbers)))).buffer);
  return philox([digest.getBigUint64(0, true), digest.getBigUint64(8, true)], words);
}
