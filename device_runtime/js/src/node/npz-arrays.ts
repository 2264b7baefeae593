/** Arrays in NumPy's `.npz` format, decoded: one array per field, whose first axis counts examples. */

import { unzipSync } from "fflate";
import { type Column, type Examples, invalid, type Values } from "../core/plans/examples.ts";

const MAGIC = "\x93NUMPY";
const HEADER = /'descr': '([^']+)', 'fortran_order': (False|True), 'shape': \(([\d, ]*)\)/;
const KINDS: Record<string, new (buffer: ArrayBuffer) => Values> = {
  "<f4": Float32Array,
  "<i8": BigInt64Array,
  "<i4": Int32Array,
  "|u1": Uint8Array,
};

/** The examples in the bytes of a file. Throws and what fflate throws where they are no archive. */
export function examplesOf(data: Uint8Array): Examples {
  const columns = new Map<string, Column>();
  const counts = new Set<number>();
  for (const [name, member] of Object.entries(unzipSync(data))) {
    if (name.endsWith(".npy")) {
      const field = name.slice(0, -".npy".length);
      const { count, column } = readArray(member, field);
      columns.set(field, column);
      counts.add(count);
    }
  }
  if (counts.size > 1) {
    throw invalid(`fields differ in their number of examples: ${[...counts]}`);
  }
  return { count: [...counts][0] ?? 0, columns };
}

function readArray(data: Uint8Array, field: string): { count: number; column: Column } {
  const wrong = (why: string) => invalid(`field ${field} ${why}`);
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const version = data[6];
  if (data.length < 12 || String.fromCharCode(...data.subarray(0, 6)) !== MAGIC || (version !== 1 && version !== 2)) {
    throw wrong("is in a format of NumPy's that is not for plain arrays");
  }
  const [begin, length] = version === 1 ? [10, view.getUint16(8, true)] : [12, view.getUint32(8, true)];
  const header = HEADER.exec(String.fromCharCode(...data.subarray(begin, begin + length)));
  const kind = KINDS[header?.[1] ?? ""];
  const shape = (header?.[3] ?? "")
    .split(",")
    .filter((axis) => axis.trim() !== "")
    .map(Number);
  if (header === null || kind === undefined || header[2] === "True" || shape.length === 0) {
    throw wrong(
      `holds ${header?.[1] ?? "something else"}: an array of float32, int64, int32 or uint8 in C order is wanted`,
    );
  }
  const content = data.slice(begin + length).buffer;
  const size = shape.reduce((product, axis) => product * axis, 1);
  const [count = 0, ...rest] = shape;
  if (content.byteLength !== size * new kind(new ArrayBuffer(0)).BYTES_PER_ELEMENT) {
    throw wrong(`says that it has ${size} values, which its ${content.byteLength} bytes are not`);
  }
  return { count, column: { shape: rest, values: new kind(content) } };
}
