/** The device's half of the wire protocol: its calls, which of them are repeated, and the one that it holds meanwhile.
 *
 * Spec: docs/spec/wire.md.
 */

import { type Bytes, hex, joined, plain, utf8 } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import {
  type AbortReason,
  BadAnswer,
  DeviceError,
  FormatError,
  Refused,
  TransportError,
  Unreachable,
} from "../errors.ts";
import type { Labels } from "../permission/policy.ts";
import { type BlobRef, isBlob } from "../plans/plan.ts";
import type { BlobCache, BytesMoved, Platform } from "../platform.ts";
import { type ANSWERS, type Assignment, decodeAnswer, type Rejected, WIRE_VERSION } from "../wire/messages.ts";
import type { Signed } from "../wire/statements.ts";
import * as calls from "./call.ts";

const RETRIES = 3;
const [FIRST_DELAY_S, LONGEST_DELAY_S] = [0.5, 60];
const LEAVING_S = 2;
// A larger report is uploaded resumably, so that a broken connection loses nothing.
const LARGEST_WHOLE = 8 << 20;
// A body arrived damaged, or an upload began at another offset: the next attempt asks for the offset again.
const SENT_AGAIN = ["digest-mismatch", "mismatching-offset"];
/** Where a device introduces itself, by the name of the answer. */
const INTRODUCTIONS = { enrolled: "/v1/devices", credential: "/v1/credentials" } as const;

/** The device's identity for the coordinator. `signer` may enrol first; after `forget` it does. */
export interface Identity {
  signer(): Promise<calls.Signer>;
  forget(): Promise<void>;
}

/** A conversation with one coordinator, or enrolment authority.
 *
 * A call is repeated on 429, on 503, when the coordinator is too new for a signature, when the connection breaks, and
 * when a proxy sent a request twice: 3 times before there is an assignment, and 3 times within it. If the coordinator
 * finds this device's clock wrong, its time is used for signatures from then on. Once `stopping`, running calls are cut,
 * later ones have LEAVING_S, and none is repeated. Every method throws Unreachable, Refused or BadAnswer.
 */
export class Transport {
  identity: Identity | null = null;
  stopping: AbortSignal = new AbortController().signal;
  readonly moved: BytesMoved = { up: 0, down: 0 };
  /** The time at which the last call about an assignment ended, in seconds; infinity during one. */
  spokeAt = -Infinity;
  readonly #platform: Platform;
  readonly #base: URL;
  #left = RETRIES;
  #aheadS = 0;

  constructor(platform: Platform, base: URL) {
    this.#platform = platform;
    this.#base = base;
  }

  /** Check in: this device is willing. */
  async checkIn(population: string, message: object) {
    return this.#message("checkIn", `/v1/populations/${encodeURIComponent(population)}/checkins`, message);
  }

  /** Wait, for about `waitS` seconds, to be selected for one of `tasks`. */
  async awaitAssignment(session: string, waitS: number, tasks: readonly string[]): Promise<Assignment | Rejected> {
    const path = `/v1/sessions/${encodeURIComponent(session)}/assignments`;
    const answer = await this.#message("assignment", path, { tasks }, waitS);
    this.#left = RETRIES;
    return answer;
  }

