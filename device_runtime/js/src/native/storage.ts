/** Storage of a device in React Native: texts sealed in SQLite, under a key in the phone's keychain, and files of its cache.
 *
 * The system may empty the cache. It holds plans, and graphs by digest.
 */

import { type Bytes, base64, concat, fromBase64, text, utf8 } from "../core/bytes.ts";
import { hkdf, openBox, type RandomSource, type SigningKey, seal, signingKey } from "../core/cryptography.ts";
import { StateDamaged } from "../core/errors.ts";
import { type BlobCache, type Store, usedMs } from "../core/platform.ts";
import type { Database, FileSystem, NativeFile, SecureStore, Statements } from "./modules.ts";

const [SECRET_BYTES, SALT_BYTES] = [32, 16];
const SECRET = /^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$/; // 32 bytes in base64
const PREFIX = "muster.";
const OPENING = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT";
const PUT = "INSERT OR REPLACE INTO kept VALUES (?, ?)";
const REMOVE = "DELETE FROM kept WHERE key = ?";

/** Secrets of 32 bytes by name in the keychain, made at the first call. They never leave this phone, as in a backup. */
export class Keychain {
  readonly #store: SecureStore;
  readonly #random: RandomSource;
  readonly #secrets = new Map<string, Promise<Bytes>>();

  constructor(store: SecureStore, random: RandomSource) {
    this.#store = store;
    this.#random = random;
  }

  /** Throws StateDamaged when what is kept is no secret. */
  secret(name: string): Promise<Bytes> {
    const secret = this.#secrets.get(name) ?? this.#read(PREFIX + name);
    this.#secrets.set(name, secret); // callers at the same time must not make one each
    return secret;
  }

  async #read(name: string): Promise<Bytes> {
    // In the background a phone is locked, though its person unlocked it once since it started.
    const options = { keychainAccessible: this.#store.AFTER_FIRST_UNLOCK_THIS_DEVICE_ONLY };
    const kept = await this.#store.getItemAsync(name, options);
    if (kept === null) {
      const secret = this.#random(SECRET_BYTES);
      await this.#store.setItemAsync(name, base64(secret), options);
      return secret;
    }
    if (!SECRET.test(kept)) {
      throw new StateDamaged(`${name} in the keychain is no key: remove it, and the device begins anew`);
    }
    return fromBase64(kept);
  }

  /** The signing key of that name. */
  async signingKey(name: string): Promise<SigningKey> {
    return signingKey(await this.secret(`key.${name}`));
  }
}

/** Texts in a table `kept`, each sealed by AES-256-GCM under a key of its own, derived from the keychain's. */
export class SealedStore implements Store {
  readonly #database: Database;
  readonly #keychain: Keychain;
  readonly #random: RandomSource;

  private constructor(database: Database, keychain: Keychain, random: RandomSource) {
    this.#database = database;
    this.#keychain = keychain;
    this.#random = random;
  }

  static async of(database: Database, keychain: Keychain, random: RandomSource): Promise<SealedStore> {
    await database.execAsync(OPENING);
    return new SealedStore(database, keychain, random);
  }

  async get(key: string): Promise<string | null> {
    const row = await this.#database.getFirstAsync<{ value: string }>("SELECT value FROM kept WHERE key = ?", [key]);
    if (row === null) return null;
    try {
      const sealed = fromBase64(row.value);
      return text(await openBox(await this.#keyOf(sealed.slice(0, SALT_BYTES)), sealed.slice(SALT_BYTES), utf8(key)));
    } catch {
      throw new StateDamaged(
        `${key} does not open: it was changed, or the keychain has another key, as after a restore`,
      );
    }
  }

  async write(changes: Readonly<Record<string, string | null>>): Promise<void> {
    const sealed = await Promise.all(
      Object.entries(changes).map(
        async ([key, value]) => [key, value === null ? null : await this.#seal(key, value)] as const,
      ),
    );
    const writeAll = async (transaction: Statements) => {
      for (const [key, value] of sealed) {
        await (value === null ? transaction.runAsync(REMOVE, [key]) : transaction.runAsync(PUT, [key, value]));
      }
    };
    await this.#database.withExclusiveTransactionAsync(writeAll).catch((error: unknown) => {
      throw new StateDamaged(`the state cannot be written: ${String(error)}`);
    });
  }

  async #seal(key: string, value: string): Promise<string> {
    const salt = this.#random(SALT_BYTES);
    return base64(concat(salt, await seal(await this.#keyOf(salt), utf8(value), utf8(key))));
  }

  /** The key of one text: it seals no other, so that a box needs no nonce. */
  async #keyOf(salt: Bytes): Promise<Bytes> {
    return hkdf(await this.#keychain.secret("store"), salt, utf8("muster.store.v1"));
  }
}

/** A folder in the app's cache, made when something is written to it. */
export class Folder {
  readonly #system: FileSystem;
  readonly #folder: InstanceType<FileSystem["Directory"]>;

  constructor(system: FileSystem, name: string) {
    this.#system = system;
    this.#folder = new system.Directory(system.Paths.cache.uri, name);
  }

  file(name: string): NativeFile {
    return new this.#system.File(this.#folder.uri, name);
  }

  async write(name: string, data: Bytes): Promise<void> {
    this.#folder.create({ intermediates: true, idempotent: true });
    await this.file(name).write(data);
  }

  remove(name: string): void {
    const file = this.file(name);
    if (file.exists) file.delete();
  }

  /** All files. */
  list(): NativeFile[] {
    return this.#folder.exists ? this.#folder.list().filter((one): one is NativeFile => "bytes" in one) : [];
  }
}

/** Blobs by digest as files. A file that a kill left half written does not match its name, and is fetched again. */
export class FileBlobs implements BlobCache {
  readonly #folder: Folder;
  readonly #usedAt = new Map<string, number>();
  readonly #now: () => number;

  /** now: milliseconds since 1970. */
  constructor(folder: Folder, now: () => number = Date.now) {
    this.#folder = folder;
    this.#now = now;
  }

  async get(sha256: string): Promise<Bytes | null> {
    const file = this.#folder.file(sha256);
    if (!file.exists) return null;
    this.#usedAt.set(sha256, this.#now());
    return file.bytes().catch(() => null); // it is fetched
  }

  async put(sha256: string, data: Bytes): Promise<void> {
    await this.#folder.write(sha256, data);
    this.#usedAt.set(sha256, this.#now());
  }

  async trim(most: number, keep: ReadonlySet<string>): Promise<void> {
    const used = (file: NativeFile) => usedMs(this.#usedAt.get(file.name) ?? file.modificationTime ?? 0, this.#now());
    let total = 0;
    const files = this.#folder.list().filter(({ name }) => !keep.has(name));
    for (const file of files.sort((a, b) => used(b) - used(a))) {
      total += file.size;
      if (total > most) file.delete();
    }
  }
}
