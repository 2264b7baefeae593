/** Named flat vectors as safetensors bytes: checkpoints and reports. Spec: docs/spec/params.md §3.
 *
 * The format holds data only: a length, a JSON header, and float32 values, all little-endian, as machines with a
 * JavaScript engine are.
 */

import * as v from "valibot";
import { type Bytes, checked, concat, count, hex, littleEndian, parseJson, utf8 } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import { FormatError } from "../errors.ts";
import type { BlobRef, FrozenVector, Plan, VectorSpec } from "./plan.ts";
import type { Float32 } from "./report.ts";

const HEAD_BYTES = 8;
const tensorSchema = v.object({
  dtype: v.picklist(["F32", "U8"]),
  shape: v.tuple([count]),
  data_offsets: v.tuple([count, count]),
});

/** The bytes of one vector, as every writer makes them. */
export function encodeVector(name: string, vector: Float32): Bytes {
  const size = vector.byteLength;
  const header = JSON.stringify({ [name]: { dtype: "F32", shape: [vector.length], data_offsets: [0, size] } });
  const padded = header.padEnd(8 * Math.ceil(utf8(header).length / 8) - utf8(header).length + header.length);
  const values = new Uint8Array(vector.buffer, vector.byteOffset, size);
  return concat(littleEndian(utf8(padded).length, HEAD_BYTES), utf8(padded), values);
}

/** SHA-256 of a vector's values in hex, as a release and the entries of its lineage name a vector. */
export async function vectorDigest({ buffer, byteOffset, byteLength }: Float32): Promise<string> {
  return hex(await sha256(new Uint8Array(buffer, byteOffset, byteLength)));
}

/** The vectors in `data`, each with a buffer of its own, in the order of `specs`.
 *
 * Throws FormatError when the bytes are not safetensors, or do not hold exactly the vectors of `specs`.
 */
export function decodeVectors(data: Bytes, specs: readonly VectorSpec[]): Map<string, Float32> {
  const floats = specs.map(({ name, size }) => ({ name, size, dtype: "float32" as const }));
  return decodeFrozen(data, floats) as Map<string, Float32>;
}

/** The same of vectors that no round changes. */
export function decodeFrozen(data: Bytes, specs: readonly FrozenVector[]): Map<string, Float32 | Bytes> {
  const tensors = readHeader(data);
  const names = specs.map((spec) => spec.name);
  if ([...tensors.keys()].sort().join() !== [...names].sort().join()) {
    throw new FormatError(`vectors are ${[...tensors.keys()]}, expected ${names}`);
  }
  const found = new Map<string, Float32 | Bytes>();
  for (const { name, size, dtype } of specs) {
    const { shape, values } = tensors.get(name)!;
    const [bytes, code] = dtype === "uint8" ? [1, "U8"] : [4, "F32"];
    if (shape !== size || values.length !== bytes * size || tensors.get(name)!.dtype !== code) {
      throw new FormatError(`vector ${name} has ${shape} values in ${values.length} bytes, expected ${dtype}[${size}]`);
    }
    const own = values.slice();
    found.set(name, dtype === "uint8" ? own : new Float32Array(own.buffer));
  }
  return found;
}

/** The frozen vectors of a plan, none if it has none. blob: the bytes of a blob. */
export async function frozenOf({ frozen }: Plan, blob: (ref: BlobRef) => Promise<Bytes>) {
  return frozen === null ? new Map<string, never>() : decodeFrozen(await blob(frozen.blob), frozen.vectors);
}

interface Tensor {
  readonly dtype: "F32" | "U8";
  readonly shape: number;
  readonly values: Bytes;
}

function readHeader(data: Bytes): Map<string, Tensor> {
  const length =
    data.length < HEAD_BYTES ? Infinity : Number(new DataView(data.buffer, data.byteOffset).getBigUint64(0, true));
  const base = HEAD_BYTES + length;
  if (base > data.length) {
    throw new FormatError("not a safetensors file: its header goes beyond its end");
  }
  const { __metadata__: _, ...described } = checked(
    v.record(v.string(), v.unknown()),
    parseJson(data.subarray(HEAD_BYTES, base), "safetensors header"),
    "safetensors header",
  );
  const tensors = new Map<string, Tensor>();
  const ranges: [start: number, end: number][] = [];
  for (const [name, value] of Object.entries(described)) {
    const {
      dtype,
      shape,
      data_offsets: [start, end],
    } = checked(tensorSchema, value, `vector ${name}`);
    if (start > end || base + end > data.length) {
      throw new FormatError(`vector ${name} goes beyond the end of its file`);
    }
    tensors.set(name, { dtype, shape: shape[0], values: data.subarray(base + start, base + end) });
    ranges.push([start, end]);
  }
  const behind = ranges
    .sort(([a, aEnd], [b, bEnd]) => a - b || aEnd - bEnd)
    .reduce((at, [start, end]) => (start === at ? end : Number.NaN), 0);
  if (behind !== data.length - base) {
    throw new FormatError("not a safetensors file: its vectors do not follow each other from its header to its end");
  }
  return tensors;
}
