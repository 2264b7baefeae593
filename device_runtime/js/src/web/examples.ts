/** Local examples in a browser: in IndexedDB, each with its time, and removed when they are too old or too many. */

import { type Column, type ExampleSource, type Examples, invalid, type Values } from "../core/plans/examples.ts";
import { change, look, type Retention } from "./storage.ts";

const EARLIEST = 1_767_225_600; // the first second of 2026

/** The fields of one example. */
export type Fields = Readonly<Record<string, Column>>;

interface Kept {
  readonly collection: string;
  /** Seconds since 1970. */
  readonly at: number;
  readonly fields: Fields;
}

/** Examples in named collections. What is too old or too many is removed before anything is counted or read. */
export class LocalExamples implements ExampleSource {
  readonly #database: IDBDatabase;
  readonly #retention: () => Retention;

  /** retention: that of now, as its owner may change it. */
  constructor(database: IDBDatabase, retention: () => Retention) {
    this.#database = database;
    this.#retention = retention;
  }

  /** Keep an example; of lines of bytes, such as texts, without the zeros at their ends.
   *
   * Throws StateDamaged when the browser has no room.
   */
  async add(collection: string, fields: Fields): Promise<void> {
    const stripped = Object.entries(fields).map(([name, column]) => [
      name,
      isLine(column) ? withoutZeros(column) : column,
    ]);
    const kept: Kept = { collection, at: now(), fields: Object.fromEntries(stripped) };
    await change(this.#database, ["examples"], (of) => of("examples").add(kept));
  }

  async counts(): Promise<ReadonlyMap<string, number>> {
    const counts = new Map<string, number>();
    for (const { collection } of await this.#all()) {
      counts.set(collection, (counts.get(collection) ?? 0) + 1);
    }
    return counts;
  }

  async countRecent(collection: string, maxAgeS: number): Promise<number> {
    return (await this.of(collection)).filter(({ at }) => now() - at <= maxAgeS).length;
  }

  /** Throws ExamplesError when examples differ in a field's type or shape. */
  async load(collection: string): Promise<Examples> {
    const kept = await this.of(collection);
    const names = Object.keys(kept[0]?.fields ?? {});
    const columns = names.map((name) => [name, stacked(name, kept)] as const);
    return { count: kept.length, columns: new Map(columns) };
  }

  /** The examples of a collection with their times, the oldest first. */
  async of(collection: string): Promise<readonly Kept[]> {
    return (await this.#all()).filter((one) => one.collection === collection);
  }

  /** Remove all examples. */
  async clear(): Promise<void> {
    await change(this.#database, ["examples"], (of) => of("examples").clear());
  }

  async #all(): Promise<readonly Kept[]> {
    const [keys, all] = await Promise.all([
      look(this.#database, "examples", (examples) => examples.getAllKeys()),
      look(this.#database, "examples", (examples) => examples.getAll() as IDBRequest<Kept[]>),
    ]);
    const held = heldTo(all, now());
    const stays = retained(held, this.#retention(), now());
    if (held.some((one, place) => one !== all[place] || !stays[place])) {
      await change(this.#database, ["examples"], (of) => {
        keys.forEach((key, place) => {
          if (!stays[place]) of("examples").delete(key);
          else if (held[place] !== all[place]) replace(of("examples"), key, held[place]!);
        });
      });
    }
    return held.filter((_, place) => stays[place]);
  }
}

/** The examples, with those of the future at a time: the clock was ahead when they came, and they would never be too old.
 *
 * A clock before EARLIEST was reset, and moves none.
 */
export function heldTo(all: readonly Kept[], at: number): readonly Kept[] {
  return all.map((one) => (one.at > at && at >= EARLIEST ? { ...one, at } : one));
}

/** Which of the examples, in the order in which they came, are kept at a time. */
export function retained(all: readonly Kept[], { maxAgeS, most }: Retention, at: number): boolean[] {
  const newer = new Map<string, number>();
  return all
    .toReversed()
    .map((one) => {
      const rank = (newer.get(one.collection) ?? 0) + 1;
      newer.set(one.collection, rank);
      return rank <= most && at - one.at <= maxAgeS;
    })
    .toReversed();
}

/** Put an example in the place of the one under a key, unless another page has removed it. */
function replace(examples: IDBObjectStore, key: IDBValidKey, one: Kept): void {
  const there = examples.count(key);
  there.onsuccess = () => {
    if (there.result > 0) examples.put(one, key);
  };
}

/** The column of a field of several examples. Throws ExamplesError when they differ in its type or shape. */
export function stacked(name: string, kept: readonly Kept[]): Column {
  const first = kept[0]!.fields[name]!;
  const Kind = first.values.constructor as new (size: number) => Values;
  const columns = kept.map(({ fields }, place) => {
    const column = fields[name];
    if (column?.values.constructor !== Kind || column.shape.join() !== first.shape.join()) {
      throw invalid(`field ${name} of example ${place} is not like that of the first one`);
    }
    return column;
  });
  let end = 0;
  const ends = columns.map(({ values }) => (end += values.length));
  const values = new Kind(end);
  columns.forEach((column, place) => {
    (values as Float32Array).set(column.values as Float32Array, ends[place]! - column.values.length);
  });
  return isLine(first) ? { shape: first.shape, values, ends } : { shape: first.shape, values };
}

/** Whether a column is a line of bytes. */
function isLine({ shape, values }: Column): boolean {
  return values instanceof Uint8Array && shape.length === 1;
}

/** A line of bytes without the zeros at its end. */
export function withoutZeros({ shape, values }: Column): Column {
  const line = values as Uint8Array<ArrayBuffer>;
  return { shape, values: line.slice(0, line.findLastIndex((byte) => byte !== 0) + 1) };
}

function now(): number {
  return Date.now() / 1000;
}
