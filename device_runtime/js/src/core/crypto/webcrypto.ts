/** The suite of a platform's WebCrypto.
 *
 * WebCrypto takes private keys of both curves only in PKCS #8 (RFC 8410), which is a fixed head and the 32 bytes.
 */

import { type Bytes, concat, fromBase64url, fromHex } from "../bytes.ts";
import type { Suite } from "./suite.ts";

const HEADS = {
  Ed25519: fromHex("302e020100300506032b657004220420"),
  X25519: fromHex("302e020100300506032b656e04220420"),
};
const PAIR = { name: "X25519" } as const;
const NONCE = new Uint8Array(12);

/** The functions of an implementation of WebCrypto. It may lack algorithms: their functions then throw. */
export function webSuite(subtle: SubtleCrypto): Suite {
  let zeros: Bytes = new Uint8Array(0); // kept: a new array for every piece of a stream costs more than the cipher
  const nowhere = portToNowhere();
  const aesKey = (name: "AES-GCM" | "AES-CTR", key: Bytes) =>
    subtle.importKey("raw", key, name, false, ["encrypt", "decrypt"]);
  const gcm = (about: Bytes) => ({ name: "AES-GCM", iv: NONCE, additionalData: about });

  async function privateKey(name: "Ed25519" | "X25519", secret: Bytes, uses: KeyUsage[]): Promise<[CryptoKey, Bytes]> {
    const key = await subtle.importKey("pkcs8", concat(HEADS[name], secret), { name }, true, uses);
    const { x } = await subtle.exportKey("jwk", key);
    return [key, fromBase64url(x ?? "")];
  }

  return {
    async sha256(data) {
      return new Uint8Array(await subtle.digest("SHA-256", data));
    },
    async hkdf(secret, salt, info) {
      const key = await subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
      return new Uint8Array(await subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt, info }, key, 256));
    },
    async signingKey(secret) {
      const [key, publicKey] = await privateKey("Ed25519", secret, ["sign"]);
      const sign = async (message: Bytes) => new Uint8Array(await subtle.sign("Ed25519", key, message));
      return { public: publicKey, sign };
    },
    async verifies(publicKey, signature, message) {
      const key = await subtle.importKey("raw", publicKey, "Ed25519", false, ["verify"]);
      return subtle.verify("Ed25519", key, signature, message);
    },
    async pairKey(secret) {
      const [key, publicKey] = await privateKey("X25519", secret, ["deriveBits"]);
      const agree = async (peer: Bytes) => {
        const point = await subtle.importKey("raw", peer, PAIR, false, []);
        return new Uint8Array(await subtle.deriveBits({ ...PAIR, public: point }, key, 256));
      };
      return { public: publicKey, agree };
    },
    async seal(key, content, about) {
      return new Uint8Array(await subtle.encrypt(gcm(about), await aesKey("AES-GCM", key), content));
    },
    async openBox(key, box, about) {
      return new Uint8Array(await subtle.decrypt(gcm(about), await aesKey("AES-GCM", key), box));
    },
    async keystream(key) {
      const imported = await aesKey("AES-CTR", key);
      const fill = async (target: Bytes, block: number) => {
        const counter = new Uint8Array(16);
        new DataView(counter.buffer).setUint32(12, block);
        const how = { name: "AES-CTR", counter, length: 64 };
        if (zeros.length < target.length) zeros = new Uint8Array(target.length);
        const made = await subtle.encrypt(how, imported, zeros.subarray(0, target.length));
        target.set(new Uint8Array(made));
        nowhere?.postMessage(null, [made]);
      };
      return { fill };
    },
  };
}

/** A port that frees the memory of whatever it is sent, if the platform has ports.
 *
 * Chromium keeps a result of WebCrypto until garbage is collected, even if the script has dropped it. So each new
 * result gets fresh pages, which take twice as long as the cipher. Sending a result transfers its memory away, and here
 * the other end is closed, so the memory is freed.
 */
function portToNowhere(): MessagePort | undefined {
  if (typeof MessageChannel === "undefined") return undefined;
  const { port1, port2 } = new MessageChannel();
  port2.close();
  return port1;
}
