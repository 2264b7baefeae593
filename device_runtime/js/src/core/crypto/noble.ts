/** The suite in pure JavaScript, from the @noble libraries: the same bytes as WebCrypto's, but far slower. */

import { ctr, gcm } from "@noble/ciphers/aes.js";
import { ed25519, x25519 } from "@noble/curves/ed25519.js";
import { hkdf } from "@noble/hashes/hkdf.js";
import { sha256 } from "@noble/hashes/sha2.js";
import type { Bytes } from "../bytes.ts";
import type { Suite } from "./suite.ts";

const NONCE = new Uint8Array(12);
// As the RFC has it, and WebCrypto: without, a public key or a point may have several encodings.
const STRICT = { zip215: false };

export const nobleSuite: Suite = {
  async sha256(data) {
    return sha256(data);
  },
  async hkdf(secret, salt, info) {
    return hkdf(sha256, secret, salt, info, 32);
  },
  async signingKey(secret) {
    return { public: ed25519.getPublicKey(secret), sign: async (message) => ed25519.sign(message, secret) };
  },
  async verifies(publicKey, signature, message) {
    return ed25519.verify(signature, message, publicKey, STRICT);
  },
  async pairKey(secret) {
    return { public: x25519.getPublicKey(secret), agree: async (peer) => x25519.getSharedSecret(secret, peer) };
  },
  async seal(key, content, about) {
    return gcm(key, NONCE, about).encrypt(content);
  },
  async openBox(key, box, about) {
    return gcm(key, NONCE, about).decrypt(box);
  },
  async keystream(key) {
    const fill = async (target: Bytes, block: number) => {
      const counter = new Uint8Array(16);
      new DataView(counter.buffer).setUint32(12, block);
      target.set(ctr(key, counter).encrypt(new Uint8Array(target.length)));
    };
    return { fill };
  },
};
