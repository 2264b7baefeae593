/** A model for the app: predictions in the app's own process, from the last version that was taken. docs/device.md.
 *
 * A version is pending before anything is fetched for it, a trial is counted before it begins, and the version in use is
 * replaced by one write. So a device that is stopped has the old version or the new one, and goes on where it was.
 */

import * as v from "valibot";
import { type Bytes, plain } from "../bytes.ts";
import * as errors from "../errors.ts";
import { type KeptVersion, ModelKeeper } from "../kept/models.ts";
import { FOR_MODEL, failure, NOTHING_YET, writeJournal } from "../kept/sessions.ts";
import type { Guard } from "../permission/guard.ts";
import type { Labels, Place } from "../permission/policy.ts";
import { AgainstLimits, checkModelRelease, signedRelease, withinLimits } from "../permission/releases.ts";
import { encodeVector } from "../plans/checkpoint.ts";
import { type BlobRef, isBlob, keptRefs, parameterCount } from "../plans/plan.ts";
import type { Platform } from "../platform.ts";
import { type Visit, visit } from "../protocol/enrolment.ts";
import { Transport } from "../protocol/transport.ts";
import { type ModelRelease, modelName, type Signed, same } from "../wire/statements.ts";
import { type Personalised, trained } from "./personal.ts";
import { type Columns, type Inputs, type Recipe, recipeOf, Version } from "./version.ts";

/** A version whose trial ended this process so often is refused: it would end the app at every start. */
const MOST_TRIALS = 2;
const withoutNumbers = (words: string): string => words.replace(/\d+/g, "");

/** The population of a coordinator, the owner's policy, and labels.
 *
 * stopping: once it is aborted, training gives up at once.
 */
interface Stoppable extends Place {
  readonly stopping?: AbortSignal;
  readonly labels?: Labels;
}

/** A version that predicts, and whether with parameters of this device's own. */
interface Opened {
  readonly signed: Signed;
  readonly version: Version;
  readonly personal: boolean;
}

/** Does work that needs the platform for itself, or throws StateInUse. */
type Alone = <T>(work: () => Promise<T>) => Promise<T>;

/** A model by its name: `Device.model` opens it. */
export class Model {
  readonly #platform: Platform;
  readonly #place: Stoppable;
  readonly #name: string;
  readonly #keeper: ModelKeeper;
  readonly #alone: Alone;
  #opened: Opened | null = null;
  #isClosed = false;

