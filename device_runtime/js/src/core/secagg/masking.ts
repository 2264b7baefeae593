/** Masks: AES-256-CTR keystreams that are added to words. Spec: docs/spec/secagg.md §1, §6. */

import type { Bytes } from "../bytes.ts";
import { keystream } from "../primitives.ts";
import type { Words } from "./packing.ts";

const CHUNK_WORDS = 1 << 16; // half a megabyte at a time: smaller pieces cost WebCrypto a task each, larger ones caches
const BLOCK_WORDS = 2;

type Halves = Int32Array<ArrayBuffer>;

/** A stream by its key (32 bytes), and its sign. */
export interface Mask {
  readonly key: Bytes;
  readonly sign: 1 | -1;
}

/** Add streams, each with its sign, to words in place, modulo 2^64. */
export async function addMasks(words: Words, masks: readonly Mask[]): Promise<void> {
  const total = words.length / 2;
  const streams = await Promise.all(masks.map(({ key }) => keystream(key)));
  for (let first = 0; first < total; first += CHUNK_WORDS) {
    const chunk = new Int32Array(words.buffer, 8 * first, 2 * Math.min(CHUNK_WORDS, total - first));
    for (const [place, stream] of streams.entries()) {
      const bytes = await stream.bytes(first / BLOCK_WORDS, 4 * chunk.length);
      (masks[place]!.sign > 0 ? add : subtract)(chunk, new Int32Array(bytes.buffer));
    }
  }
}

// Signed halves of words, and carries by bits: masks are random, so processors guess every other branch wrong.

function add(words: Halves, others: Halves): void {
  for (let low = 0; low < words.length; low += 2) {
    const [a, b] = [words[low]!, others[low]!];
    const sum = (a + b) | 0;
    const carry = ((a & b) | ((a | b) & ~sum)) >>> 31;
    words[low] = sum;
    words[low + 1] = words[low + 1]! + others[low + 1]! + carry;
  }
}

function subtract(words: Halves, others: Halves): void {
  for (let low = 0; low < words.length; low += 2) {
    const [a, b] = [words[low]!, others[low]!];
    const rest = (a - b) | 0;
    const borrow = ((~a & b) | (~(a ^ b) & rest)) >>> 31;
    words[low] = rest;
    words[low + 1] = words[low + 1]! - others[low + 1]! - borrow;
  }
}
