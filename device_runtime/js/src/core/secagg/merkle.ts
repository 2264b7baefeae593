/** Merkle paths: proofs of a place in a list that a root stands for. Spec: docs/spec/secagg.md §3. */

import { type Bytes, concat } from "../bytes.ts";
import { sha256 } from "../primitives.ts";

/** The number of siblings in a path, for n leaves. */
export function depth(n: number): number {
  return n <= 1 ? 0 : 32 - Math.clz32(n - 1);
}

/** The root that follows from a leaf, its position and its path. */
export async function climb(leaf: Bytes, position: number, path: Bytes): Promise<Bytes> {
  let node = await sha256(concat(Uint8Array.of(0), leaf));
  for (let height = 0; height < path.length / 32; height++) {
    const sibling = path.subarray(32 * height, 32 * height + 32);
    const pair = (position >> height) & 1 ? [sibling, node] : [node, sibling];
    node = await sha256(concat(Uint8Array.of(1), ...pair));
  }
  return node;
}
