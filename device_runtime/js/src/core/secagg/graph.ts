/** The neighbour graph: a Harary ring on a permutation that no party can choose. Spec: docs/spec/secagg.md §3. */

import { type Bytes, concat } from "../bytes.ts";
import { keystream, sha256 } from "../primitives.ts";
import { tag } from "./encoding.ts";
import type { GraphParameters } from "./parameters.ts";

/** The k neighbours of a position; the one at index x − 1 has rank x. The relation is symmetric. */
export async function neighboursOf(
  position: number,
  { n, k }: GraphParameters,
  root: Bytes,
  beacon: Bytes,
): Promise<number[]> {
  const stream = await keystream(await sha256(concat(tag("graph"), root, beacon)));
  const drawn = new Uint8Array(8 * n);
  await stream.fill(drawn, 0);
  const view = new DataView(drawn.buffer);
  const words = Array.from({ length: n }, (_, place) => view.getBigUint64(8 * place, true));
  const ring = Array.from(words.keys()).sort((a, b) => (words[a]! < words[b]! ? -1 : Number(words[a]! > words[b]!)));
  const place = ring.indexOf(position);
  const near = Array.from({ length: n - 1 }, (_, index) => index + 1).filter(
    (distance) => k === n - 1 || distance <= k / 2 || distance >= n - k / 2,
  );
  return near.map((distance) => ring[(place + distance) % n]!);
}
