/** Bytes, texts and JSON: joined, compared, decoded, and what comes from others checked before it is used or shown. */

export {
  bytesToNumberLE as fromLittleEndian,
  equalBytes as equal,
  numberToBytesLE as littleEndian,
} from "@noble/curves/utils.js";
export { bytesToHex as hex, hexToBytes as fromHex } from "@noble/hashes/utils.js";

import { isSafeNumber, parse } from "lossless-json";
import * as v from "valibot";
import { FormatError } from "./errors.ts";

export type Bytes = Uint8Array<ArrayBuffer>;

const ENCODER = new TextEncoder();
/** Bytes that are written as base64 at a time: whole letters, and arguments that every engine takes. */
const PIECE = 3 << 12;

/** UTF-8 bytes of a text. */
export function utf8(text: string): Bytes {
  return ENCODER.encode(text);
}

/** The text of UTF-8 bytes. Throws TypeError when they are not UTF-8. */
export function text(data: Uint8Array): string {
  return new TextDecoder("utf-8", { fatal: true }).decode(data);
}

/** All parts, one after the other. */
export function concat(...parts: readonly Uint8Array[]): Bytes {
  return joined(parts);
}

/** The same of any number of parts: more than a call can have arguments. */
export function joined(parts: readonly Uint8Array[]): Bytes {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** Free the memory of an array at once. Until garbage is collected, every new array gets fresh pages, which cost more
 * than the work on them. Nothing may use the array afterwards. An engine without `transfer` frees it later.
 */
export function letGo({ buffer }: { readonly buffer: ArrayBufferLike }): void {
  (buffer as { transfer?: (size: number) => ArrayBuffer }).transfer?.(0);
}

// Machines with a JavaScript engine are little-endian.

/** Unsigned 32-bit little-endian integers, joined. */
export function u32(...values: readonly number[]): Bytes {
  return new Uint8Array(Uint32Array.from(values).buffer);
}

/** Unsigned 64-bit little-endian integers, joined. Every value must be below 2^64. */
export function u64(...values: readonly bigint[]): Bytes {
  return new Uint8Array(BigUint64Array.from(values).buffer);
}

/** Base64 with padding (RFC 4648 §4). In pieces: a text that grows letter by letter takes memory for each of them. */
export function base64(data: Uint8Array): string {
  const pieces: string[] = [];
  for (let at = 0; at < data.length; at += PIECE) {
    const piece = data.subarray(at, at + PIECE) as unknown as number[]; // spread, they would take six times as long
    pieces.push(btoa(String.fromCharCode.apply(null, piece)));
  }
  return pieces.join("");
}

/** The inverse of `base64`. It accepts only what `base64` writes: one value has one spelling. Throws RangeError. */
export function fromBase64(letters: string): Bytes {
  let found: string;
  try {
    found = atob(letters);
  } catch {
    throw new RangeError("not base64");
  }
  const data = new Uint8Array(found.length);
  for (let place = 0; place < data.length; place++) {
    data[place] = found.charCodeAt(place);
  }
  // Of letters that are read, only blanks and the last four may be others than `base64` writes.
  const last = base64(data.subarray(data.length - ((data.length - 1) % 3) - 1));
  if (letters.length !== 4 * Math.ceil(data.length / 3) || !letters.endsWith(last)) {
    throw new RangeError("base64 that is not in its one spelling");
  }
  return data;
}

/** Base64url without padding (RFC 4648 §5), as keys and signatures are written. */
export function base64url(data: Uint8Array): string {
  return base64(data).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The inverse of `base64url`, and of nothing else. Throws RangeError. */
export function fromBase64url(letters: string): Bytes {
  if (!/^[A-Za-z0-9_-]*$/.test(letters)) {
    throw new RangeError("not base64url without padding");
  }
  const padding = "=".repeat((4 - (letters.length % 4)) % 4);
  return fromBase64(letters.replaceAll("-", "+").replaceAll("_", "/") + padding);
}

/** The number of bits of a whole number below 2^32, without leading zeros. */
export function bitLength(value: number): number {
  return 32 - Math.clz32(value);
}

// Controls, overrides of direction, spaces but the plain one, and letters and marks that have no width or no ink.
const UNSEEN =
  /(?! )[\p{C}\p{Z}\u115f\u1160\u2800\u3164\uffa0]|\u034f|[\u17b4-\u17b5]|[\u180b-\u180d]|\u180f|[\ufe00-\ufe0f]|[\u{e0100}-\u{e01ef}]/gu;

/** A text as one line that is safe to show: all but letters, marks, numbers, signs and plain spaces is escaped as in
 * JSON.
 *
 * A JSON document keeps its meaning.
 */
export function visible(text: string): string {
  return text.replace(UNSEEN, (letter) => letter.split("").map(escaped).join(""));
}

function escaped(unit: string): string {
  return `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

const MOST_SHOWN = 500;

/** A foreign text that is safe to keep and print: made visible, and not too long. */
export function plain(text: string): string {
  return visible(text.slice(0, MOST_SHOWN)).slice(0, MOST_SHOWN);
}

/** An integer of 0 or more that a number holds exactly: sizes, counts. */
export const count = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(Number.MAX_SAFE_INTEGER));
/** A number without a fraction that was written with one, such as 1.0: no integer. */
class Fraction {
  readonly value: number;

  constructor(value: number) {
    this.value = value;
  }
}

const fraction = v.pipe(
  v.instance(Fraction),
  v.transform(({ value }) => value),
);
/** A number that is finite. JSON has no others. */
export const finite = v.pipe(v.union([v.number(), fraction]), v.finite());
/** An integer from 0 to 2^63 − 1; a number is exact only up to 2^53. */
export const wide = v.pipe(
  v.union([count, v.bigint()]),
  v.transform((integer) => BigInt(integer)),
  v.minValue(0n),
  v.maxValue((1n << 63n) - 1n),
);
/** A SHA-256 in hex. */
export const digest = v.pipe(v.string(), v.regex(/^[0-9a-f]{64}$/));

/** Bytes in base64, of a fixed size where one is given. */
export function bytes(size?: number) {
  const spelled = v.pipe(
    v.string(),
    v.rawTransform<string, Bytes>(({ dataset, addIssue, NEVER }) => {
      try {
        return fromBase64(dataset.value);
      } catch (error) {
        addIssue({ message: String(error) });
        return NEVER;
      }
    }),
  );
  return v.pipe(
    spelled,
    v.check((data) => size === undefined || data.length === size, `not ${size} bytes`),
  );
}

/** Half of a character, or what may be one in JSON. */
const [HALF, HALVES] = [/[\ud800-\udfff]/u, /[\ud800-\udfff]|\\u[dD][89a-fA-F]/u];

/** The value of JSON text; an integer that a number would round is a bigint. Throws FormatError, calling it `noun`.
 *
 * Every text in it must be whole characters. Only the schemas of this module read its numbers: see `exact`.
 */
export function parseJson(data: Bytes | string, noun: string): unknown {
  try {
    const json = typeof data === "string" ? data : text(data);
    return parse(json, HALVES.test(json) ? whole : null, exact);
  } catch (error) {
    throw new FormatError(`malformed ${noun}: ${String(error)}`);
  }
}

/** A value checked against a schema. Throws FormatError naming the wrong member. */
export function checked<S extends v.GenericSchema>(schema: S, value: unknown, noun: string): v.InferOutput<S> {
  const found = v.safeParse(schema, value, { abortEarly: true });
  if (found.success) {
    return found.output;
  }
  const [issue] = found.issues;
  throw new FormatError(`malformed ${noun}: ${issue.message} at ${v.getDotPath(issue) ?? "the top"}`);
}

/** A member of an object or a list, if its texts are whole characters. Throws RangeError. */
function whole(name: string, value: unknown): unknown {
  if (HALF.test(name) || (typeof value === "string" && HALF.test(value))) {
    throw new RangeError(`half of a character in ${plain(name) || "a text"}`);
  }
  return value;
}

/** Integers of 64 bits at most stay exact: a message of megabytes of digits would take seconds to read as a bigint. */
function exact(digits: string): number | bigint | Fraction {
  if (/^-?[0-9]{1,20}$/.test(digits) && !isSafeNumber(digits)) return BigInt(digits);
  const number = Number(digits);
  return /[.eE]/.test(digits) && Number.isInteger(number) ? new Fraction(number) : number;
}
