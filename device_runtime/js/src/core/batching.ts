/** Batches: which examples a device visits, and in which order, and the noise of its steps.
 *
 * Spec: docs/spec/plan.md §4. Seeds and slots go beyond 2^53, so they are bigints.
 */

import { type Bytes, bitLength, concat, utf8 } from "./bytes.ts";
import type { Loop } from "./plan.ts";
import { stream } from "./streams.ts";

/** The key of a device's random streams in one round.
 *
 * secret: in a secure round, bytes that only the device knows, on which its noise depends too; else empty.
 */
export interface StreamKey {
  readonly seed: bigint;
  readonly round: number;
  readonly slot: bigint;
  readonly secret: Bytes;
}

/** One step's batch: the indices of its examples, and 1 in the mask for each that is real, 0 for padding. */
export interface Batch {
  readonly indices: readonly number[];
  readonly mask: Float32Array<ArrayBuffer>;
}

/** A random order of `examples` indices: the stable argsort of that many words of the stream. */
export async function permutation(key: StreamKey, pass: number, epoch: number, examples: number): Promise<number[]> {
  return argsort(await deviceStream(utf8("muster.order.v1"), key, pass, epoch, examples));
}

/** The places of at most 2^31 words in ascending order; of equal words the earlier place comes first. */
export function argsort(words: BigUint64Array<ArrayBuffer>): number[] {
  const halves = new Uint32Array(words.buffer, words.byteOffset, 2 * words.length);
  // The engine sorts words by itself in a fifth of the time that it takes with a function, so their places go along as
  // the lowest bits. What those bits would have decided is left, and hardly ever there.
  const places = 2 ** bitLength(words.length) - 1;
  const marked = words.slice();
  const marks = new Uint32Array(marked.buffer);
  for (let place = 0; place < words.length; place++) marks[2 * place] = (marks[2 * place]! & ~places) | place;
  marked.sort();
  const order = Array.from({ length: words.length }, (_, rank) => marks[2 * rank]! & places);
  const isAfter = (a: number, b: number) =>
    (halves[2 * a + 1]! - halves[2 * b + 1]! || halves[2 * a]! - halves[2 * b]!) > 0;
  for (let rank = 1; rank < order.length; rank++) {
    for (let at = rank; at > 0 && isAfter(order[at - 1]!, order[at]!); at--) {
      [order[at - 1], order[at]] = [order[at]!, order[at - 1]!];
    }
  }
  return order;
}

/** Random integers, uniform over all of int32, one for every place of a batch. */
export async function noise(
  key: StreamKey,
  pass: number,
  step: number,
  size: number,
): Promise<Int32Array<ArrayBuffer>> {
  const label = concat(utf8("muster.noise.v1"), key.secret);
  const words = await deviceStream(label, key, pass, step, Math.ceil(size / 2));
  return new Int32Array(words.buffer, 0, size);
}

function deviceStream(label: Bytes, { seed, round, slot }: StreamKey, pass: number, counter: number, words: number) {
  return stream(label, [seed, BigInt(round), slot, BigInt(pass), BigInt(counter)], words);
}

/** The number of batches of a loop over so many examples. */
export function stepCount(loop: Loop, examples: number): number {
  return Math.min(loop.epochs * Math.ceil(examples / loop.batch_size), loop.steps ?? Infinity);
}

/** The batch of every step of a pass. A short last batch is padded with its own first index, under mask 0. */
export async function* batches(loop: Loop, examples: number, key: StreamKey, pass: number): AsyncGenerator<Batch> {
  let remaining = stepCount(loop, examples);
  for (let epoch = 0; epoch < loop.epochs && remaining > 0; epoch++) {
    const order = loop.shuffle
      ? await permutation(key, pass, epoch, examples)
      : Array.from({ length: examples }, (_, index) => index);
    for (let start = 0; start < examples && remaining > 0; start += loop.batch_size, remaining--) {
      const real = order.slice(start, start + loop.batch_size);
      const padding = Array<number>(loop.batch_size - real.length).fill(real[0]!);
      yield { indices: [...real, ...padding], mask: new Float32Array(loop.batch_size).fill(1, 0, real.length) };
    }
  }
}
