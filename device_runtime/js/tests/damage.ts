/** Damage to bytes, drawn by seed, and what becomes of it. MUSTER_FUZZ=100000 asks for that many inputs of each kind. */

import { expect } from "vitest";
import type { Bytes } from "../src/core/bytes.ts";
import { philox } from "../src/core/plans/streams.ts";

export const TIMES = Number(process.env["MUSTER_FUZZ"] ?? 300);
/** The longest time of one such test, in milliseconds. */
export const PATIENCE_MS = 3_600_000;

export type ErrorKind = abstract new (...words: never[]) => Error;

/** How many of TIMES damaged inputs are refused; an error of another kind fails the test. */
export async function refusals(data: Bytes, read: (data: Bytes) => unknown, kind: ErrorKind): Promise<number> {
  let refused = 0;
  for (let seed = 0; seed < TIMES; seed++) {
    try {
      await read(damaged(data, seed));
    } catch (error) {
      expect(error, `seed ${seed}`).toBeInstanceOf(kind);
      refused += 1;
    }
  }
  return refused;
}

/** Bytes with up to four changed, some cut off, or some twice: the same in every run. */
export function damaged(data: Bytes, seed: number): Bytes {
  if (data.length === 0) return Uint8Array.of(seed & 255);
  const drawn = philox([BigInt(seed), 0n], 10);
  const place = (which: number) => Number(drawn[which]! % BigInt(data.length));
  const found = data.slice();
  for (let change = 0; change <= Number(drawn[0]! % 4n); change++) {
    found[place(2 + change)] = Number(drawn[6 + change]! & 255n);
  }
  const kind = drawn[1]! % 4n;
  if (kind === 0n) return found.slice(0, place(2));
  if (kind === 1n) return Uint8Array.of(...found.slice(0, place(2)), ...found.slice(place(3)));
  return found;
}
