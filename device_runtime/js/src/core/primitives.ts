/** Cryptographic primitives: digests, signatures, agreement, ciphers, each by the fastest correct implementation.
 *
 * WebCrypto computes what it can: the global one of Node and browsers, or one that an app provides (`useWebCrypto`), as
 * in React Native. JavaScript computes the rest: older browsers have no X25519, and a page without TLS has no
 * WebCrypto.
 */

import { type Bytes, equal, fromHex } from "./bytes.ts";
import { nobleSuite } from "./crypto/noble.ts";
import type { Keystream, PairKey, SigningKey, Suite } from "./crypto/suite.ts";
import { webSuite } from "./crypto/webcrypto.ts";

export type { Keystream, PairKey, SigningKey } from "./crypto/suite.ts";

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

/** SHA-256, 32 bytes. */
export async function sha256(data: Bytes): Promise<Bytes> {
  return (await suite()).sha256(data);
}

/** HKDF-SHA-256 (RFC 5869) to 32 bytes. */
export async function hkdf(secret: Bytes, salt: Bytes, info: Bytes): Promise<Bytes> {
  return (await suite()).hkdf(secret, salt, info);
}

/** The private key of 32 bytes that signs by Ed25519. */
export async function signingKey(secret: Bytes): Promise<SigningKey> {
  return (await suite()).signingKey(secret);
}

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

/** A box of AES-256-GCM. A key must seal only one. */
export async function seal(key: Bytes, content: Bytes, about: Bytes): Promise<Bytes> {
  return (await suite()).seal(key, content, about);
}

/** The content of a box. Throws when it does not open. */
export async function openBox(key: Bytes, box: Bytes, about: Bytes): Promise<Bytes> {
  return (await suite()).openBox(key, box, about);
}

/** The stream of AES-256-CTR under a key. */
export async function keystream(key: Bytes): Promise<Keystream> {
  return (await suite()).keystream(key);
}
