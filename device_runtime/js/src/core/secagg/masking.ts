/** Masks: AES-256-CTR keystreams that are added to words. Spec: docs/spec/secagg.md §1, §6. */

import type { Bytes } from "../bytes.ts";
import { keystream } from "../primitives.ts";
import type { Words } from "./packing.ts";

const CHUNK_WORDS = 1 << 18; // two megabytes of keystream at a time: fewer are dearer, each being a task of the platform
const BLOCK_WORDS = 2;

/** A stream by its key (32 bytes), and its sign. */
export interface Mask {
  readonly key: Bytes;
  readonly sign: 1 | -1;
}

/** Add streams, each with its sign, to words in place, modulo 2^64. */
export async function addMasks(words: Words, masks: readonly Mask[]): Promise<void> {
  const total = words.length / 2;
  for (const { key, sign } of masks) {
    const stream = await keystream(key);
    for (let first = 0; first < total; first += CHUNK_WORDS) {
      const chunk = words.subarray(2 * first, 2 * Math.min(first + CHUNK_WORDS, total));
      const bytes = await stream.bytes(first / BLOCK_WORDS, 4 * chunk.length);
      (sign > 0 ? add : subtract)(chunk, new Uint32Array(bytes.buffer));
    }
  }
}

// Halves of words are taken as 32-bit integers: arithmetic on doubles takes three times as long.

function add(words: Words, others: Words): void {
  for (let low = 0; low < words.length; low += 2) {
    const before = words[low]! | 0;
    const sum = (before + (others[low]! | 0)) | 0;
    const carry = sum >>> 0 < before >>> 0 ? 1 : 0;
    words[low] = sum;
    words[low + 1] = (words[low + 1]! | 0) + (others[low + 1]! | 0) + carry;
  }
}

function subtract(words: Words, others: Words): void {
  for (let low = 0; low < words.length; low += 2) {
    const before = words[low]! | 0;
    const taken = others[low]! | 0;
    words[low] = (before - taken) | 0;
    const borrow = before >>> 0 < taken >>> 0 ? 1 : 0;
    words[low + 1] = (words[low + 1]! | 0) - (others[low + 1]! | 0) - borrow;
  }
}
