/** Pieces of every encoding of SA1: fields taken from the front, bitmaps, heads. Spec: docs/spec/secagg.md §1, §4. */

import { type Bytes, concat, equal, fromLittleEndian, utf8 } from "../bytes.ts";
import * as errors from "./errors.ts";

const VERSION = 1;
export const [KEY_BYTES, DIGEST_BYTES, SHARE_BYTES, SIGNATURE_BYTES] = [32, 32, 32, 64] as const;

/** The number of a message, which is its first byte. Devices send the odd ones, and the server the others. */
export const M = {
  INVITE: 0,
  ADVERTISE: 1,
  ROSTER: 2,
  SHARES: 3,
  DELIVER: 4,
  COMPLAINTS: 5,
  INCLUDED: 6,
  MASKED: 7,
  SURVIVORS: 8,
  CONFIRM: 9,
  CONFIRMATIONS: 10,
  UNMASK: 11,
  RESULT: 12,
} as const;

/** The number of a message. Throws Malformed when there is none. */
export function numberOf(message: Bytes): number {
  const number = message[0];
  if (number === undefined || number > M.RESULT) {
    throw new errors.Malformed(`a message that begins with ${number ?? "nothing"} does not exist`);
  }
  return number;
}

/** The domain of a hash, key or signature, so that none can be used as another. */
export function tag(what: string): Bytes {
  return utf8(`muster.secagg.v1.${what}\0`);
}

/** A reader that takes fields from the front of a message, and refuses bytes that are missing or left over. */
export class Reader {
  readonly #data: Bytes;
  readonly #name: string;
  #at = 0;

  constructor(data: Bytes, name: string) {
    this.#data = data;
    this.#name = name;
  }

  /** The next `size` bytes, as a copy. */
  take(size: number): Bytes {
    const end = this.#at + size;
    if (end > this.#data.length) {
      throw new errors.Malformed(`${this.#name} ends after ${this.#data.length} bytes, in a field that goes to ${end}`);
    }
    const part = this.#data.slice(this.#at, end);
    this.#at = end;
    return part;
  }

  /** The next unsigned integer of up to 6 bytes. */
  integer(size: number): number {
    return Number(this.wide(size));
  }

  /** The next unsigned integer of any size. */
  wide(size: number): bigint {
    return fromLittleEndian(this.take(size));
  }

  /** The next double. Throws Malformed unless it is finite. */
  double(): number {
    const value = new DataView(this.take(8).buffer).getFloat64(0, true);
    if (!Number.isFinite(value)) {
      throw new errors.Malformed(`${this.#name} holds a number that is not finite`);
    }
    return value;
  }

  /** The positions below n whose bits are set. */
  bitmap(n: number): Set<number> {
    const data = this.take(Math.ceil(n / 8));
    if (n % 8 && data.at(-1)! >> (n % 8)) {
      throw new errors.Malformed(`a bitmap of ${n} positions names others`);
    }
    const found = new Set<number>();
    for (let position = 0; position < n; position++) {
      if ((data[position >> 3]! >> (position & 7)) & 1) {
        found.add(position);
      }
    }
    return found;
  }

  /** The positions at the start of `count` entries; the caller reads the other fields. Positions must ascend. */
  *ascending(count: number): Generator<number> {
    let last = -1;
    for (let entry = 0; entry < count; entry++) {
      const position = this.integer(4);
      if (position <= last) {
        throw new errors.Malformed("positions do not ascend");
      }
      last = position;
      yield position;
    }
  }

  /** Refuse bytes that are left over. */
  close(): void {
    if (this.#at !== this.#data.length) {
      throw new errors.Malformed(`${this.#name} has ${this.#data.length - this.#at} bytes too many`);
    }
  }
}

/** A set of positions below n as bits, the least significant first. */
export function bitmap(positions: Iterable<number>, n: number): Bytes {
  const data = new Uint8Array(Math.ceil(n / 8));
  for (const position of positions) {
    data[position >> 3]! |= 1 << (position & 7);
  }
  return data;
}

/** A reader behind the head of a message. Throws Malformed, UnsupportedSuite or WrongSession. */
export function openMessage(data: Bytes, number: number, name: string, session?: Bytes): Reader {
  const reader = new Reader(data, name);
  const [found, version] = reader.take(2);
  if (found !== number) {
    throw new errors.Malformed(`message M${found} came instead of M${number}, ${name}`);
  }
  if (version !== VERSION) {
    throw new errors.UnsupportedSuite(
      `${name} has version ${version}; this end speaks ${VERSION}: update the older end`,
    );
  }
  if (session !== undefined && !equal(reader.take(DIGEST_BYTES), session)) {
    throw new errors.WrongSession(
      `${name} belongs to another session: it is late, or the other end holds another roster`,
    );
  }
  return reader;
}

/** A message: its head, the session that it belongs to, and its fields. */
export function message(number: number, session: Bytes, ...fields: readonly Uint8Array[]): Bytes {
  return concat(Uint8Array.of(number, VERSION), session, ...fields);
}

/** The positions in a message that is a set of them, and nothing else. */
export function readSet(data: Bytes, number: number, name: string, sid: Bytes, n: number): Set<number> {
  const reader = openMessage(data, number, name, sid);
  const found = reader.bitmap(n);
  reader.close();
  return found;
}
