import { type AbortReason, AssignmentError } from "../errors.ts";
import type { Field, Plan } from "./plan.ts";

/** The values of a field, row by row. */
export type Values =
  | Float32Array<ArrayBuffer>
  | BigInt64Array<ArrayBuffer>
  | Int32Array<ArrayBuffer>
  | Uint8Array<ArrayBuffer>;

/** The values of one field, example by example; `shape` is that of a single example.
 *
 * ends: of lines of bytes, such as texts, that are each as long as they are, up to `shape`: where each ends in `values`.
 */
export interface Column {
  readonly shape: readonly number[];
  readonly values: Values;
  readonly ends?: readonly number[];
}

/** The examples of a collection: `count` of them, and the column of every field by name. */
export interface Examples {
  readonly count: number;
  readonly columns: ReadonlyMap<string, Column>;
}

/** Examples in named collections, in the app's storage. */
export interface ExampleSource {
  /** The number of examples per collection. */
  counts(): Promise<ReadonlyMap<string, number>>;
  /** All examples of a collection. */
  load(collection: string): Promise<Examples>;
  /** The number of examples that are at most `maxAgeS` old; 0 in a source that does not know their age. */
  countRecent(collection: string, maxAgeS: number): Promise<number>;
}

/** Local examples are missing, too few, or do not fit the plan. */
export class ExamplesError extends AssignmentError {
  override readonly reason: AbortReason;

  constructor(reason: "too-few-examples" | "invalid-examples", message: string) {
    super(message);
    this.reason = reason;
  }
}

/** The error for examples that do not fit, or cannot be read. */
export function invalid(why: string): ExamplesError {
  return new ExamplesError("invalid-examples", why);
}

/** The typed array of each element type. */
export const KINDS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array } as const;

/** Throws ExamplesError unless the examples are what the plan trains on: at least one, of its types, finite, in range. */
export function checkExamples(plan: Plan, examples: Examples): void {
  if (examples.count === 0) {
    throw new ExamplesError("too-few-examples", `no examples in collection ${plan.examples.collection}`);
  }
  for (const field of plan.examples.fields) {
    const column = examples.columns.get(field.name);
    if (column === undefined) {
      throw invalid(`examples have no field ${field.name}, which the plan wants`);
    }
    checkColumn(field, column, examples.count);
  }
}

/** A line of bytes of a column, which may have zeros at its end. */
export function lineOf({ shape: [width = 0], values, ends }: Column, place: number): Uint8Array<ArrayBuffer> {
  const [begin, end] = ends ? [ends[place - 1] ?? 0, ends[place]!] : [place * width, (place + 1) * width];
  return (values as Uint8Array<ArrayBuffer>).subarray(begin, end);
}

/** The column with lines of bytes as long as its shape says, by zeros at their ends. Throws ExamplesError. */
export function padded(name: string, column: Column, count: number): Column {
  const [width = 0] = column.shape;
  if (column.ends === undefined) return column;
  const values = new Uint8Array(count * width);
  for (let place = 0; place < count; place++) {
    const line = lineOf(column, place);
    if (line.length > width) {
      throw invalid(`field ${name} of example ${place} has ${line.length} bytes, not ${width}`);
    }
    values.set(line, place * width);
  }
  return { shape: column.shape, values };
}

function checkColumn(field: Field, { shape, values }: Column, count: number): void {
  const width = field.shape.reduce((size, axis) => size * axis, 1);
  if (
    !(values instanceof KINDS[field.dtype]) ||
    shape.join() !== field.shape.join() ||
    values.length !== count * width
  ) {
    const found = `${values.constructor.name}[${shape}] with ${values.length} values`;
    throw invalid(`field ${field.name} holds ${found}, the plan wants ${field.dtype}[${field.shape}]`);
  }
  const [low, high] = field.dtype === "float32" ? [-Infinity, Infinity] : [-1, field.high];
  if (high === null) return;
  for (let place = 0; place < values.length; place++) {
    const value = values[place]!;
    if (!(value > low && value < high) && Number(value) !== field.ignored) {
      const example = Math.floor(place / width);
      throw invalid(`field ${field.name} of example ${example} holds ${value}`);
    }
  }
}
