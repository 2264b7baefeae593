/** A model for the app: predictions in the app's own process, from the last version that was taken. docs/device.md.
 *
 * A version is pending before anything is fetched for it, a trial is counted before it begins, and the version in use is
 * replaced by one write. So a device that is stopped has the old version or the new one, and goes on where it was.
 */

import * as v from "valibot";
import type { Bytes } from "./bytes.ts";
import {
  AssignmentError,
  ConfigError,
  DeviceError,
  ModelClosed,
  ModelRefused,
  NoModel,
  PlanRefused,
} from "./errors.ts";
import { type KeptVersion, keptBlobs, ModelKeeper } from "./kept-models.ts";
import { type Columns, type Recipe, recipeOf, Version } from "./model-version.ts";
import { writeRemark } from "./outcome.ts";
import { Guard } from "./permission/guard.ts";
import { checkModelRelease, signedRelease } from "./permission/model-releases.ts";
import { checkHttps, type Policy } from "./permission/policy.ts";
import { type BlobRef, isBlob } from "./plan.ts";
import type { Platform } from "./platform.ts";
import { plain } from "./protocol/call.ts";
import { Enrolments } from "./protocol/enrolment.ts";
import { Transport } from "./protocol/transport.ts";
import { type ModelRelease, modelName, type Signed } from "./release.ts";

/** A version whose trial ended this process so often is refused: it would end the app at every start. */
const MOST_TRIALS = 2;

/** The population of a coordinator, and the owner's policy. */
interface Place {
  readonly coordinator: URL;
  readonly population: string;
  readonly policy: Policy;
}

/** Does work that needs the platform for itself, or throws StateInUse. */
type Alone = <T>(work: () => Promise<T>) => Promise<T>;

/** A refusal by limits of the policy, which its owner may change. */
class AgainstLimits extends ModelRefused {}

/** A model by its name: `Device.model` opens it. */
export class Model {
  readonly #platform: Platform;
  readonly #place: Place;
  readonly #name: string;
  readonly #keeper: ModelKeeper;
  readonly #alone: Alone;
  #opened: { readonly signed: Signed; readonly version: Version } | null = null;
  #isClosed = false;

