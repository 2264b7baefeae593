/** Keys of a session: signatures, derivations, boxes and shares in the domains of SA1. Spec: docs/spec/secagg.md §1, §6. */

import { type Bytes, concat, fromLittleEndian, hex, u32 } from "../bytes.ts";
import { hkdf, openBox, type PairKey, type RandomSource, type SigningKey, seal, verifies } from "../cryptography.ts";
import { tag } from "./encoding.ts";
import * as errors from "./errors.ts";

const FIELD_PRIME = 2n ** 255n - 19n;
export const NO_CONTEXT: Bytes = new Uint8Array(32);

/** A signature (64 bytes) over a domain, a context (32 bytes) and a body. */
export function sign(key: SigningKey, what: string, context: Bytes, body: Bytes): Promise<Bytes> {
  return key.sign(concat(tag(what), context, body));
}

/** Throws BadSignature unless `signature` is the signer's (a 32-byte public key) over exactly these values. */
export async function verify(signer: Bytes, signature: Bytes, what: string, context: Bytes, body: Bytes) {
  if (!(await verifies(signer, signature, concat(tag(what), context, body)))) {
    const whose = hex(signer).slice(0, 12);
    throw new errors.BadSignature(
      `the ${what} signature is not that of ${whose}…: it was altered, or made for another session`,
    );
  }
}

/** A private key of X25519 as the integer that is shared out: clamped as RFC 7748 §5 says. */
export function scalarOf(secret: Bytes): bigint {
  return (fromLittleEndian(secret) & ((1n << 254n) - 8n)) | (1n << 254n);
}

/** The shared secret with a peer's public key, 32 bytes.
 *
 * Throws BadPoint when that is not the one encoding of its point, or has low order: its sender wants a known secret.
 */
export async function agree(key: PairKey, peer: Bytes): Promise<Bytes> {
  const name = hex(peer).slice(0, 12);
  if (fromLittleEndian(peer) >= FIELD_PRIME) {
    throw new errors.BadPoint(`public key ${name}… is not reduced: it would have two encodings`);
  }
  try {
    return await key.agree(peer);
  } catch {
    throw new errors.BadPoint(`public key ${name}… has low order: its sender wants a known secret`);
  }
}

/** A key of 32 bytes for one purpose between numbered parties in one session. */
export function derive(secret: Bytes, sid: Bytes, what: string, ...numbers: number[]): Promise<Bytes> {
  return hkdf(secret, sid, concat(tag(what), u32(...numbers)));
}

/** Shares in a box that names sender and receiver. A key must seal only one box. */
export function sealShares(key: Bytes, shares: Bytes, sid: Bytes, sender: number, receiver: number): Promise<Bytes> {
  return seal(key, shares, concat(sid, u32(sender, receiver)));
}

/** The content of a box. Throws BadCiphertext, which names the sender. */
export async function openShares(key: Bytes, box: Bytes, sid: Bytes, sender: number, receiver: number): Promise<Bytes> {
  try {
    return await openBox(key, box, concat(sid, u32(sender, receiver)));
  } catch {
    throw new errors.BadCiphertext(
      `the box from position ${sender} does not open: it was altered, or sealed for another`,
    );
  }
}

export const PRIME = (1n << 256n) - 189n;

/** A random integer below PRIME. */
export function randomBelowPrime(random: RandomSource): bigint {
  for (;;) {
    const value = fromLittleEndian(random(32));
    if (value < PRIME) {
      return value;
    }
  }
}

/** Shares of a secret below PRIME for ranks 1 … k. Any t of them recover it; fewer reveal nothing. */
export function split(secret: bigint, k: number, t: number, random: RandomSource): bigint[] {
  const polynomial = [secret, ...Array.from({ length: t - 1 }, () => randomBelowPrime(random))];
  return Array.from({ length: k }, (_, index) => evaluate(polynomial, BigInt(index + 1)));
}

function evaluate(polynomial: readonly bigint[], x: bigint): bigint {
  return polynomial.reduceRight((value, coefficient) => (value * x + coefficient) % PRIME, 0n);
}