  private constructor(platform: Platform, place: Stoppable, name: string, alone: Alone) {
    [this.#platform, this.#place, this.#name, this.#alone] = [platform, place, name, alone];
    this.#keeper = new ModelKeeper(platform.store, place, name);
  }

  /** The model with the version that this device took last; no network is needed. Throws ConfigError for no name.
   *
   * warn: hears why a version that is kept cannot be used any more.
   */
  static async open(
    platform: Platform,
    place: Stoppable,
    name: string,
    alone: Alone,
    warn: (words: string) => void,
  ): Promise<Model> {
    if (!v.is(modelName, name)) {
      throw new errors.ConfigError(`${name} is no name of a model: take 1 to 64 lower-case letters, digits, - and _`);
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
      await this.#swap(await this.#kept(current));
    } catch (error) {
      if (!(error instanceof errors.DeviceError)) throw error;
      warn(`the kept version of model ${this.#name} cannot be used: ${error.message}`);
    }
  }

  /** Whether `close` was called. */
  get isClosed(): boolean {
    return this.#isClosed;
  }

  /** The number of the version that predicts now; null before the first, and after `close`. */
  get version(): number | null {
    return this.#opened?.version.number ?? null;
  }

  /** Whether the parameters that predict now are this device's own, by `personalise`. */
  get personal(): boolean {
    return this.#opened?.personal ?? false;
  }

  /** The model's outputs for n rows, at least 1, by their names in the plan.
   *
   * columns: for each input, by the name of its field, the values of all rows, one after the other; outputs are alike. A
   * call that began before a swap ends on the version it began with. Rejects with NoModel before the first version,
   * InputRefused, ModelClosed, and RuntimeFailed when an operator fails.
   */
  async predict(columns: Inputs): Promise<Columns> {
    this.#checkOpen();
    if (this.#opened === null) {
      throw new errors.NoModel(`no version of model ${this.#name} is here yet: refresh() fetches one`);
    }
    return this.#opened.version.predict(columns);
  }

  /** Ask the coordinator for the version to use, now; whether it replaced the one before.
   *
   * Whatever goes wrong, the version before stays. Rejects with ModelRefused for one that cannot be used, StateInUse
   * during a session of the device, a TransportError, and any other DeviceError as a session's outcome would name it.
   */
  async refresh(): Promise<boolean> {
    return this.#visit(async (visit) => {
      visit.guard.checkPopulation();
      const told = visit.guard.told(this.#place.labels ?? {});
      const signed = await visit.transport.model(this.#place.population, this.#name, told);
      if (signed === null || (this.#opened !== null && same(signed, this.#opened.signed))) return false;
      await this.#swap(await this.#take(signed, visit));
      return true;
    });
  }

  /** Train the version that is here on this device's examples, and use the result if it is better; else do not.
   *
   * The plan of the version says the steps. A part of the examples is left out, and decides: docs/device.md. It runs
   * under the policy and the conditions of a session. The first call of a plan downloads its graphs. The result is kept
   * until another version comes; nothing of it leaves. Rejects with NoModel, ExamplesError where there are too few,
   * PlanRefused for a plan whose devices make no model of their own, StateInUse, and any other DeviceError as a
   * session's outcome would name it; then all stays as it was.
   */
  async personalise(): Promise<Personalised> {
    return this.#visit(async (visit) => {
      const { store, now } = this.#platform;
      const entry = { ...NOTHING_YET, task: FOR_MODEL + this.#name };
      const moved = () => ({ bytes_up: visit.transport.moved.up, bytes_down: visit.transport.moved.down });
      try {
        const [outcome, steps] = await this.#made(visit);
        const losses = `loss ${outcome.before.toPrecision(6)} before and ${outcome.after.toPrecision(6)} after`;
        const used = outcome.kept ? "kept" : "not kept";
        const detail = `version ${outcome.version}, ${losses}, on ${outcome.leftOut} examples left out: ${used}`;
        const facts = { outcome: "personalised", detail, examples: outcome.examples, steps, ...moved() } as const;
        await writeJournal(store, { at: now(), ...entry, ...facts });
        return outcome;
      } catch (error) {
        if (!(error instanceof errors.DeviceError)) throw error;
        const forbidden = error instanceof errors.PolicyForbids || error instanceof errors.NotAllowedNow;
        const facts = { ...failure(error), ...(forbidden ? ({ outcome: "not-now" } as const) : {}), ...moved() };
        await writeJournal(store, { at: now(), ...entry, ...facts, detail: plain(error.message) });
        throw error;
      }
    });
  }

  /** Delete what `personalise` kept, and use the released version; whether anything was kept. Rejects with StateInUse. */
  async forget(): Promise<boolean> {
    this.#checkOpen();
    return this.#alone(async () => {
      this.#checkOpen();
      const dropped = await this.#keeper.dropPersonal();
      if (dropped) await this.#dropped("the app asked for it");
      const { current } = await this.#keeper.get();
      try {
        if (current !== null) await this.#swap(await this.#kept(current));
      } catch (error) {
        await this.#letGo(); // what was deleted predicts no more
        throw error;
      }
      return dropped;
    });
  }

