/** The store of a device in a browser: texts in IndexedDB, and blobs in the Cache API under the database's name. */

import type { Bytes } from "../core/bytes.ts";
import { type BlobCache, type Store, usedMs } from "../core/platform.ts";
import { change, look } from "./database.ts";

/** Texts by key in the part `texts` of the database. */
export class IndexedDbStore implements Store {
  readonly #database: IDBDatabase;

  constructor(database: IDBDatabase) {
    this.#database = database;
  }

  async get(key: string): Promise<string | null> {
    const found: unknown = await look(this.#database, "texts", (texts) => texts.get(key));
    return typeof found === "string" ? found : null;
  }

  async write(changes: Readonly<Record<string, string | null>>): Promise<void> {
    await change(this.#database, ["texts"], (of) => {
      for (const [key, value] of Object.entries(changes)) {
        value === null ? of("texts").delete(key) : of("texts").put(value, key);
      }
    });
  }
}

/** The size of a blob, and when it was used last, in milliseconds since 1970. */
interface Use {
  readonly size: number;
  readonly at: number;
}

/** Blobs by digest. The bytes are in the Cache API, and when they were used in the part `blobs` of the database. */
export class CachedBlobs implements BlobCache {
  readonly #database: IDBDatabase;

  constructor(database: IDBDatabase) {
    this.#database = database;
  }

  async get(sha256: string): Promise<Bytes | null> {
    const found = await (await caches.open(this.#database.name)).match(address(sha256));
    if (found === undefined) return null;
    const data = new Uint8Array(await found.arrayBuffer());
    await this.#used(sha256, data.length);
    return data;
  }

  /** Keep a blob, unless there is no room for it or for the record of its use, by which `trim` finds it. */
  async put(sha256: string, data: Bytes): Promise<void> {
    const cache = await caches.open(this.#database.name);
    try {
      await cache.put(address(sha256), new Response(data));
      await this.#used(sha256, data.length);
    } catch {
      await cache.delete(address(sha256));
    }
  }

  async trim(most: number, keep: ReadonlySet<string>): Promise<void> {
    const [names, uses] = await Promise.all([
      look(this.#database, "blobs", (blobs) => blobs.getAllKeys()),
      look(this.#database, "blobs", (blobs) => blobs.getAll() as IDBRequest<Use[]>),
    ]);
    const named = names.map((name, place) => ({ name: String(name), ...uses[place]! }));
    const known = named.filter(({ name }) => !keep.has(name));
    const cache = await caches.open(this.#database.name);
    let total = 0;
    for (const { name, size } of known.sort((a, b) => usedMs(b.at) - usedMs(a.at))) {
      total += size;
      if (total > most) {
        await cache.delete(address(name));
        await change(this.#database, ["blobs"], (of) => of("blobs").delete(name));
      }
    }
  }

  /** Remove all blobs. */
  async clear(): Promise<void> {
    await caches.delete(this.#database.name);
    await change(this.#database, ["blobs"], (of) => of("blobs").clear());
  }

  async #used(sha256: string, size: number): Promise<void> {
    const use: Use = { size, at: Date.now() };
    await change(this.#database, ["blobs"], (of) => of("blobs").put(use, sha256));
  }
}

/** The address of a blob in the cache, which nothing is fetched from. */
function address(sha256: string): string {
  return `https://blobs.invalid/${sha256}`;
}
