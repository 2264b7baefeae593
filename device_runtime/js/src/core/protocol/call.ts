/** A call as one HTTP request: signed anew at every attempt, its answer bounded in time and size.
 *
 * A signature is of RFC 9421, by the profile with which a device proves its identity. Spec: docs/spec/wire.md §1, §7, §10.
 */

import { type Bytes, base64, base64url, hex, joined, plain, utf8 } from "../bytes.ts";
import { type RandomSource, type SigningKey, sha256 } from "../cryptography.ts";
import { BadAnswer, FormatError, Refused, Unreachable } from "../errors.ts";
import type { BytesMoved, Platform } from "../platform.ts";
import { decodeAnswer } from "../wire/messages.ts";

const COVERED = ["@method", "@authority", "@path", "@query"];
const SIGNED_FIELDS = ["content-digest", "upload-offset", "upload-length", "upload-complete", "repr-digest"];
const VALIDITY_S = 300;
const NONCE_BYTES = 16;
const ID_HEX = 32;

/** The parts of a request that a signature can cover. Names of header fields are in lower case. */
interface SignableRequest {
  readonly method: string;
  readonly url: URL;
  readonly fields: Readonly<Record<string, string>>;
}

/** The signer of requests: a private key, and the name by which the coordinator finds the public one. */
export interface Signer {
  readonly keyid: string;
  readonly key: SigningKey;
}

/** The two header fields that sign a request, made at `created`, in seconds since 1970. */
export async function signatureFields(
  { keyid, key }: Signer,
  request: SignableRequest,
  created: number,
  random: RandomSource,
): Promise<Record<"signature-input" | "signature", string>> {
  const covered = [...COVERED, ...SIGNED_FIELDS.filter((name) => name in request.fields)];
  const nonce = base64url(random(NONCE_BYTES));
  const times = `created=${created};expires=${created + VALIDITY_S}`;
  const parameters = `(${covered.map((name) => `"${name}"`).join(" ")});${times};nonce="${nonce}";keyid="${keyid}"`;
  const signature = await key.sign(signatureBase(request, covered, parameters));
  return { "signature-input": `device=${parameters}`, signature: `device=:${base64(signature)}:` };
}

/** The text that is signed (RFC 9421 §2.5): a line for each component, and one for the parameters. */
export function signatureBase(request: SignableRequest, covered: readonly string[], parameters: string): Bytes {
  const { host, pathname, search } = request.url;
  const derived: Record<string, string> = {
    "@method": request.method,
    "@authority": host.toLowerCase(),
    "@path": pathname,
    "@query": search || "?",
  };
  const lines = covered.map((name) => `"${name}": ${derived[name] ?? request.fields[name]}`);
  return utf8([...lines, `"@signature-params": ${parameters}`].join("\n"));
}

/** A digest of 32 bytes as Content-Digest and Repr-Digest say it (RFC 9530). */
export function digestField(digest: Bytes): string {
  return `sha-256=:${base64(digest)}:`;
}

/** A device's public key in its text form. */
export function keyText(publicKey: Bytes): string {
  return `ed25519:${base64url(publicKey)}`;
}

/** The id of the device with this public key (as text); it depends on nothing else. */
export async function deviceId(key: string): Promise<string> {
  return hex(await sha256(utf8(key))).slice(0, ID_HEX);
}

export const TIMEOUT_S = 30;
const LARGEST_MESSAGE = 1 << 20;
/** The least bytes of a body per second; a slower peer counts as gone (docs/spec/wire.md §1). */
const SLOWEST = 1000;
const LONGEST_TIMER_MS = 2 ** 31 - 1;
const URN = "urn:muster:problem:";
export const JSON_TYPE = { "content-type": "application/json" };
export const BYTES_TYPE = { "content-type": "application/octet-stream" };

/** One call of the wire protocol.
 *
 * timeoutS: for the head of the answer, once the body has left, and for each piece of the answer's body. most: bytes of
 * that body. arrived: the pieces that earlier attempts brought of the body with this `etag`; an answer goes on with them, or
 * begins anew.
 */
export interface Call {
  readonly method: string;
  readonly path: string;
  readonly body?: Bytes;
  readonly headers?: Readonly<Record<string, string>>;
  readonly timeoutS?: number;
  readonly most?: number;
  readonly arrived?: Uint8Array[];
  readonly etag?: string;
  readonly cancelled?: AbortSignal;
}

/** An answer that was read to its end. */
export interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly body: Bytes;
}

type Timer = ReturnType<typeof setTimeout>;

/** Make a call once. created: the time of its signature, in seconds since 1970.
 *
 * Throws Unreachable, BadAnswer or Refused.
 */