  private constructor(platform: Platform, place: Place, name: string, alone: Alone) {
    [this.#platform, this.#place, this.#name, this.#alone] = [platform, place, name, alone];
    this.#keeper = new ModelKeeper(platform.store, place.coordinator, place.population, name);
  }

  /** The model with the version that this device took last; no network is needed. Throws ConfigError for no name.
   *
   * warn: hears why a version that is kept cannot be used any more.
   */
  static async open(
    platform: Platform,
    place: Place,
    name: string,
    alone: Alone,
    warn: (words: string) => void,
  ): Promise<Model> {
    if (!v.is(modelName, name)) {
      throw new ConfigError(`${name} is no name of a model: take 1 to 64 lower-case letters, digits, - and _`);
    }
    const model = new Model(platform, place, name, alone);
    await model.reload(warn);
    return model;
  }

  /** Use the version that is kept, if another part of this device took it since. warn: hears why it cannot be used. */
  async reload(warn: (words: string) => void): Promise<void> {
    try {
      const { current } = await this.#keeper.get();
      if (current === null || (this.#opened !== null && same(current.signed, this.#opened.signed))) return;
      await this.#swap(current.signed, await this.#kept(current));
    } catch (error) {
      if (!(error instanceof DeviceError)) throw error;
      warn(`the kept version of model ${this.#name} cannot be used: ${error.message}`);
    }
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  /** The number of the version that predicts now; null before the first, and after `close`. */
  get version(): number | null {
    return this.#opened?.version.number ?? null;
  }

  /** The model's outputs for n rows, at least 1, by their names in the plan.
   *
   * columns: for each input, by the name of its field, the values of all rows, one after the other; outputs are alike. A
   * call that began before a swap ends on the version it began with. Rejects with NoModel before the first version,
   * InputRefused, ModelClosed, and RuntimeFailed when an operator fails.
   */
  async predict(columns: Columns): Promise<Columns> {
    this.#checkOpen();
    if (this.#opened === null) {
      throw new NoModel(`no version of model ${this.#name} is here yet: refresh() fetches one`);
    }
    return this.#opened.version.predict(columns);
  }

  /** Ask the coordinator for the version to use, now; whether it replaced the one before.
   *
   * Whatever goes wrong, the version before stays. Rejects with ModelRefused for one that cannot be used, StateInUse
   * during a session of the device, a TransportError, and any other DeviceError as a session's outcome would name it.
   */
  async refresh(): Promise<boolean> {
    this.#checkOpen();
    return this.#alone(async () => {
      this.#checkOpen();
      const { coordinator, population, policy } = this.#place;
      const transport = new Transport(this.#platform, coordinator);
      const guard = await Guard.of(this.#platform, policy, population);
      checkHttps(policy, "the coordinator", coordinator);
      guard.checkModel();
      transport.identity = await Enrolments.of(this.#platform, coordinator, transport, policy);
      try {
        const signed = await transport.model(population, this.#name);
        if (signed === null || (this.#opened !== null && same(signed, this.#opened.signed))) return false;
        await this.#swap(signed, await this.#take(signed, transport, guard));
        return true;
      } finally {
        await guard.spend(bytesOf(transport), 0);
        await this.#platform.blobs.trim(policy.cache_bytes, await keptBlobs(this.#platform.store));
      }
    });
  }

  /** Give the memory back, after the last call that is under way. What is stored stays. */
  async close(): Promise<void> {
    const opened = this.#opened;
    this.#isClosed = true;
    this.#opened = null;
    await opened?.version.retire();
  }

  /** Check a release, and what it names. A refusal is remembered, and told to the owner once. */
  async #take(signed: Signed, transport: Transport, guard: Guard): Promise<Version> {
    const { policy, population } = this.#place;
    let admitted = false;
    try {
      const release = await signedRelease(policy, signed);
      await checkModelRelease(this.#platform, release, signed.signer, population, this.#name);
      const { refused } = await this.#keeper.get();
      const known = refused?.final && same(refused.signed, signed) && refused.engine === this.#platform.engine.name;
      if (known) throw new ModelRefused(refused.why);
      admitted = true;
      return await this.#tried(signed, release, transport, guard);
    } catch (error) {
      const refusal = error instanceof AssignmentError ? new ModelRefused(plain(error.message)) : error;
      if (refusal instanceof ModelRefused) {
        await this.#refuse(signed, refusal.message, admitted && !(refusal instanceof AgainstLimits));
      }
      throw refusal;
    }
  }

  /** Fetch what a release names, try it, and put it in the place of the version before. */
  async #tried(signed: Signed, release: ModelRelease, transport: Transport, guard: Guard): Promise<Version> {
    const before = (await this.#keeper.get()).pending;
    const trials = before !== null && same(before.signed, signed) ? before.trials : 0;
    const pending = await this.#keeper.fetch({ signed, blobs: [release.plan, release.parameters], trials });
    const get = (ref: BlobRef) => this.#blob(ref, transport);
    withinLimits(() => guard.checkSizes(release.plan, release.parameters, bytesOf(transport)));
    const recipe = await recipeOf(release, get);
    await this.#checkLimits(release, recipe, transport, guard);
    const known = await this.#keeper.fetch({ ...pending, blobs: [release.plan, ...recipe.blobs.values()] });
    const parts = new Map<string, Bytes>();
    for (const ref of recipe.blobs.values()) parts.set(ref.sha256, await get(ref));
    if (trials >= MOST_TRIALS) {
      throw new ModelRefused(`version ${release.number} ended this process on trial, ${trials} times`);
    }
    await this.#keeper.fetch({ ...known, trials: trials + 1 });
    const version = await Version.load(this.#platform.engine, release, recipe, async (ref) => parts.get(ref.sha256)!);
    try {
      await version.tryOut();
      await this.#keeper.take();
      return version;
    } catch (error) {
      await version.retire();
      throw error;
    }
  }

  async #checkLimits(release: ModelRelease, { plan, blobs }: Recipe, transport: Transport, guard: Guard) {
    const sizes = new Map([...blobs].map(([kind, { size }]) => [kind, size]));
    let missing = 0;
    for (const ref of blobs.values()) missing += (await this.#held(ref)) === null ? ref.size : 0;
    sizes.set("plan", release.plan.size);
    withinLimits(() => guard.checkPredict(plan, sizes, bytesOf(transport), missing));
  }

  /** The version that is kept as the one in use. The policy may have changed since, and blobs too. */
  async #kept({ signed }: KeptVersion): Promise<Version> {
    const release = await signedRelease(this.#place.policy, signed);
    const get = async (ref: BlobRef) => {
      const held = await this.#held(ref);
      if (held === null) throw new ModelRefused(`blob ${ref.sha256.slice(0, 12)}… is not in the cache any more`);
      return held;
    };
    return Version.load(this.#platform.engine, release, await recipeOf(release, get), get);
  }

  async #swap(signed: Signed, version: Version): Promise<void> {
    const before = this.#opened;
    if (this.#isClosed) return version.retire();
    this.#opened = { signed, version };
    await before?.version.retire();
  }

  async #refuse(signed: Signed, why: string, final: boolean): Promise<void> {
    const { store, engine, now } = this.#platform;
    const before = (await this.#keeper.get()).refused;
    const again = before !== null && same(before.signed, signed) && before.why === why && before.engine === engine.name;
    await this.#keeper.refuse(again ? before : { signed, engine: engine.name, why, final });
    if (again) return;
    await writeRemark(store, { at: now(), outcome: "model-refused", detail: `model ${this.#name}: ${why}` });
  }

  async #blob(ref: BlobRef, transport: Transport): Promise<Bytes> {
    const held = await this.#held(ref);
    if (held !== null) return held;
    const data = await transport.blob(ref);
    await this.#platform.blobs.put(ref.sha256, data);
    return data;
  }

  async #held(ref: BlobRef): Promise<Bytes | null> {
    const held = await this.#platform.blobs.get(ref.sha256);
    return held !== null && (await isBlob(ref, held)) ? held : null;
  }

  #checkOpen(): void {
    if (this.#isClosed) throw new ModelClosed(`model ${this.#name} is closed`);
  }
}

function bytesOf({ moved: { up, down } }: Transport): number {
  return up + down;
}

/** Make a check of the policy's limits. Throws AgainstLimits. */
function withinLimits(check: () => void): void {
  try {
    check();
  } catch (error) {
    throw error instanceof PlanRefused ? new AgainstLimits(error.message) : error;
  }
}

function same(one: Signed, other: Signed): boolean {
  return one.text === other.text && one.signer === other.signer && one.value === other.value;
}
