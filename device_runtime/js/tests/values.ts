/** Values made from vectors, for tests on Node and for the virtual machine of Hermes. */

import { parse } from "lossless-json";
import { type Bytes, fromHex } from "../src/core/bytes.ts";
import type { StreamKey } from "../src/core/plans/batches.ts";
import { type Examples, KINDS } from "../src/core/plans/examples.ts";

/** A vector, or a file of them: their only schema is the tests that read them. */
// biome-ignore lint/suspicious/noExplicitAny: see above
export type Vector = any;

/** The vectors in a text. Seeds go beyond 2^53, so integers that a number would round are bigints. */
export function vectorsIn(text: string): Vector {
  const exact = (digits: string) => (/^-?\d{16,}$/.test(digits) ? BigInt(digits) : Number(digits));
  return parse(text, null, exact);
}

/** The key of random streams in a vector. */
export function keyOf(one: Vector): StreamKey {
  return { seed: BigInt(one.seed), round: one.round, slot: BigInt(one.slot), secret: fromHex(one.secret ?? "") };
}

/** The examples of a hold-out in a vector. */
export function examplesOf(one: Vector): Examples {
  const columns = one.examples.fields.map(({ name, dtype, shape }: Vector) => {
    const values = new KINDS[dtype as keyof typeof KINDS](fromHex(one.columns[name]).buffer);
    return [name, { shape, values }];
  });
  return { count: one.count, columns: new Map(columns) };
}

/** The segments of a packing in a vector. */
export function segmentsOf(one: Vector) {
  const names = ["size", "fieldBits", "inBits", "low", "high", "norm", "weighted", "noise"];
  return one.segments.map((values: unknown[]) => Object.fromEntries(values.map((value, i) => [names[i], value])));
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
