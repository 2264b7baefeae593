/** The examples that a plan holds out, by their hashes. Spec: docs/spec/plan.md §1.1. */

import { type Bytes, utf8 } from "./bytes.ts";
import { type Examples, ExamplesError, type Values } from "./examples.ts";
import type { Plan } from "./plan.ts";
import { sha256 } from "./primitives.ts";

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