  /** A blob's bytes, checked. arrived: pieces that earlier sessions brought; it keeps those of this one if it breaks off. */
  async blob(ref: BlobRef, arrived: Uint8Array[] = []): Promise<Bytes> {
    const isGuess = arrived.length > 0;
    const etag = `"${ref.sha256}"`;
    const call = { method: "GET", path: `/v1/blobs/${ref.sha256}`, most: ref.size, arrived, etag };
    const { body } = await this.#again(() => {
      const start = calls.sizeOf(arrived);
      const rest = { range: `bytes=${start}-`, "if-range": etag };
      return this.#attempt(start > 0 ? { ...call, headers: rest } : call);
    });
    if (!(await isBlob(ref, body))) {
      arrived.length = 0;
      if (isGuess) return this.blob(ref, arrived); // they were damaged
      throw new BadAnswer(`blob ${ref.sha256.slice(0, 12)}… of ${ref.size} bytes arrived as ${body.length} others`);
    }
    return body;
  }

  /** The release of a model's version that this device is to use; null if there is none for it.
   *
   * labels: those that the device tells.
   */
  async model(population: string, name: string, labels: Labels): Promise<Signed | null> {
    const query = Object.entries(labels).map(([label, value]) => `${label}=${encodeURIComponent(value)}`);
    const model = `/v1/populations/${encodeURIComponent(population)}/models/${name}`;
    const path = query.length > 0 ? `${model}?${query.join("&")}` : model;
    try {
      return read("model", path, await this.#call({ method: "GET", path })).release;
    } catch (error) {
      if (error instanceof Refused && error.reason === "no-model") return null;
      throw error;
    }
  }

  /** Upload the report. Repeating it is safe: the coordinator counts a digest once. */
  async report(assignment: string, body: Bytes): Promise<void> {
    const path = `${assignmentPath(assignment)}/report`;
    const answer = await this.#again(() =>
      body.length > LARGEST_WHOLE
        ? this.#bringTheRest(path, body)
        : this.#attempt({ method: "PUT", path, body, headers: calls.BYTES_TYPE }),
    );
    if (read("receipt", path, answer).sha256 !== hex(await sha256(body))) {
      throw new BadAnswer("the receipt is for another report");
    }
  }

  /** Hold an assignment for about `waitS` seconds, without retries. Throws Refused if the report is not needed. */
  async hold(assignment: string, waitS: number, cancelled: AbortSignal): Promise<void> {
    const path = assignmentPath(assignment);
    await this.#attempt({ method: "GET", path, headers: prefer(waitS), timeoutS: waitS + calls.TIMEOUT_S, cancelled });
  }

  /** The message of a secure aggregation with that number, or what follows it when it is given and sent.
   *
   * null when there is none within about `waitS` seconds. Repeating it is safe.
   */
  async secagg(assignment: string, number: number, waitS: number, sent?: Bytes): Promise<Bytes | null> {
    const call = sent === undefined ? { method: "GET" } : { method: "PUT", body: sent };
    const headers = { ...(sent && calls.BYTES_TYPE), ...prefer(waitS) };
    const path = `${assignmentPath(assignment)}/secagg/${number}`;
    const answer = await this.#call({ ...call, path, headers, timeoutS: waitS + calls.TIMEOUT_S });
    return answer.status === 204 ? null : answer.body;
  }

  /** Give the assignment up. */
  async abort(assignment: string, reason: AbortReason): Promise<void> {
    const body = utf8(JSON.stringify({ reason }));
    await this.#call({ method: "POST", path: `${assignmentPath(assignment)}:abort`, body, headers: calls.JSON_TYPE });
  }

  async #message<K extends keyof typeof ANSWERS>(kind: K, path: string, message: object, waitS = 0) {
    const body = utf8(JSON.stringify({ version: WIRE_VERSION, ...message }));
    const headers = { ...calls.JSON_TYPE, ...(waitS ? prefer(waitS) : {}) };
    const call = { method: "POST", path, body, headers, timeoutS: waitS + calls.TIMEOUT_S };
    return read(kind, path, await this.#call(call));
  }

  /** Enrol at a coordinator, or request a credential from an enrolment authority. message: makes it for a time.
   *
   * Repeating it is safe.
   */
  async introduce<K extends keyof typeof INTRODUCTIONS>(
    kind: K,
    newcomer: calls.Signer,
    message: (created: number) => Promise<object>,
  ) {
    const answer = await this.#again(async () => {
      const created = this.#now();
      const body = utf8(JSON.stringify({ version: WIRE_VERSION, ...(await message(created)) }));
      const call = { method: "POST", path: INTRODUCTIONS[kind], body, headers: calls.JSON_TYPE };
      return calls.send(this.#platform, this.#base, this.#bounded(call), newcomer, created, this.moved);
    });
    return read(kind, INTRODUCTIONS[kind], answer);
  }

  /** Upload the part that the coordinator does not have yet. */
  async #bringTheRest(path: string, body: Bytes): Promise<calls.Answer> {
    const { headers } = await this.#attempt({ method: "HEAD", path });
    const offset =
      headers.get("upload-complete") === "?1" ? body.length : Number(headers.get("upload-offset") ?? "none");
    if (!Number.isInteger(offset) || offset < 0 || offset > body.length) {
      throw new BadAnswer("the coordinator does not say how much of the report has arrived");
    }
    const about = {
      "content-type": "application/partial-upload",
      "upload-offset": String(offset),
      "upload-length": String(body.length),
      "upload-complete": "?1",
      "repr-digest": calls.digestField(await sha256(body)),
    };
    const rest = offset < body.length ? { body: body.slice(offset) } : {};
    return this.#attempt({ method: "PATCH", path, headers: about, ...rest });
  }

  async #attempt(call: calls.Call): Promise<calls.Answer> {
    if (this.identity === null) {
      throw new Error("a transport without an identity only introduces");
    }
    const signer = await this.identity.signer();
    const aboutAssignment = call.path.startsWith("/v1/assignments/");
    try {
      if (aboutAssignment) this.spokeAt = Infinity;
      return await calls.send(this.#platform, this.#base, this.#bounded(call), signer, this.#now(), this.moved);
    } finally {
      if (aboutAssignment) this.spokeAt = this.#platform.now();
    }
  }

  /** A call that is cut once the session stops, or has little time after that. */
  #bounded(call: calls.Call): calls.Call {
    return this.stopping.aborted ? { ...call, timeoutS: LEAVING_S } : { cancelled: this.stopping, ...call };
  }

  #call(call: calls.Call): Promise<calls.Answer> {
    return this.#again(() => this.#attempt(call));
  }

  /** The answer of the first successful attempt within the rules. Each kind of refusal is mended once. */
  async #again(attempt: () => Promise<calls.Answer>): Promise<calls.Answer> {
    const mended = new Set<string>();
    for (let tries = 0; ; tries++) {
      try {
        return await attempt();
      } catch (error) {
        if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
        if (error instanceof Refused && !mended.has(error.reason) && (await this.#mend(error))) {
          mended.add(error.reason);
          continue;
        }
        const askedS = error instanceof Refused ? error.hints.afterS : 0;
        if (!passes(error) || this.stopping.aborted || this.#left === 0 || askedS > LONGEST_DELAY_S) throw error;
        this.#left -= 1;
        await this.#platform.sleep(Math.max(askedS, FIRST_DELAY_S * 2 ** tries * (0.5 + Math.random() / 2)));
      }
    }
  }

  /** Remove the cause of a refusal, so that the call is worth another attempt at once; false if impossible. */
  async #mend({ reason, hints }: Refused): Promise<boolean> {
    if (reason === "unknown-device" && this.identity !== null) {
      await this.identity.forget();
      return true;
    }
    if (reason === "stale-signature" && hints.theirTime !== null && hints.afterS === 0) {
      this.#aheadS = hints.theirTime - this.#platform.now();
      return true;
    }
    return SENT_AGAIN.includes(reason);
  }

  /** The coordinator's time, as far as known, in whole seconds. */
  #now(): number {
    return Math.floor(this.#platform.now() + this.#aheadS);
  }
}

