/** Examples in NumPy's `.npz` files: one array per field, whose first axis counts examples. */

import { readdir, readFile, stat } from "node:fs/promises";
import { basename, join } from "node:path";
import { type ExampleSource, type Examples, ExamplesError, invalid } from "../core/plans/examples.ts";
import { examplesOf } from "./npz-arrays.ts";

const SUFFIX = ".npz";

/** Whether a file of this name is a collection of a folder of examples. */
export function isExamples(name: string): boolean {
  return name.endsWith(SUFFIX);
}

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
    const names = (await readdir(this.#path)).filter(isExamples).sort();
    return new Map(names.map((name) => [basename(name, SUFFIX), join(this.#path, name)]));
  }
}

async function readExamples(path: string): Promise<Examples> {
  try {
    return examplesOf(await readFile(path));
  } catch (error) {
    throw error instanceof ExamplesError ? error : unreadable(path, error);
  }
}

function unreadable(path: string, error: unknown): ExamplesError {
  return invalid(`the examples in ${path} cannot be read: ${String(error)}`);
}
