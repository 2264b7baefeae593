/** Cryptography: digests, signatures, agreement, ciphers, each by the fastest correct implementation.
 *
 * WebCrypto computes what it can: the global one of Node and browsers, or one that an app provides (`useWebCrypto`), as
 * in React Native. JavaScript computes the rest: older browsers have no X25519, and a page without TLS has no
 * WebCrypto.
 */

import { ctr, gcm } from "@noble/ciphers/aes.js";
import { ed25519, x25519 } from "@noble/curves/ed25519.js";
import { hkdf as hkdfOf } from "@noble/hashes/hkdf.js";
import { hmac as hmacOf } from "@noble/hashes/hmac.js";
import { sha256 as digestOf } from "@noble/hashes/sha2.js";
import { type Bytes, concat, equal, fromBase64url, fromHex } from "./bytes.ts";

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

/** A stream by what encrypts zeros from a counter on. done: frees what that gave. */
export function streamOf(
  encrypt: (counter: Bytes, zeros: Bytes) => Promise<Uint8Array> | Uint8Array,
  done: (made: Uint8Array) => void = () => {},
): Keystream {
  const fill = async (target: Bytes, block: number) => {
    const counter = new Uint8Array(16);
    new DataView(counter.buffer).setUint32(12, block);
    if (zeros.length < target.length) zeros = new Uint8Array(target.length);
    const made = await encrypt(counter, zeros.subarray(0, target.length));
    target.set(made);
    done(made);
  };
  return { fill };
}

/** Kept, as a new array for every piece of a stream costs more than the cipher. */
let zeros: Bytes = new Uint8Array(0);

/** The functions of a suite. Every key and secret has 32 bytes. */
export interface Suite {
  /** SHA-256, 32 bytes. */
  sha256(data: Bytes): Promise<Bytes>;
  /** HKDF-SHA-256 (RFC 5869) to 32 bytes. */
  hkdf(secret: Bytes, salt: Bytes, info: Bytes): Promise<Bytes>;
  /** The private key of 32 bytes that signs by Ed25519. */
  signingKey(secret: Bytes): Promise<SigningKey>;
  /** Whether an Ed25519 public key of 32 bytes made the signature over the message. */
  verifies(publicKey: Bytes, signature: Bytes, message: Bytes): Promise<boolean>;
  /** The private key of 32 bytes that makes secrets with peers by X25519. */
  pairKey(secret: Bytes): Promise<PairKey>;
  /** A box of AES-256-GCM with a zero nonce. A key must seal only one. */
  seal(key: Bytes, content: Bytes, about: Bytes): Promise<Bytes>;
  /** The content of a box. Throws when it does not open. */
  openBox(key: Bytes, box: Bytes, about: Bytes): Promise<Bytes>;
  /** The stream of AES-256-CTR under a key. */
  keystream(key: Bytes): Promise<Keystream>;
}

const NONCE = new Uint8Array(12);
// As the RFC has it, and WebCrypto: without, a public key or a point may have several encodings.
const STRICT = { zip215: false };

const nobleSuite: Suite = {
  async sha256(data) {
    return digestOf(data);
  },
  async hkdf(secret, salt, info) {
    return hkdfOf(digestOf, secret, salt, info, 32);
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
    return streamOf((counter, zeros) => ctr(key, counter).encrypt(zeros));
  },
};

const HEADS = {
  Ed25519: fromHex("302e020100300506032b657004220420"),
  X25519: fromHex("302e020100300506032b656e04220420"),
};
const PAIR = { name: "X25519" } as const;

