/** What a browser keeps for a device, one database of IndexedDB for each target: texts, blobs, the owner's settings.
 *
 * The bytes of blobs are in the Cache API under the database's name.
 */

import { type Bytes, base64, fromBase64 } from "../core/bytes.ts";
import { StateDamaged } from "../core/errors.ts";
import type { Labels } from "../core/permission/policy.ts";
import { type BlobCache, keptJson, type Store, usedMs } from "../core/platform.ts";
import type { OwnRules } from "./conditions.ts";

export interface Target {
  /** The address of the coordinator, as a URL has it in `href`. */
  readonly coordinator: string;
  readonly population: string;
}

/** The name of a target: of its database, its blobs, its lock and its channel. */
export function nameOf({ coordinator, population }: Target): string {
  return `muster ${JSON.stringify([coordinator, population])}`;
}

const VERSION = 1;

/** What the database holds: texts of the store, key pairs, examples, and when blobs were used. */
type Part = "texts" | "keys" | "examples" | "blobs";

/** Open the database of a target, which is made at the first time. Throws StateDamaged. */
export async function openDatabase(target: Target): Promise<IDBDatabase> {
  const database = await stored(() => opened(nameOf(target)));
  database.onversionchange = () => database.close(); // another page removes it, or has a newer version
  return database;
}

/** The database. A browser that allows no storage throws at once. */
function opened(name: string): Promise<IDBDatabase> {
  const opening = indexedDB.open(name, VERSION);
  opening.onupgradeneeded = () => {
    const made = opening.result;
    made.createObjectStore("texts");
    made.createObjectStore("keys");
    made.createObjectStore("examples", { autoIncrement: true }).createIndex("collection", "collection");
    made.createObjectStore("blobs");
  };
  return answerOf(opening);
}

/** Change parts of the database in one transaction, on disk when the promise resolves. Throws StateDamaged. */
export async function change(database: IDBDatabase, parts: readonly Part[], work: (of: Of) => void): Promise<void> {
  await stored(
    () =>
      new Promise<void>((resolve, reject) => {
        const transaction = database.transaction(parts, "readwrite", { durability: "strict" });
        transaction.oncomplete = () => resolve();
        transaction.onabort = () => reject(transaction.error);
        work((part) => transaction.objectStore(part));
      }),
  );
}

type Of = (part: Part) => IDBObjectStore;

/** What a request on one part of the database finds. Throws StateDamaged. */
export function look<T>(database: IDBDatabase, part: Part, ask: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  return stored(() => answerOf(ask(database.transaction(part).objectStore(part))));
}

function answerOf<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** The error for a failure of the browser's storage. */
async function stored<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    const { name = "" } = (error ?? {}) as { name?: string };
    throw new StateDamaged(
      name === "QuotaExceededError"
        ? "this browser's storage is full: delete examples here, or data of other sites"
        : `this browser's storage cannot be used: ${String(error)}`,
    );
  }
}

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

const PLACE = "owner";

/** How long examples are kept, in seconds, and how many of a collection. */
export interface Retention {
  readonly maxAgeS: number;
  readonly most: number;
}

/** The settings of the device's owner. policy: docs/device.md. */
export interface Owner {
  readonly policy: object;
  readonly rules: OwnRules;
  readonly retention: Retention;
}

/** The settings that are kept; null when none are. Throws StateDamaged. */
export function keptOwner(store: Store): Promise<Owner | null> {
  return keptJson<Owner>(store, PLACE);
}

const LABELS = "labels";

/** The labels that a page stated last. Throws StateDamaged. */
export async function keptLabels(store: Store): Promise<Labels> {
  return (await keptJson<Labels>(store, LABELS)) ?? {};
}

/** Store labels, replacing earlier ones; of none nothing is kept. Throws StateDamaged. */
export function keepLabels(store: Store, labels: Labels): Promise<void> {
  return store.write({ [LABELS]: Object.keys(labels).length > 0 ? JSON.stringify(labels) : null });
}

const SECRET = "enrolment-secret";

/** The page's enrolment secret that is kept, if any: workers run without the page too. Throws StateDamaged. */
export async function keptSecret(store: Store): Promise<Bytes | undefined> {
  const kept = await store.get(SECRET);
  return kept === null ? undefined : fromBase64(kept);
}

/** Keep the page's enrolment secret, or none. Throws StateDamaged. */
export function keepSecret(store: Store, secret: Bytes | undefined): Promise<void> {
  return store.write({ [SECRET]: secret === undefined ? null : base64(secret) });
}

/** Store settings, replacing earlier ones. Throws StateDamaged. */
export function keepOwner(store: Store, owner: Owner): Promise<void> {
  return store.write({ [PLACE]: JSON.stringify(owner) });
}
