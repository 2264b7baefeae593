/** Examples in NumPy's `.npz` files: one array per field, whose first axis counts examples. */

import { readdir, readFile, stat } from "node:fs/promises";
import { basename, join } from "node:path";
import { unzipSync } from "fflate";
import { type Column, type ExampleSource, type Examples, ExamplesError, type Values } from "../core/examples.ts";

const MAGIC = "\x93NUMPY";
const HEADER = /'descr': '([^']+)', 'fortran_order': (False|True), 'shape': \(([\d, ]*)\)/;
const KINDS: Record<string, new (buffer: ArrayBuffer) => Values> = {
  "<f4": Float32Array,
  "<i8": BigInt64Array,
  "<i4": Int32Array,
  "|u1": Uint8Array,
};

const SUFFIX = ".npz";

/** The examples at `path`, read afresh at every call: a file is the collection "default", and every file `NAME.npz` of a
 * folder the collection NAME. All methods throw ExamplesError for what cannot be read.
 */
export class NpzExamples implements ExampleSource {
  readonly #path: string;

  constructor(path: string) {
    this.#path = path;
  }

  async counts(): Promise<ReadonlyMap<string, number>> {
    const counts = new Map<string, number>();
    for (const [collection, path] of await this.#files()) {
      counts.set(collection, (await readExamples(path)).count);
    }
    return counts;
  }

  /** A file does not know how old its examples are. */
  async countRecent(): Promise<number> {
    return 0;
  }

  async load(collection: string): Promise<Examples> {
    const path = (await this.#files()).get(collection);
    return path === undefined ? { count: 0, columns: new Map() } : readExamples(path);
  }

  async #files(): Promise<Map<string, string>> {
    const found = await stat(this.#path).catch((error: unknown) => {
      throw unreadable(this.#path, error);
    });
    if (!found.isDirectory()) return new Map([["default", this.#path]]);
    const names = (await readdir(this.#path)).filter((name) => name.endsWith(SUFFIX)).sort();
    return new Map(names.map((name) => [basename(name, SUFFIX), join(this.#path, name)]));
  }
}

async function readExamples(path: string): Promise<Examples> {
  const columns = new Map<string, Column>();
  const counts = new Set<number>();
  for (const [name, data] of Object.entries(await members(path))) {
    if (name.endsWith(".npy")) {
      const field = name.slice(0, -".npy".length);
      const { count, column } = readArray(data, field);
      columns.set(field, column);
      counts.add(count);
    }
  }
  if (counts.size > 1) {
    throw new ExamplesError("invalid-examples", `fields differ in their number of examples: ${[...counts]}`);
  }
  return { count: [...counts][0] ?? 0, columns };
}

async function members(path: string): Promise<Record<string, Uint8Array>> {
  try {
    return unzipSync(await readFile(path));
  } catch (error) {
    throw unreadable(path, error);
  }
}

function unreadable(path: string, error: unknown): ExamplesError {
  return new ExamplesError("invalid-examples", `the examples in ${path} cannot be read: ${String(error)}`);
}

function readArray(data: Uint8Array, field: string): { count: number; column: Column } {
  const invalid = (why: string) => new ExamplesError("invalid-examples", `field ${field} ${why}`);
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const version = data[6];
  if (data.length < 12 || String.fromCharCode(...data.subarray(0, 6)) !== MAGIC || (version !== 1 && version !== 2)) {
    throw invalid("is in a format of NumPy's that is not for plain arrays");
  }
  const [begin, length] = version === 1 ? [10, view.getUint16(8, true)] : [12, view.getUint32(8, true)];
  const header = HEADER.exec(String.fromCharCode(...data.subarray(begin, begin + length)));
  const kind = KINDS[header?.[1] ?? ""];
  const shape = (header?.[3] ?? "")
    .split(",")
    .filter((axis) => axis.trim() !== "")
    .map(Number);
  if (header === null || kind === undefined || header[2] === "True" || shape.length === 0) {
    throw invalid(
      `holds ${header?.[1] ?? "something else"}: an array of float32, int64, int32 or uint8 in C order is wanted`,
    );
  }
  const content = data.slice(begin + length).buffer;
  const size = shape.reduce((product, axis) => product * axis, 1);
  const [count = 0, ...rest] = shape;
  if (content.byteLength !== size * new kind(new ArrayBuffer(0)).BYTES_PER_ELEMENT) {
    throw invalid(`says that it has ${size} values, which its ${content.byteLength} bytes are not`);
  }
  return { count, column: { shape: rest, values: new kind(content) } };
}
