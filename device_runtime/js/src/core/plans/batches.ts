/** Batches: the examples on the plan's side of its hold-out, in the order in which a device visits them, and the noise of
 * its steps. Spec: docs/spec/plan.md §1.1, §4.
 *
 * Seeds and slots go beyond 2^53, so they are bigints.
 */

import { type Bytes, concat, utf8 } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import { type Examples, ExamplesError, type Values } from "./examples.ts";
import { type Loop, type Plan, stepCount } from "./plan.ts";
import { stream } from "./streams.ts";

/** Bits of a digit by which words are sorted: three digits make a half. */
const DIGIT_BITS = 11;

/** The key of a device's random streams in one round.
 *
 * secret: in a secure round, bytes that only the device knows; its noise depends on them. Else empty.
 */
export interface StreamKey {
  readonly seed: bigint;
  readonly round: number;
  readonly slot: bigint;
  readonly secret: Bytes;
}

/** A random order of `examples` indices: the stable argsort of that many words of the stream. */
export async function permutation(
  key: StreamKey,
  pass: number,
  epoch: number,
  examples: number,
): Promise<Uint32Array<ArrayBuffer>> {
  return argsort(await deviceStream(utf8("muster.order.v1"), key, pass, epoch, examples));
}

/** The places of words in ascending order; of equal words the earlier place comes first.
 *
 * By digits of the upper halves, the lowest digit first; what those leave equal, which is hardly ever any, by comparison.
 */
export function argsort(words: BigUint64Array<ArrayBuffer>): Uint32Array<ArrayBuffer> {
  const halves = new Uint32Array(words.buffer, words.byteOffset, 2 * words.length);
  let [order, sorted] = [new Uint32Array(words.length).map((_, place) => place), new Uint32Array(words.length)];
  for (let shift = 0; shift < 32; shift += DIGIT_BITS) {
    const starts = new Uint32Array(2 ** DIGIT_BITS + 1);
    const digit = (place: number) => (halves[2 * place + 1]! >>> shift) & (2 ** DIGIT_BITS - 1);
    for (let place = 0; place < order.length; place++) starts[digit(place) + 1]! += 1;
    for (let value = 1; value < starts.length; value++) starts[value]! += starts[value - 1]!;
    for (let rank = 0; rank < order.length; rank++) sorted[starts[digit(order[rank]!)]!++] = order[rank]!;
    [order, sorted] = [sorted, order];
  }
  const isAfter = (a: number, b: number) => halves[2 * a + 1] === halves[2 * b + 1] && halves[2 * a]! > halves[2 * b]!;
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

/** The batches of some steps, one after the other: the indices of their examples, and a mask, 1 for real examples, 0
 * for padding.
 */
export interface Batches {
  readonly indices: Uint32Array;
  readonly mask: Float32Array<ArrayBuffer>;
}

/** The batches of every step of a pass, in groups of at most `most` steps of one epoch.
 *
 * A short last batch of an epoch is padded with its own first index, under mask 0.
 */
export async function* batches(
  loop: Loop,
  examples: number,
  key: StreamKey,
  pass: number,
  most: number,
): AsyncGenerator<Batches> {
  const size = loop.batch_size;
  let remaining = stepCount(loop, examples);
  for (let epoch = 0; epoch < loop.epochs && remaining > 0; epoch++) {
    const order = loop.shuffle
      ? await permutation(key, pass, epoch, examples)
      : new Uint32Array(examples).map((_, index) => index);
    for (let start = 0; start < examples && remaining > 0; ) {
      const steps = Math.min(most, remaining, Math.ceil((examples - start) / size));
      const end = start + steps * size;
      const indices = new Uint32Array(steps * size).fill(order[end - size]!);
      indices.set(order.subarray(start, end));
      yield { indices, mask: new Float32Array(steps * size).fill(1, 0, examples - start) };
      [start, remaining] = [end, remaining - steps];
    }
  }
}

/** The examples on the plan's side of its hold-out, in their order, which must fit the plan.
 *
 * Throws ExamplesError when they are fewer than `minExamples`, or none.
 */
export async function onSide(plan: Plan, examples: Examples, minExamples: number): Promise<Examples> {
  const kept = plan.examples.hold_out === null ? examples : only(plan, examples, await places(plan, examples));
  const least = Math.max(minExamples, 1);
  if (kept.count < least) {
    const found = `the plan runs on ${kept.count} examples of collection ${plan.examples.collection}`;
    throw new ExamplesError("too-few-examples", `${found}, and the task needs ${least}`);
  }
  return kept;
}

/** The places of the examples on the plan's side of its hold-out, which it must have. */
export async function places(
  { examples: { fields, collection, hold_out } }: Pick<Plan, "examples">,
  examples: Examples,
): Promise<number[]> {
  const { share, side } = hold_out!;
  const columns = fields.map(({ name }) => bytesOf(examples.columns.get(name)!.values));
  const start = utf8(`muster.hold-out.example.v1\0${collection}\0`);
  const widths = columns.map((column) => column.length / examples.count);
  const hashed = new Uint8Array(widths.reduce((size, width) => size + width, start.length));
  hashed.set(start);
  const found: number[] = [];
  for (let place = 0; place < examples.count; place++) {
    let at = start.length;
    columns.forEach((column, index) => {
      const width = widths[index]!;
      hashed.set(column.subarray(place * width, (place + 1) * width), at);
      at += width;
    });
    const digest = await sha256(hashed);
    // A power of two scales a number exactly, and an integer and a number are compared exactly.
    const isHeldOut = new DataView(digest.buffer, digest.byteOffset).getBigUint64(0) < share * 2 ** 64;
    if (isHeldOut === (side === "held-out")) found.push(place);
  }
  return found;
}

/** The examples at some places. */
export function only(plan: Plan, { count, columns }: Examples, kept: readonly number[]): Examples {
  const chosen = plan.examples.fields.map(({ name }) => {
    const { shape, values } = columns.get(name)!;
    const width = values.length / count;
    const left = new (values.constructor as new (size: number) => Values)(kept.length * width);
    kept.forEach((place, index) => {
      left.set(values.subarray(place * width, (place + 1) * width) as never, index * width);
    });
    return [name, { shape, values: left }] as const;
  });
  return { count: kept.length, columns: new Map(chosen) };
}

// Machines with a JavaScript engine are little-endian.
function bytesOf({ buffer, byteOffset, byteLength }: Values): Bytes {
  return new Uint8Array(buffer, byteOffset, byteLength);
}
