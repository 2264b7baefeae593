/** The database of a device in a browser: one of IndexedDB's for each target, for all pages of an origin. */

import { StateDamaged } from "../core/errors.ts";
import { nameOf, type Target } from "./target.ts";

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