/** A blob that is kept, or is fetched and kept.
 *
 * If the connection breaks for good, what arrived is kept in its place, so that a later session fetches the rest.
 */
export async function keptOrFetched(ref: BlobRef, blobs: BlobCache, transport: Transport): Promise<Bytes> {
  const kept = await blobs.get(ref.sha256);
  if (kept !== null && (await isBlob(ref, kept))) return kept;
  const arrived: Uint8Array[] = kept !== null && kept.length < ref.size ? [kept] : [];
  try {
    const data = await transport.blob(ref, arrived);
    await blobs.put(ref.sha256, data);
    return data;
  } catch (error) {
    if (kept !== null || arrived.length > 0) await blobs.put(ref.sha256, joined(arrived));
    throw error;
  }
}

/** Whether the same call may succeed later in this session. */
function passes(error: Refused | Unreachable): boolean {
  // A browser itself repeats a request when a kept connection breaks. The first answer is lost, and the second request is
  // refused only for its repeated nonce.
  if (error instanceof Unreachable || [429, 503].includes(error.status) || error.reason === "replayed-signature") {
    return true;
  }
  return error.reason === "stale-signature" && error.hints.afterS > 0; // the coordinator has just begun
}

function read<K extends keyof typeof ANSWERS>(kind: K, path: string, { headers, body }: calls.Answer) {
  if (!headers.get("content-type")?.startsWith("application/json")) {
    // Usually a captive portal's or a proxy's page, which is gone in minutes.
    throw new BadAnswer(`${path} was answered with something other than JSON`);
  }
  try {
    return decodeAnswer(kind, body);
  } catch (error) {
    throw error instanceof FormatError ? new BadAnswer(plain(`${path}: ${error.message}`)) : error;
  }
}

