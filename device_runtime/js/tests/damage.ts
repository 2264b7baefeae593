/** Damage to bytes, drawn by seed. */

import type { Bytes } from "../src/core/bytes.ts";
import { philox } from "../src/core/philox.ts";

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
