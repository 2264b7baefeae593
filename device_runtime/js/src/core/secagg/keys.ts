/** Keys of a session: signatures, derivations, boxes, shares, and masks in the domains of SA1. Spec: docs/spec/secagg.md §1, §6.
 *
 * Masks are keystreams of AES-256-CTR that are added to words modulo 2^64: two at a time by WebAssembly, or halves of words
 * in JavaScript, with the same sums. JavaScript takes several times as long. It is for platforms without WebAssembly and
 * its vectors: Hermes, old browsers, and pages that forbid it.
 */

import { type Bytes, concat, fromHex, fromLittleEndian, hex, u32 } from "../bytes.ts";
import {
  hkdf,
  keystream,
  openBox,
  type PairKey,
  type RandomSource,
  type SigningKey,
  seal,
  verifies,
} from "../cryptography.ts";
import { tag } from "./encoding.ts";
import * as errors from "./errors.ts";
import type { Words } from "./packing.ts";

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

const BLOCK_BYTES = 16;

/** A stream by its key (32 bytes), and its sign. */
export interface Mask {
  readonly key: Bytes;
  readonly sign: 1 | -1;
}

/** Add streams, each with its sign, to words in place, modulo 2^64. */
export async function addMasks(words: Words, masks: readonly Mask[]): Promise<void> {
  const streams = await Promise.all(masks.map(({ key }) => keystream(key)));
  const adder = newAdder();
  const [sums, others] = [new Uint8Array(adder.memory.buffer), new Uint8Array(adder.memory.buffer, CHUNK_BYTES)];
  const bytes = new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
  for (let first = 0; first < bytes.length; first += CHUNK_BYTES) {
    const chunk = bytes.subarray(first, first + CHUNK_BYTES);
    sums.set(chunk);
    for (const [place, stream] of streams.entries()) {
      await stream.fill(others.subarray(0, chunk.length), first / BLOCK_BYTES);
      masks[place]!.sign > 0 ? adder.add(chunk.length) : adder.subtract(chunk.length);
    }
    chunk.set(sums.subarray(0, chunk.length));
  }
}

/** The bytes of words that an adder holds, and of those that it adds: they stay in a processor's cache. */
export const CHUNK_BYTES = 1 << 19;

/** A memory of two chunks, and functions that add to `size` bytes of words in the first as many of the second. */
interface Adder {
  readonly memory: { readonly buffer: ArrayBuffer };
  add(size: number): void;
  subtract(size: number): void;
}

/** An adder of its own, the fastest that the platform has. */
export function newAdder(): Adder {
  try {
    return new WebAssembly.Instance(new WebAssembly.Module(moduleBytes())).exports as unknown as Adder;
  } catch {
    return adderInJavaScript(); // what is missing has an error of its own on every platform
  }
}

function moduleBytes() {
  const module = [
    ["0061736d", "01000000"], // WebAssembly, version 1
    ["0105", "01", "60017f00"], // one type: a function of an integer of 32 bits, the size, that gives nothing
    ["0303", "02", "00", "00"], // two functions of that type
    ["0504", "01", "011010"], // one memory, of 16 pages of 64 KiB: two chunks
    ["071b", "03", "066d656d6f7279", "0200", "03616464", "0000", "087375627472616374", "0001"], // by their names
    ["0a57", "02", ...body("fdce01"), ...body("fdd101")], // i64x2.add, i64x2.sub
  ];
  return fromHex(module.flat().join(""));
}

/** The code of a function that puts two words and two others at a time through an operator. */
function body(operator: string): readonly string[] {
  return [
    "2a", // 42 bytes follow
    "01017f", // one integer of 32 bits besides the size: the place, which begins at 0
    "0340", // loop
    "2001", // the place, to store at
    "2001fd000400", // two words from there: v128.load
    "2001fd0004808020", // two others, a chunk further on
    operator,
    "fd0b0400", // v128.store
    "200141106a2201", // 16 bytes further on
    "200049", // is that below the size?
    "0d00", // then once more
    "0b0b",
  ];
}

/** An adder without WebAssembly. */
export function adderInJavaScript(): Adder {
  const buffer = new ArrayBuffer(2 * CHUNK_BYTES);
  const [words, others] = [new Int32Array(buffer, 0, CHUNK_BYTES / 4), new Int32Array(buffer, CHUNK_BYTES)];
  return {
    memory: { buffer },
    add: (size) => add(words, others, size / 4),
    subtract: (size) => subtract(words, others, size / 4),
  };
}

type Halves = Int32Array<ArrayBuffer>;

// Signed halves of words, and carries by bits: masks are random, so processors guess every other branch wrong.

function add(words: Halves, others: Halves, end: number): void {
  for (let low = 0; low < end; low += 2) {
    const [a, b] = [words[low]!, others[low]!];
    const sum = (a + b) | 0;
    const carry = ((a & b) | ((a | b) & ~sum)) >>> 31;
    words[low] = sum;
    words[low + 1] = words[low + 1]! + others[low + 1]! + carry;
  }
}

function subtract(words: Halves, others: Halves, end: number): void {
  for (let low = 0; low < end; low += 2) {
    const [a, b] = [words[low]!, others[low]!];
    const rest = (a - b) | 0;
    const borrow = ((~a & b) | (~(a ^ b) & rest)) >>> 31;
    words[low] = rest;
    words[low + 1] = words[low + 1]! - others[low + 1]! - borrow;
  }
}
