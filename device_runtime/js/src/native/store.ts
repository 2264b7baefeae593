/** The store of a device in React Native: sealed texts in SQLite, under a key that the phone's keychain holds. */

import { type Bytes, base64, concat, fromBase64, text, utf8 } from "../core/bytes.ts";
import { StateDamaged } from "../core/errors.ts";
import type { Store } from "../core/platform.ts";
import { hkdf, openBox, type RandomSource, type SigningKey, seal, signingKey } from "../core/primitives.ts";
import type { Database, SecureStore, Statements } from "./modules.ts";

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
