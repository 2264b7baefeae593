/** Masks: AES-256-CTR keystreams that are added to words. Spec: docs/spec/secagg.md §1, §6. */

import type { Bytes } from "../bytes.ts";
import { keystream } from "../primitives.ts";
import { CHUNK_BYTES, newAdder } from "./adder.ts";
import type { Words } from "./packing.ts";

const BLOCK_BYTES = 16;

/** A stream by its key (32 bytes), and its sign. */
export interface Mask {
  readonly key: Bytes;
  readonly sign: 1 | -1;
}

/** Add streams, each with its sign, to words in place, modulo 2^64. */
export async function addMasks(words: Words, masks: readonly Mask[]): Promise<void> {
  const streams = await Promise.all(masks.map(({ key }) => keystream(key)));
  const adder = newAdder();
  const [sums, others] = [new Uint8Array(adder.memory.buffer), new Uint8Array(adder.memory.buffer, CHUNK_BYTES)];
  const bytes = new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
  for (let first = 0; first < bytes.length; first += CHUNK_BYTES) {
    const chunk = bytes.subarray(first, first + CHUNK_BYTES);
    sums.set(chunk);
    for (const [place, stream] of streams.entries()) {
      await stream.fill(others.subarray(0, chunk.length), first / BLOCK_BYTES);
      masks[place]!.sign > 0 ? adder.add(chunk.length) : adder.subtract(chunk.length);
    }
    chunk.set(sums.subarray(0, chunk.length));
  }
}