export async function send(
  platform: Platform,
  base: URL,
  call: Call,
  signer: Signer,
  created: number,
  moved: BytesMoved,
): Promise<Answer> {
  const name = `${call.method} ${call.path}`;
  const url = new URL(base.origin + base.pathname.replace(/\/$/, "") + call.path);
  const fields: Record<string, string> = { ...call.headers };
  if (call.body !== undefined) {
    fields["content-digest"] = digestField(await sha256(call.body));
  }
  const signature = await signatureFields(signer, { method: call.method, url, fields }, created, platform.random);
  const limit = new TimeLimit(call);
  const answer = await exchange(platform, url, call, { ...fields, ...signature }, limit, moved)
    .catch((error) => {
      throw error instanceof BadAnswer ? error : new Unreachable(`${name}: ${String(error?.cause ?? error)}`);
    })
    .finally(() => limit.end());
  if (answer.status < 200 || answer.status >= 300) {
    throw refusal(name, answer);
  }
  return answer;
}

async function exchange(
  platform: Platform,
  url: URL,
  call: Call,
  headers: Record<string, string>,
  limit: TimeLimit,
  moved: BytesMoved,
): Promise<Answer> {
  let response: Response | null = null;
  try {
    response = await platform.fetch(url, {
      method: call.method,
      headers,
      ...(call.body === undefined ? {} : { body: call.body }),
      signal: limit.signal,
      redirect: "manual",
      cache: "no-store",
      credentials: "omit",
    });
  } finally {
    // A body that ran out of time has left, as far as anybody knows.
    if (response !== null || limit.signal.aborted) moved.up += call.body?.length ?? 0;
  }
  limit.renew();
  // A problem may be longer than a small blob.
  const most = (response.ok ? call.most : undefined) ?? LARGEST_MESSAGE;
  const { arrived = [], etag } = call;
  let size = sizeOf(arrived);
  const goesOn = response.status === 206 && response.headers.get("content-range")?.startsWith(`bytes ${size}-`);
  const pieces = response.ok && (goesOn || response.headers.get("etag") === etag) ? arrived : [];
  if (!goesOn) size = pieces.length = 0;
  const reader = response.body?.getReader();
  for (let piece = await reader?.read(); piece?.value !== undefined; piece = await reader?.read()) {
    limit.renew();
    pieces.push(piece.value);
    size += piece.value.length;
    moved.down += piece.value.length;
    if (size > most) {
      await reader?.cancel();
      throw new BadAnswer(`${call.method} ${call.path}: the answer is longer than ${most} bytes`);
    }
  }
  return { status: response.status, headers: response.headers, body: joined(pieces) };
}

/** The time limits of an exchange: a time-out for each wait, and for the whole exchange the time at the least rate.
 *
 * Cancelling the call ends it, too: `AbortSignal.any`, which would join both, is missing in React Native.
 */
class TimeLimit {
  readonly #ended = new AbortController();
  readonly #waitMs: number;
  readonly #whole: Timer;
  #wait: Timer;

  readonly #cancelled: AbortSignal | undefined;
  readonly #cancel = () => this.#ended.abort(this.#cancelled?.reason);

  constructor({ body, timeoutS = TIMEOUT_S, most = LARGEST_MESSAGE, cancelled }: Call) {
    this.#cancelled = cancelled;
    cancelled?.aborted ? this.#cancel() : cancelled?.addEventListener("abort", this.#cancel);
    const [upS, downS] = [(body?.length ?? 0) / SLOWEST, most / SLOWEST];
    this.#waitMs = 1000 * timeoutS;
    this.#wait = this.#stopAfter(this.#waitMs + 1000 * upS, "no answer came in time");
    this.#whole = this.#stopAfter(this.#waitMs + 1000 * (upS + downS), "the answer came too slowly");
  }

  /** Aborted once the time is up. */
  get signal(): AbortSignal {
    return this.#ended.signal;
  }

  /** The head or a piece of the answer arrived: the next piece has its own time. */
  renew(): void {
    clearTimeout(this.#wait);
    this.#wait = this.#stopAfter(this.#waitMs, "the answer broke off");
  }

  /** The exchange is over. */
  end(): void {
    this.#cancelled?.removeEventListener("abort", this.#cancel);
    clearTimeout(this.#wait);
    clearTimeout(this.#whole);
  }

  #stopAfter(ms: number, why: string): Timer {
    return setTimeout(() => this.#ended.abort(new Error(why)), Math.min(ms, LONGEST_TIMER_MS));
  }
}

/** Bytes of pieces. */
export function sizeOf(pieces: readonly Uint8Array[]): number {
  return pieces.reduce((sum, { length }) => sum + length, 0);
}

/** The error for an answer with a problem; without a problem document, one made from the status. */
function refusal(name: string, { status, headers, body }: Answer): Refused {
  const after = headers.get("retry-after") ?? "";
  const date = Date.parse(headers.get("date") ?? "");
  const hints = {
    retry: null,
    afterS: /^\d{1,9}$/.test(after) ? Number(after) : 0,
    theirTime: Number.isNaN(date) ? null : date / 1000,
  };
  const named = plain(headers.get("muster-problem") ?? `http-${status}`);
  try {
    const { type, detail, retry } = decodeAnswer("problem", body);
    return new Refused(status, plain(type.replace(URN, "")), plain(detail), { ...hints, retry });
  } catch (error) {
    if (!(error instanceof FormatError)) throw error;
    return new Refused(status, named, `${name} was answered with status ${status}`, hints); // to HEAD, or by a proxy
  }
}
