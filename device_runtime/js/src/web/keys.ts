/** Keys of a device in a browser: Ed25519 pairs in IndexedDB, whose private bytes no script can read. */

import { StateDamaged } from "../core/errors.ts";
import type { SigningKey } from "../core/primitives.ts";
import { change, look } from "./database.ts";

/** The signing key of that name, made at the first call. Throws StateDamaged where the browser has no Ed25519. */
export async function heldSigningKey(database: IDBDatabase, name: string): Promise<SigningKey> {
  const kept = await look(database, "keys", (keys) => keys.get(name) as IDBRequest<CryptoKeyPair | undefined>);
  const pair = kept ?? (await newPair());
  if (kept === undefined) {
    await change(database, ["keys"], (of) => of("keys").put(pair, name));
  }
  return {
    public: new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)),
    sign: async (message) => new Uint8Array(await crypto.subtle.sign("Ed25519", pair.privateKey, message)),
  };
}

async function newPair(): Promise<CryptoKeyPair> {
  try {
    return (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
  } catch (error) {
    throw new StateDamaged(`this browser cannot make a key of Ed25519; a newer one can: ${String(error)}`);
  }
}
