/** The models of apps in the store: for each the version in use, one that is being fetched, and one refused. */

import { type Bytes, base64, fromBase64 } from "../bytes.ts";
import { FormatError, StateDamaged } from "../errors.ts";
import { decodeVectors } from "../plans/checkpoint.ts";
import type { BlobRef } from "../plans/plan.ts";
import { keptJson, type Store, type Target } from "../platform.ts";
import { type Signed, same } from "../wire/statements.ts";

const PLACE = "models";
const PERSONAL = "personal:";
/** Models that a check-in may state. */
const MOST_STATED = 16;
const MOST_TRIED = 16;

/** Personal parameters, as a checkpoint in base64, and the release that they were made from. */
interface Personal {
  readonly signed: Signed;
  readonly parameters: string;
}

/** A version: its signed release, and its blobs, as far as known. */
export interface KeptVersion {
  readonly signed: Signed;
  readonly blobs: readonly BlobRef[];
}

/** How often trials of a version began that did not end, by what it consists of; the last one last. */
type Tried = readonly (readonly [what: string, trials: number])[];

/** A release that was refused on an engine. final: because of what it names, so that nothing is fetched for it again. */
interface Refusal {
  readonly signed: Signed;
  readonly engine: string;
  readonly why: string;
  readonly final: boolean;
}

/** What is kept of one model. current: in use. pending: not yet wholly here, or not yet tried. */
interface ModelRow {
  readonly current: KeptVersion | null;
  readonly pending: KeptVersion | null;
  readonly refused: Refusal | null;
  readonly tried?: Tried;
}

type Rows = Readonly<Record<string, ModelRow>>;

/** The rows of one model: every write is whole, so that a stopped device has the version before or the next. */
export class ModelKeeper {
  readonly #store: Store;
  readonly #key: string;

  constructor(store: Store, { coordinator, population }: Target, name: string) {
    this.#store = store;
    this.#key = `${coordinator.href} ${population} ${name}`;
  }

  async get(): Promise<ModelRow> {
    return (await rows(this.#store))[this.#key] ?? { current: null, pending: null, refused: null };
  }

  /** Note a version before it is fetched or tried. Its blobs are kept from now on. */
  async fetch(pending: KeptVersion): Promise<KeptVersion> {
    await this.#write({ ...(await this.get()), pending });
    return pending;
  }

  /** How often trials of a version began that did not end: they may have ended the app. */
  async trials(what: string): Promise<number> {
    return (await this.get()).tried?.find(([one]) => one === what)?.[1] ?? 0;
  }

  /** Note how often they did; the oldest of many others are forgotten. */
  async count(what: string, trials: number): Promise<void> {
    const row = await this.get();
    const others = (row.tried ?? []).filter(([one]) => one !== what);
    const these = trials > 0 ? [[what, trials] as const] : [];
    await this.#write({ ...row, tried: [...others, ...these].slice(-MOST_TRIED) });
  }

  /** Make the pending version the one in use. Personal parameters of another one are deleted; whether there were any. */
  async take(): Promise<boolean> {
    const { pending, tried } = await this.get();
    const row = { current: pending, pending: null, refused: null, ...(tried && { tried }) };
    const isPersonal = pending !== null && (await this.personal(pending.signed)) !== null;
    const dropped = !isPersonal && (await this.#store.get(this.#place)) !== null;
    await this.#write(row, dropped ? { [this.#place]: null } : {});
    return dropped;
  }

  /** Note that the version in use needs these blobs too, which are kept from now on. */
  async add(blobs: readonly BlobRef[]): Promise<void> {
    const { current, ...row } = await this.get();
    const more = blobs.filter(({ sha256 }) => !current?.blobs.some((one) => one.sha256 === sha256));
    if (current === null || more.length === 0) return;
    await this.#write({ ...row, current: { ...current, blobs: [...current.blobs, ...more] } });
  }

  /** The personal parameters that were made from this release, as a checkpoint; null too if they cannot be read.
   *
   * size: their number, if it is known: others cannot be read either.
   */
  async personal(signed: Signed, size?: number): Promise<Bytes | null> {
    try {
      const kept = await keptJson<Partial<Personal>>(this.#store, this.#place);
      if (!kept?.signed || !kept.parameters || !same(kept.signed, signed)) return null;
      const own = fromBase64(kept.parameters);
      const vector = size === undefined ? null : decodeVectors(own, [{ name: "params", size }]).get("params")!;
      return vector?.every(Number.isFinite) === false ? null : own;
    } catch (error) {
      if (error instanceof StateDamaged || error instanceof RangeError || error instanceof FormatError) return null;
      throw error;
    }
  }

  /** Keep personal parameters, as a checkpoint, in the place of any. */
  async keepPersonal(signed: Signed, parameters: Bytes): Promise<void> {
    const kept: Personal = { signed, parameters: base64(parameters) };
    await this.#store.write({ [this.#place]: JSON.stringify(kept) });
  }

  /** Delete personal parameters; whether there were any. */
  async dropPersonal(): Promise<boolean> {
    const dropped = (await this.#store.get(this.#place)) !== null;
    await this.#store.write({ [this.#place]: null });
    return dropped;
  }

  /** Give up the pending version, and note which was refused. The one in use stays. */
  async refuse(refused: Refusal): Promise<void> {
    await this.#write({ ...(await this.get()), pending: null, refused });
  }

  get #place(): string {
    return `${PERSONAL}${this.#key}`;
  }

  async #write(row: ModelRow, changes: Readonly<Record<string, null>> = {}): Promise<void> {
    const models = JSON.stringify({ ...(await rows(this.#store)), [this.#key]: row });
    await this.#store.write({ ...changes, [PLACE]: models });
  }
}

/** The digests of the blobs that models need. */
export async function keptBlobs(store: Store): Promise<ReadonlySet<string>> {
  const kept = Object.values(await rows(store)).flatMap(({ current, pending }) => [current, pending]);
  return new Set(kept.flatMap((one) => one?.blobs.map(({ sha256 }) => sha256) ?? []));
}

/** The numbers of the versions of a population's models that this device has, and of those that it refused last. */
export async function statedVersions(store: Store, { coordinator, population }: Target) {
  const start = `${coordinator.href} ${population} `;
  const mine = Object.entries(await rows(store))
    .filter(([key]) => key.slice(0, key.lastIndexOf(" ") + 1) === start) // a model's name has no space
    .sort(([a], [b]) => (a < b ? -1 : 1));
  const models: Record<string, number> = {},
    refused: Record<string, number> = {};
  for (const [key, row] of mine.slice(0, MOST_STATED)) {
    const name = key.slice(start.length);
    if (row.current !== null) models[name] = numberOf(row.current.signed);
    const number = row.refused === null ? 0 : numberOf(row.refused.signed);
    if (number > 0) refused[name] = number;
  }
  return { ...(Object.keys(models).length > 0 && { models }), ...(Object.keys(refused).length > 0 && { refused }) };
}

/** The number of the version that a release says it is, whoever signed it; 0 when it says none. */
function numberOf(signed: Signed): number {
  try {
    const { number } = JSON.parse(signed.text) as { number?: unknown };
    return Number.isInteger(number) && (number as number) < 2 ** 31 ? (number as number) : 0;
  } catch {
    return 0;
  }
}

async function rows(store: Store): Promise<Rows> {
  return (await keptJson<Rows>(store, PLACE)) ?? {};
}