function prefer(waitS: number): Record<string, string> {
  return { prefer: `wait=${Math.round(waitS)}` };
}

function assignmentPath(assignment: string): string {
  return `/v1/assignments/${encodeURIComponent(assignment)}`;
}

const SHARE = 0.2;
const [SHORTEST_S, LONGEST_S, LONGEST_WAIT_S] = [0.05, 3600, 60];

/** The hold on an assignment that this device works on, until `end`. A no-op without `lost_after_s`. */
export class Hold {
  readonly #platform: Platform;
  readonly #transport: Transport;
  readonly #given: Assignment;
  readonly #over = new AbortController();
  readonly #began: number;
  #open = false;
  #refused: Refused | null = null;

  constructor(platform: Platform, transport: Transport, given: Assignment) {
    this.#platform = platform;
    this.#transport = transport;
    this.#given = given;
    this.#began = platform.now();
    if (given.lost_after_s !== null) {
      void this.#keep(Math.min(Math.max(SHORTEST_S, SHARE * given.lost_after_s), LONGEST_S));
    }
  }

  /** End the hold: the work is over. */
  end(): void {
    this.#over.abort();
  }

  /** Throws Refused once the coordinator has said that it no longer wants the report. */
  check(): void {
    if (this.#refused !== null) throw this.#refused;
  }

  /** Ask whether the report is still needed. Throws as `check`; without an answer, the report may be needed. */
  async ask(): Promise<void> {
    this.check();
    if (this.#open) return;
    try {
      await this.#transport.hold(this.#given.assignment, 0, this.#over.signal);
    } catch (error) {
      if (!(error instanceof TransportError) || (error instanceof Refused && error.notWanted)) throw error;
    }
  }

  async #keep(afterS: number): Promise<void> {
    const waitS = Math.min(Math.max(1, afterS / SHARE), LONGEST_WAIT_S);
    for (let restS = afterS; ; ) {
      await this.#platform.sleep(restS);
      if (this.#over.signal.aborted) return;
      const silentS = this.#platform.now() - Math.max(this.#began, this.#transport.spokeAt);
      // A clock that was set back says nothing about the silence.
      if (silentS < afterS && (silentS >= 0 || silentS === -Infinity)) {
        restS = Math.min(afterS, afterS - silentS);
        continue;
      }
      const began = this.#platform.now();
      try {
        this.#open = true;
        await this.#transport.hold(this.#given.assignment, waitS, this.#over.signal);
        restS = Math.min(afterS, Math.max(0, afterS - (this.#platform.now() - began)));
      } catch (error) {
        if (!(error instanceof DeviceError)) throw error;
        if (error instanceof Refused && error.final) {
          this.#refused = error.notWanted ? error : null;
          return;
        }
        restS = Math.max(afterS / 2, Math.min(error instanceof Refused ? error.hints.afterS : 0, 2 * afterS));
      } finally {
        this.#open = false;
      }
    }
  }
}
