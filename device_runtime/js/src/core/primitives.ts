/** Primitives of cryptography, all of the platform's WebCrypto: digests, signatures, agreement, ciphers.
 *
 * Keys are raw bytes here, and WebCrypto takes private ones only in PKCS #8 (RFC 8410), which for both curves is a
 * fixed head and the 32 bytes.
 */

import { type Bytes, concat, fromBase64url, fromHex } from "./bytes.ts";

const HEADS = {
  Ed25519: fromHex("302e020100300506032b657004220420"),
  X25519: fromHex("302e020100300506032b656e04220420"),
};
const NONCE = new Uint8Array(12); // every key seals one box
const PAIR = { name: "X25519" } as const;

/** SHA-256, 32 bytes. */
export async function sha256(data: Bytes): Promise<Bytes> {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", data));
}

/** Random bytes, from the platform: what draws secrets, and what a test replaces by a stated sequence. */
export type RandomSource = (size: number) => Bytes;

/** The platform's own random bytes. */
export const platformRandom: RandomSource = (size) => crypto.getRandomValues(new Uint8Array(size));

/** A private key that signs: Ed25519, from its 32 bytes. */
export class SigningKey {
  readonly public: Bytes;
  readonly #key: CryptoKey;

  private constructor(key: CryptoKey, publicKey: Bytes) {
    this.#key = key;
    this.public = publicKey;
  }

  static async of(secret: Bytes): Promise<SigningKey> {
    const [key, publicKey] = await privateKey("Ed25519", secret, ["sign"]);
    return new SigningKey(key, publicKey);
  }

  /** A signature of 64 bytes. The same message has the same signature. */
  async sign(message: Bytes): Promise<Bytes> {
    return new Uint8Array(await crypto.subtle.sign("Ed25519", this.#key, message));
  }
}

/** Whether an Ed25519 public key of 32 bytes made the signature over the message. */
export async function verifies(publicKey: Bytes, signature: Bytes, message: Bytes): Promise<boolean> {
  try {
    const key = await crypto.subtle.importKey("raw", publicKey, "Ed25519", false, ["verify"]);
    return await crypto.subtle.verify("Ed25519", key, signature, message);
  } catch {
    return false; // not a public key, or not 64 bytes
  }
}

/** An X25519 private key of one session, from its 32 bytes, which makes secrets with peers. */
export class PairKey {
  readonly public: Bytes;
  readonly #key: CryptoKey;

  private constructor(key: CryptoKey, publicKey: Bytes) {
    this.#key = key;
    this.public = publicKey;
  }

  static async of(secret: Bytes): Promise<PairKey> {
    const [key, publicKey] = await privateKey("X25519", secret, ["deriveBits"]);
    return new PairKey(key, publicKey);
  }

  /** The shared secret with a peer's public key, 32 bytes. Throws when the key has low order, or is none. */
  async agree(peer: Bytes): Promise<Bytes> {
    const point = await crypto.subtle.importKey("raw", peer, PAIR, false, []);
    const shared = new Uint8Array(await crypto.subtle.deriveBits({ ...PAIR, public: point }, this.#key, 256));
    if (shared.every((byte) => byte === 0)) {
      throw new RangeError("the public key has low order"); // platforms differ in whether they look
    }
    return shared;
  }
}

async function privateKey(name: "Ed25519" | "X25519", secret: Bytes, uses: KeyUsage[]): Promise<[CryptoKey, Bytes]> {
  const key = await crypto.subtle.importKey("pkcs8", concat(HEADS[name], secret), { name }, true, uses);
  const { x } = await crypto.subtle.exportKey("jwk", key);
  return [key, fromBase64url(x ?? "")];
}

/** HKDF-SHA-256 (RFC 5869) to 32 bytes. */
export async function hkdf(secret: Bytes, salt: Bytes, info: Bytes): Promise<Bytes> {
  const key = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  return new Uint8Array(await crypto.subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt, info }, key, 256));
}

/** A box of AES-256-GCM. A key must seal only one. */
export async function seal(key: Bytes, content: Bytes, about: Bytes): Promise<Bytes> {
  const box = { name: "AES-GCM", iv: NONCE, additionalData: about };
  return new Uint8Array(await crypto.subtle.encrypt(box, await aesKey("AES-GCM", key), content));
}

/** The content of a box. Throws when it does not open. */
export async function openBox(key: Bytes, box: Bytes, about: Bytes): Promise<Bytes> {
  const how = { name: "AES-GCM", iv: NONCE, additionalData: about };
  return new Uint8Array(await crypto.subtle.decrypt(how, await aesKey("AES-GCM", key), box));
}

/** A stream of AES-256-CTR from a zero counter block, which can be read from any block of 16 bytes on. */
export class Keystream {
  readonly #key: CryptoKey;

  private constructor(key: CryptoKey) {
    this.#key = key;
  }

  static async of(key: Bytes): Promise<Keystream> {
    return new Keystream(await aesKey("AES-CTR", key));
  }

  /** `size` bytes from block `block` on. */
  async bytes(block: number, size: number): Promise<Bytes> {
    const counter = new Uint8Array(16);
    new DataView(counter.buffer).setUint32(12, block);
    const how = { name: "AES-CTR", counter, length: 64 };
    return new Uint8Array(await crypto.subtle.encrypt(how, this.#key, new Uint8Array(size)));
  }
}

function aesKey(name: "AES-GCM" | "AES-CTR", key: Bytes): Promise<CryptoKey> {
  return crypto.subtle.importKey("raw", key, name, false, ["encrypt", "decrypt"]);
}
