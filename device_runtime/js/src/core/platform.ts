/** The platform of a device: storage, network, clock, randomness, engine and examples. The core imports none. */

import { type Bytes, base64, fromBase64 } from "./bytes.ts";
import { platformRandom, type RandomSource, type SigningKey, signingKey } from "./cryptography.ts";
import { StateDamaged } from "./errors.ts";
import type { Engine } from "./plans/engine.ts";
import type { ExampleSource } from "./plans/examples.ts";

/** Texts by key that survive restarts. They hold private keys and other devices' shares: protect them like a key. */
export interface Store {
  /** The text under a key; null when there is none. */
  get(key: string): Promise<string | null>;
  /** Write texts, and remove keys whose text is null: all or none, durable when the promise resolves. */
  write(changes: Readonly<Record<string, string | null>>): Promise<void>;
}

/** A population of a coordinator. */
export interface Target {
  readonly coordinator: URL;
  readonly population: string;
}

/** Prefixes of the store's keys for a device's identity at coordinators and authorities.
 *
 * These are removed when it leaves. Records of use, answered rounds and releases stay, so that its guards still hold
 * when it returns.
 */
export const IDENTITY = {
  enrolment: "enrolment:",
  credential: "credential:",
  assignment: "assignment:",
  token: "token:",
} as const;

/** The value of the JSON text under a key; null when there is none. Throws StateDamaged when it is not JSON. */
export async function keptJson<T>(store: Store, key: string): Promise<T | null> {
  const text = await store.get(key);
  try {
    return text === null ? null : (JSON.parse(text) as T);
  } catch {
    throw new StateDamaged(`what is kept as ${key} is not JSON: remove it, and the device begins anew there`);
  }
}

/** Plans, graphs and other blobs by digest, kept between rounds; of one whose download broke off, the first bytes. They may
 * be lost at any time. */
export interface BlobCache {
  /** The blob with a digest, in hex; null when it is not kept. */
  get(sha256: string): Promise<Bytes | null>;
  /** Keep a blob under its digest. */
  put(sha256: string, data: Bytes): Promise<void>;
  /** Remove blobs, the longest unused first, until the rest has at most `most` bytes. Those to `keep` do not count. */
  trim(most: number, keep: ReadonlySet<string>): Promise<void>;
}

/** When a blob was used last, for `trim`, in milliseconds since 1970: 0 where the clock was ahead, so that nobody knows. */
export function usedMs(at: number, now = Date.now()): number {
  return at <= now + 60_000 ? at : 0;
}

/** What a phone's platform attests of a new key of the app's: certificates in DER, leaf first, or Apple's statement. */
export type PlatformAttestation =
  | { readonly kind: "android-key"; readonly chain: readonly Bytes[] }
  | { readonly kind: "app-attest"; readonly statement: Bytes };

/** Evidence for a challenge of 32 bytes. What it throws counts as KeyUnavailable: the next session tries again. */
export type Attest = (challenge: Bytes) => Promise<PlatformAttestation>;

/** Everything that a session needs from the machine. Only one session at a time may use it. */
export interface Platform {
  readonly store: Store;
  readonly blobs: BlobCache;
  readonly engine: Engine;
  readonly examples: ExampleSource;
  /** A private key of the device by its name, made at the first call and kept. Throws StateDamaged. */
  readonly signingKey: (name: "device" | "secagg") => Promise<SigningKey>;
  /** A secret that coordinator and authority know too, which the device proves to know when it enrols. */
  readonly enrolmentSecret?: Bytes | undefined;
  /** Instead of a secret, the platform's evidence: at enrolment and at each renewal of the credential. */
  readonly attest?: Attest | undefined;
  /** Reads the current conditions. Throws PolicyForbids when the owner does not let the device work under them. */
  readonly conditions: () => Promise<Conditions>;
  /** HTTP, as in browsers, with bodies that are read piece by piece. */
  readonly fetch: typeof fetch;
  readonly random: RandomSource;
  /** Seconds since 1970, by a clock that may be wrong. */
  readonly now: () => number;
  /** Seconds of work, from any start: CPU time if the platform reports it. */
  readonly workSeconds: () => number;
  /** Resolves after a time. */
  readonly sleep: (seconds: number) => Promise<void>;
  /** The machine's memory in bytes; null when it is not known. */
  readonly memoryBytes: number | null;
}

/** One reading of a device; null means unknown. `battery` is a fraction. */
export interface Conditions {
  readonly charging: boolean | null;
  readonly idle: boolean | null;
  readonly unmetered: boolean | null;
  readonly battery: number | null;
  readonly freeStorageBytes: number | null;
}

/** A device that knows none of its conditions. */
export const UNKNOWN: Conditions = {
  charging: null,
  idle: null,
  unmetered: null,
  battery: null,
  freeStorageBytes: null,
};

const KEY_BYTES = 32;

/** The key of that name, made at the first call. Throws StateDamaged when what is kept is no key. */
export async function keptSigningKey(store: Store, name: string): Promise<SigningKey> {
  const place = `key:${name}`;
  const kept = await store.get(place);
  const secret = kept ?? base64(platformRandom(KEY_BYTES));
  if (kept === null) await store.write({ [place]: secret });
  try {
    return await signingKey(fromBase64(secret));
  } catch (error) {
    throw new StateDamaged(`a key of this device cannot be read: ${String(error)}`);
  }
}

/** Bytes of bodies sent and received. */
export interface BytesMoved {
  up: number;
  down: number;
}
