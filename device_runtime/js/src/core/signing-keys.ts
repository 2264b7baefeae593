/** Signing keys of a device, for platforms that hold no keys themselves: their bytes are texts of the store. */

import { base64, fromBase64 } from "./bytes.ts";
import { StateDamaged } from "./errors.ts";
import type { Store } from "./platform.ts";
import { platformRandom, type SigningKey, signingKey } from "./primitives.ts";

const KEY_BYTES = 32;

/** The key of that name, made at the first call. Throws StateDamaged when what is kept is no key. */
export async function keptSigningKey(store: Store, name: string): Promise<SigningKey> {
  const place = `key:${name}`;
  const kept = await store.get(place);
  const secret = kept ?? base64(platformRandom(KEY_BYTES));
  if (kept === null) await store.write({ [place]: secret });
  try {
    return await signingKey(fromBase64(secret));
  } catch (error) {
    throw new StateDamaged(`a key of this device cannot be read: ${String(error)}`);
  }
}
