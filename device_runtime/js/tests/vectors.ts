/** The vectors that Python's tests hold too (tests/vectors). */

import { readFileSync } from "node:fs";
import { type Vector, vectorsIn } from "./values.ts";

export * from "./values.ts";

const FOLDER = new URL("../../../tests/vectors/", import.meta.url);

/** A file of vectors. */
export function vectors(name: string): Vector {
  return vectorsIn(readFileSync(new URL(name, FOLDER), "utf-8"));
}
