/** The store of a device on Node: one SQLite file, whole after a kill or a power cut, and blobs as files beside it. */

import { closeSync, mkdirSync, openSync } from "node:fs";
import { mkdir, readdir, readFile, rename, rm, stat, utimes, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import type { Bytes } from "../core/bytes.ts";
import { StateDamaged, StateInUse } from "../core/errors.ts";
import { type BlobCache, type Store, usedMs } from "../core/platform.ts";

// The table is made under the lock that the process then keeps.
const OPENING = `
  PRAGMA locking_mode = EXCLUSIVE;
  PRAGMA synchronous = FULL;
  BEGIN EXCLUSIVE;
  CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
  COMMIT`;

/** Texts by key in the file `state.db`, which only its owner can read, for one process at a time. */
export class SqliteStore implements Store {
  readonly #database: DatabaseSync;

  /** Throws StateInUse when another process has the folder, StateDamaged when it cannot be used. */
  constructor(folder: string) {
    try {
      mkdirSync(folder, { recursive: true, mode: 0o700 });
      const path = join(folder, "state.db");
      closeSync(openSync(path, "a", 0o600)); // SQLite gives its journal the same mode
      this.#database = new DatabaseSync(path);
      const owner = this.#database.prepare("PRAGMA application_id").get()?.["application_id"];
      if (owner !== 0) throw new Error("it is of another program, such as the device in Python; name another folder");
      this.#database.exec(OPENING);
    } catch (error) {
      const inUse = String(error).includes("database is locked");
      throw inUse
        ? new StateInUse(`another process runs a session with the state in ${folder}`)
        : new StateDamaged(`the state in ${folder} cannot be used: ${String(error)}`);
    }
  }

  async get(key: string): Promise<string | null> {
    const row = this.#database.prepare("SELECT value FROM kept WHERE key = ?").get(key);
    return row === undefined ? null : String(row["value"]);
  }

  async write(changes: Readonly<Record<string, string | null>>): Promise<void> {
    const put = this.#database.prepare("INSERT OR REPLACE INTO kept VALUES (?, ?)");
    const remove = this.#database.prepare("DELETE FROM kept WHERE key = ?");
    this.#database.exec("BEGIN IMMEDIATE");
    try {
      for (const [key, value] of Object.entries(changes)) {
        value === null ? remove.run(key) : put.run(key, value);
      }
      this.#database.exec("COMMIT");
    } catch (error) {
      this.#database.exec("ROLLBACK");
      throw new StateDamaged(`the state cannot be written: ${String(error)}`);
    }
  }

  close(): void {
    this.#database.close();
  }
}

/** Blobs by digest, as files in the folder `blobs`. */
export class FileBlobs implements BlobCache {
  readonly #folder: string;

  constructor(folder: string) {
    this.#folder = join(folder, "blobs");
  }

  async get(sha256: string): Promise<Bytes | null> {
    const path = join(this.#folder, sha256);
    try {
      const data = Uint8Array.from(await readFile(path));
      const now = new Date();
      await utimes(path, now, now);
      return data;
    } catch {
      return null; // it is fetched
    }
  }

  async put(sha256: string, data: Bytes): Promise<void> {
    await mkdir(this.#folder, { recursive: true });
    const part = join(this.#folder, `${sha256}.part`);
    await writeFile(part, data);
    await rename(part, join(this.#folder, sha256));
  }

  async trim(most: number, keep: ReadonlySet<string>): Promise<void> {
    const names = (await readdir(this.#folder).catch(() => [])).filter((name) => !keep.has(name));
    const files = await Promise.all(
      names.map(async (name) => {
        const path = join(this.#folder, name);
        const { size, mtimeMs } = await stat(path);
        return { path, size, mtimeMs };
      }),
    );
    let total = 0;
    for (const { path, size } of files.sort((a, b) => usedMs(b.mtimeMs) - usedMs(a.mtimeMs))) {
      total += size;
      if (total > most) await rm(path).catch(() => {}); // the next session tries again
    }
  }
}
