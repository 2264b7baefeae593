/** Examples that the app collects: digits of 8 × 8 pixels with the digit that was meant, in the app's database. */

import { type Examples, type ExampleSource } from "@muster-fl/device";
import type { SQLiteDatabase } from "expo-sqlite";

const COLLECTION = "default";
const PIXELS = 64;
const TABLE = "CREATE TABLE IF NOT EXISTS digits (at REAL NOT NULL, x BLOB NOT NULL, y INTEGER NOT NULL) STRICT";

interface Row {
  readonly x: Uint8Array;
  readonly y: number;
}

/** Digits by the time at which they were drawn, in seconds since 1970. */
export class DigitExamples implements ExampleSource {
  readonly #database: Promise<SQLiteDatabase>;

  constructor(database: Promise<SQLiteDatabase>) {
    this.#database = database.then(async (opened) => {
      await opened.execAsync(TABLE);
      return opened;
    });
  }

  /** Keep a drawing: `pixels` (64,) from 0 to 1. */
  async add(pixels: Float32Array, digit: number): Promise<void> {
    const bytes = new Uint8Array(pixels.slice().buffer);
    await (await this.#database).runAsync("INSERT INTO digits VALUES (?, ?, ?)", [Date.now() / 1000, bytes, digit]);
  }

  async counts(): Promise<ReadonlyMap<string, number>> {
    return new Map([[COLLECTION, await this.#countSince(0)]]);
  }

  async countRecent(collection: string, maxAgeS: number): Promise<number> {
    return collection === COLLECTION ? this.#countSince(Date.now() / 1000 - maxAgeS) : 0;
  }

  async load(): Promise<Examples> {
    const rows = await (await this.#database).getAllAsync<Row>("SELECT x, y FROM digits ORDER BY at");
    const x = new Float32Array(rows.length * PIXELS);
    const y = new BigInt64Array(rows.length);
    rows.forEach((row, place) => {
      x.set(new Float32Array(row.x.slice().buffer), place * PIXELS);
      y[place] = BigInt(row.y);
    });
    const columns = new Map([
      ["x", { shape: [1, 8, 8], values: x }],
      ["y", { shape: [], values: y }],
    ]);
    return { count: rows.length, columns };
  }

  async #countSince(at: number): Promise<number> {
    const row = await (await this.#database).getFirstAsync<{ n: number }>("SELECT COUNT(*) AS n FROM digits WHERE at >= ?", [at]);
    return row?.n ?? 0;
  }
}