  /** Give the memory back, after the last call that is under way. What is stored stays. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#letGo();
  }

  async #letGo(): Promise<void> {
    const opened = this.#opened;
    this.#opened = null;
    await opened?.version.retire();
  }

  /** Do work that visits the coordinator, once nothing else uses the platform. */
  async #visit<T>(work: (visit: Visit) => Promise<T>): Promise<T> {
    this.#checkOpen();
    return this.#alone(async () => {
      this.#checkOpen();
      const transport = new Transport(this.#platform, this.#place.coordinator);
      const begun = await visit(this.#platform, this.#place, transport);
      try {
        return await work(begun);
      } finally {
        await begun.guard.spend(0);
        await begun.trim();
      }
    });
  }

  /** Train the kept version, and use and keep the result if it is better. What came of it, and the steps. */
  async #made(visit: Visit): Promise<[Personalised, number]> {
    const { engine, conditions } = this.#platform;
    visit.guard.checkIn();
    await conditions();
    const { current } = await this.#keeper.get();
    if (current === null)
      throw new errors.NoModel(`no version of model ${this.#name} is here yet: refresh() fetches one`);
    const { signed } = current;
    const release = await signedRelease(this.#place.policy, signed);
    const recipe = await recipeOf(release, (ref) => this.#mine(ref));
    const made = await trained(release, recipe.plan, {
      visit,
      mine: (ref) => this.#mine(ref),
      keep: (refs) => this.#keeper.add(refs),
      keepGoing: () => this.#keepGoing(visit.guard),
    });
    const { before, after, examples, leftOut, isBetter: kept, params } = made;
    const own = kept ? encodeVector("params", params) : null;
    const version = await Version.load(engine, release, recipe, this.#parts(recipe, own));
    if (own === null) await this.#keeper.dropPersonal();
    else await this.#tryOut(version, () => this.#keeper.keepPersonal(signed, own));
    await this.#swap({ signed, version, personal: kept });
    return [{ version: release.number, before, after, examples, leftOut, kept }, made.steps];
  }

  #keepGoing(guard: Guard): boolean {
    if (this.#place.stopping?.aborted) throw new errors.NotAllowedNow("the application is stopping");
    guard.checkWork();
    return true;
  }

  /** Try a version, and then keep it. It is retired if either fails. */
  async #tryOut<T>(version: Version, keep: () => Promise<T>): Promise<T> {
    try {
      await version.tryOut();
      return await keep();
    } catch (error) {
      await version.retire();
      throw error;
    }
  }

  /** Tell the owner that personal parameters are deleted. */
  #dropped(why: string): Promise<void> {
    const detail = `the personal parameters of model ${this.#name} are deleted: ${why}`;
    return writeJournal(this.#platform.store, { at: this.#platform.now(), outcome: "personal-dropped", detail });
  }

  /** Check a release, and what it names. A refusal is remembered, and told to the owner once. */
  async #take(signed: Signed, visit: Visit): Promise<Opened> {
    const { policy, population } = this.#place;
    let admitted = false;
    try {
      const release = await signedRelease(policy, signed);
      await checkModelRelease(this.#platform, release, signed.signer, population, this.#name);
      const { refused } = await this.#keeper.get();
      const known = refused?.final && same(refused.signed, signed) && refused.engine === this.#platform.engine.name;
      if (known) throw new errors.ModelRefused(refused.why);
      admitted = true;
      return await this.#tried(signed, release, visit);
    } catch (error) {
      const refusal = error instanceof errors.AssignmentError ? new errors.ModelRefused(plain(error.message)) : error;
      if (refusal instanceof errors.ModelRefused) {
        await this.#refuse(signed, refusal.message, admitted && !(refusal instanceof AgainstLimits));
      }
      throw refusal;
    }
  }

  /** Fetch what a release names, try it, and put it in the place of the version before. */
  async #tried(signed: Signed, release: ModelRelease, visit: Visit): Promise<Opened> {
    const { current } = await this.#keeper.get();
    const pending = await this.#keeper.fetch({ signed, blobs: [release.plan, release.parameters] });
    withinLimits(() => visit.guard.checkSizes(release.plan, release.parameters));
    const recipe = await recipeOf(release, visit.blob);
    await this.#checkLimits(release, recipe, visit.guard);
    const training = keptRefs(recipe.plan).filter((ref) => current?.blobs.some(({ sha256 }) => sha256 === ref.sha256));
    const blobs = [release.plan, ...recipe.blobs.values(), ...training];
    await this.#keeper.fetch({ ...pending, blobs });
    const parts = new Map<string, Bytes>();
    for (const ref of recipe.blobs.values()) parts.set(ref.sha256, await visit.blob(ref));
    const what = `${this.#platform.engine.name} ${release.plan.sha256} ${release.parameters.sha256}`;
    const trials = await this.#keeper.trials(what);
    if (trials >= MOST_TRIALS) {
      throw new errors.ModelRefused(`version ${release.number} ended this process on trial, ${trials} times`);
    }
    const own = await this.#keeper.personal(signed, parameterCount(recipe.plan));
    const all = this.#parts(recipe, own, async (ref) => parts.get(ref.sha256)!);
    await this.#keeper.count(what, trials + 1);
    try {
      const version = await Version.load(this.#platform.engine, release, recipe, all);
      const dropped = await this.#tryOut(version, () => this.#keeper.take());
      await this.#keeper.count(what, 0);
      if (dropped) await this.#dropped(`version ${release.number} was taken`);
      return { signed, version, personal: own !== null };
    } catch (error) {
      await this.#keeper.count(what, trials);
      throw error;
    }
  }

  async #checkLimits(release: ModelRelease, { plan, blobs }: Recipe, guard: Guard) {
    const sizes = new Map([...blobs].map(([kind, { size }]) => [kind, size]));
    let missing = 0;
    for (const ref of blobs.values()) missing += (await this.#held(ref)) === null ? ref.size : 0;
    sizes.set("plan", release.plan.size);
    withinLimits(() => guard.checkPredict(plan, sizes, missing));
  }

  /** The version that is kept as the one in use. The policy may have changed since, and blobs too. */
  async #kept({ signed }: KeptVersion): Promise<Opened> {
    const release = await signedRelease(this.#place.policy, signed);
    const recipe = await recipeOf(release, (ref) => this.#mine(ref));
    const own = await this.#keeper.personal(signed, parameterCount(recipe.plan));
    const version = await Version.load(this.#platform.engine, release, recipe, this.#parts(recipe, own));
    return { signed, version, personal: own !== null };
  }

  /** A getter of the parts of a version, with this device's own parameters, if there are any, for the released ones. */
  #parts({ blobs }: Recipe, own: Bytes | null, get = (ref: BlobRef) => this.#mine(ref)) {
    const replaced = blobs.get("parameters")!;
    return async (ref: BlobRef) => (own !== null && ref === replaced ? own : get(ref));
  }

  async #swap(opened: Opened): Promise<void> {
    const before = this.#opened;
    if (this.#isClosed) return opened.version.retire();
    this.#opened = opened;
    await before?.version.retire();
  }

  async #refuse(signed: Signed, why: string, final: boolean): Promise<void> {
    const { store, engine, now } = this.#platform;
    const before = (await this.#keeper.get()).refused;
    const repeats = before !== null && same(before.signed, signed) && before.engine === engine.name;
    const again = repeats && withoutNumbers(before.why) === withoutNumbers(why); // bytes of the day are more each time
    await this.#keeper.refuse(again ? before : { signed, engine: engine.name, why, final });
    if (again) return;
    await writeJournal(store, { at: now(), outcome: "model-refused", detail: `model ${this.#name}: ${why}` });
  }

  /** A blob that must be here. Throws ModelRefused. */
  async #mine(ref: BlobRef): Promise<Bytes> {
    const held = await this.#held(ref);
    if (held === null) throw new errors.ModelRefused(`blob ${ref.sha256.slice(0, 12)}… is not in the cache any more`);
    return held;
  }

  async #held(ref: BlobRef): Promise<Bytes | null> {
    const held = await this.#platform.blobs.get(ref.sha256);
    return held !== null && (await isBlob(ref, held)) ? held : null;
  }

  #checkOpen(): void {
    if (this.#isClosed) throw new errors.ModelClosed(`model ${this.#name} is closed`);
  }
}
