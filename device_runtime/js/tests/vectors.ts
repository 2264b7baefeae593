/** The vectors that Python's tests hold too (tests/vectors), and values made from them. */

import { readFileSync } from "node:fs";
import { parse } from "lossless-json";
import { type Bytes, fromHex } from "../src/core/bytes.ts";

/** A vector, or a file of them: their only schema is the tests that read them. */
// biome-ignore lint/suspicious/noExplicitAny: see above
export type Vector = any;

const FOLDER = new URL("../../../tests/vectors/", import.meta.url);

/** A file of vectors. Its seeds go beyond 2^53, so integers that a number would round are bigints. */
export function vectors(name: string): Vector {
  const exact = (digits: string) => (/^-?\d{16,}$/.test(digits) ? BigInt(digits) : Number(digits));
  return parse(readFileSync(new URL(name, FOLDER), "utf-8"), null, exact);
}

/** Float32 values as Python's maker makes them: (i · 40503 mod 65537) / 8192 − 4. */
export function values(size: number, seed = 5): Float32Array<ArrayBuffer> {
  return Float32Array.from({ length: size }, (_, i) => (((i + seed) * 40503) % 65537) / 8192 - 4);
}

/** Float32 values from their bytes in hex. */
export function floats(digits: string): Float32Array<ArrayBuffer> {
  return new Float32Array(fromHex(digits).buffer);
}

/** The bytes of an array of numbers. */
export function bytesOf(array: ArrayBufferView<ArrayBuffer>): Bytes {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}