/** The functions of an implementation of WebCrypto. It may lack algorithms: their functions then throw. */
function webSuite(subtle: SubtleCrypto): Suite {
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
      const encrypt = async (counter: Bytes, zeros: Bytes) =>
        new Uint8Array(await subtle.encrypt({ name: "AES-CTR", counter, length: 64 }, imported, zeros));
      return streamOf(encrypt, ({ buffer }) => nowhere?.postMessage(null, [buffer as ArrayBuffer]));
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

/** Random bytes, from the platform. Secrets are drawn from them; a test replaces them by a fixed sequence. */
export type RandomSource = (size: number) => Bytes;

/** The platform's own random bytes. */
export const platformRandom: RandomSource = (size) => crypto.getRandomValues(new Uint8Array(size));

/** An algorithm: the functions of a suite that compute it, and a known answer for inputs of zeros. */
interface Algorithm {
  readonly functions: readonly (keyof Suite)[];
  readonly answer: (suite: Suite) => Promise<Bytes>;
  readonly known: string;
}

const ZEROS: Bytes = new Uint8Array(32);
const ALGORITHMS: readonly Algorithm[] = [
  {
    functions: ["sha256"],
    answer: (suite) => suite.sha256(ZEROS),
    known: "66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925",
  },
  {
    functions: ["hkdf"],
    answer: (suite) => suite.hkdf(ZEROS, ZEROS, ZEROS),
    known: "590bddecebc711a48590ee673c12c31caf45d145b9af5d52e8c4bcdc08e11f1f",
  },
  {
    functions: ["signingKey", "verifies"],
    answer: async (suite) => {
      const key = await suite.signingKey(ZEROS);
      const signature = await key.sign(ZEROS);
      return (await suite.verifies(key.public, signature, ZEROS)) ? signature.slice(0, 32) : ZEROS;
    },
    known: "3da1ebdfa96edd181dbe3659d1c051c431f056a5ad6a97a60d5cca1046043878",
  },
  {
    functions: ["pairKey"],
    answer: async (suite) => {
      const key = await suite.pairKey(ZEROS);
      return key.agree(key.public);
    },
    known: "93fea2a7c1aeb62cfd6452ff5badae8bdffcbd7196dc910c89944006d85dbb68",
  },
  {
    functions: ["seal", "openBox"],
    answer: async (suite) => {
      const box = await suite.seal(ZEROS, ZEROS, ZEROS);
      return equal(await suite.openBox(ZEROS, box, ZEROS), ZEROS) ? box : ZEROS;
    },
    known: "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e2d46b7e01dcbc3baf13bcfc76a3bd207",
  },
  {
    functions: ["keystream"],
    answer: async (suite) => {
      const drawn = new Uint8Array(32);
      await (await suite.keystream(ZEROS)).fill(drawn, 1);
      return drawn;
    },
    known: "530f8afbc74536b9a963b4f1c4cb738bcea7403d4d606b6e074ec5d3baf39d18",
  },
];

let inUse: Promise<Suite> | null = null;

/** Let an implementation of WebCrypto compute what it can from now on, and JavaScript the rest.
 *
 * others: functions of the platform that are faster than WebCrypto's.
 */
export function useWebCrypto(subtle: SubtleCrypto | undefined, others: Partial<Suite> = {}): void {
  const web = subtle === undefined ? Promise.resolve({}) : rightOnes(webSuite(subtle));
  inUse = web.then((found) => ({ ...nobleSuite, ...found, ...others }));
}

/** The functions of WebCrypto that give the known answers. */
async function rightOnes(web: Suite): Promise<Partial<Suite>> {
  const isRight = ({ answer, known }: Algorithm) =>
    answer(web).then(
      (found) => equal(found, fromHex(known)),
      () => false,
    );
  const right = await Promise.all(ALGORITHMS.map(isRight));
  const names = ALGORITHMS.filter((_, place) => right[place]).flatMap(({ functions }) => functions);
  return Object.fromEntries(names.map((name) => [name, web[name]]));
}

function suite(): Promise<Suite> {
  if (inUse === null) useWebCrypto(globalThis.crypto?.subtle);
  return inUse!;
}

/** A function of the suite in use, as `Suite` describes it. */
function ofSuite<K extends keyof Suite>(name: K): Suite[K] {
  const call = async (...given: unknown[]) => ((await suite())[name] as (...given: unknown[]) => unknown)(...given);
  return call as unknown as Suite[K];
}

/** HMAC-SHA-256, 32 bytes. The messages are short, so JavaScript computes it. */
export function hmac(secret: Bytes, message: Bytes): Bytes {
  return hmacOf(digestOf, secret, message);
}

export const sha256 = ofSuite("sha256");
export const hkdf = ofSuite("hkdf");
export const signingKey = ofSuite("signingKey");
export const seal = ofSuite("seal");
export const openBox = ofSuite("openBox");
export const keystream = ofSuite("keystream");

/** Whether an Ed25519 public key of 32 bytes made the signature over the message. */
export async function verifies(publicKey: Bytes, signature: Bytes, message: Bytes): Promise<boolean> {
  try {
    return await (await suite()).verifies(publicKey, signature, message);
  } catch {
    return false; // not a public key, or not 64 bytes
  }
}

/** The private key of 32 bytes that makes secrets with peers by X25519. */
export async function pairKey(secret: Bytes): Promise<PairKey> {
  const key = await (await suite()).pairKey(secret);
  const agree = async (peer: Bytes) => {
    const shared = await key.agree(peer);
    if (shared.every((byte) => byte === 0)) {
      throw new RangeError("the public key has low order"); // platforms differ in whether they look
    }
    return shared;
  };
  return { public: key.public, agree };
}
