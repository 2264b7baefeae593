/** A suite of cryptography: the functions that the protocol needs, on raw bytes, from any implementation. */

import type { Bytes } from "../bytes.ts";

/** A private key that signs by Ed25519, and its public key of 32 bytes. */
export interface SigningKey {
  readonly public: Bytes;
  /** A signature of 64 bytes. The same message has the same signature. */
  sign(message: Bytes): Promise<Bytes>;
}

/** A private key of X25519, and its public key of 32 bytes. */
export interface PairKey {
  readonly public: Bytes;
  /** The shared secret with a peer's public key, 32 bytes. Throws when the key has low order, or is malformed. */
  agree(peer: Bytes): Promise<Bytes>;
}

/** A stream of AES-256-CTR from a zero counter block, which can be read from any block of 16 bytes on. */
export interface Keystream {
  /** Fill `target` with the bytes from block `block` on. */
  fill(target: Bytes, block: number): Promise<void>;
}

/** The functions of a suite. Every key and secret has 32 bytes. */
export interface Suite {
  /** SHA-256, 32 bytes. */
  sha256(data: Bytes): Promise<Bytes>;
  /** HKDF-SHA-256 (RFC 5869) to 32 bytes. */
  hkdf(secret: Bytes, salt: Bytes, info: Bytes): Promise<Bytes>;
  signingKey(secret: Bytes): Promise<SigningKey>;
  /** Whether an Ed25519 public key of 32 bytes made the signature over the message. */
  verifies(publicKey: Bytes, signature: Bytes, message: Bytes): Promise<boolean>;
  pairKey(secret: Bytes): Promise<PairKey>;
  /** A box of AES-256-GCM with a zero nonce. A key must seal only one. */
  seal(key: Bytes, content: Bytes, about: Bytes): Promise<Bytes>;
  /** The content of a box. Throws when it does not open. */
  openBox(key: Bytes, box: Bytes, about: Bytes): Promise<Bytes>;
  keystream(key: Bytes): Promise<Keystream>;
}
