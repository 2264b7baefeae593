/** A device in a browser, as a page has it: take part, pause, leave, and what is kept. Training is in a worker.
 *
 * @module web
 */

import type { Bytes } from "../core/bytes.ts";
import { AssignmentKeeper, type Entry, sessionsIn } from "../core/kept/sessions.ts";
import { checkLabels, type Labels } from "../core/permission/policy.ts";
import { decodePlan, parameterCount } from "../core/plans/plan.ts";
import { reportSize } from "../core/plans/report.ts";
import { type Conditions, IDENTITY } from "../core/platform.ts";
import { readConditions } from "./conditions.ts";
import { LocalExamples } from "./examples.ts";
import { BrowserModel } from "./model.ts";
import { alone, Background, channelTo, crashed, type Ending, type Notice, stoppedBy, waking } from "./pages.ts";
import {
  CachedBlobs,
  change,
  IndexedDbStore,
  keepLabels,
  keepOwner,
  keepSecret,
  keptOwner,
  type Owner,
  openDatabase,
  type Target,
} from "./storage.ts";

export { DeviceError } from "../core/errors.ts";
export type { Entry, Outcome } from "../core/kept/sessions.ts";
export type { Columns, Inputs } from "../core/models/version.ts";
export type { Column, Values } from "../core/plans/examples.ts";
export type { OwnRules } from "./conditions.ts";
export type { Fields, LocalExamples } from "./examples.ts";
export type { BrowserModel } from "./model.ts";
export type { Ending, Notice } from "./pages.ts";
export { type Waking, waking } from "./pages.ts";
export type { Owner, Retention } from "./storage.ts";

const CONDITIONS_EVERY_MS = 30_000;
/** The time after which a crashed worker is replaced by another, which sends or gives up stored work. */
const ANEW_AFTER_MS = 60_000;

/** What a page tells its worker: to begin with the kept settings, or the conditions of now.
 *
 * models: names of those that are refreshed after sessions. once: end after a session.
 */
export interface Start extends Target {
  readonly conditions: Conditions;
  readonly models?: readonly string[];
  readonly once?: boolean;
}
/** A message from a page to its worker: begin, or new conditions. */
export type ToWorker = Start | { readonly conditions: Conditions };

/** The last training of a device: its plan, the number of parameters, and the bytes of an unmasked report.
 *
 * purpose: the operator's sentence on it for the device's owner, or empty. It is unchecked text: show it escaped.
 */
export interface TrainedPlan {
  readonly purpose: string;
  readonly name: string;
  readonly parameters: number;
  readonly reportBytes: number;
}

/** Addresses of the scripts of a device's worker, and of the service worker that works while no page is open. */
export interface Scripts {
  readonly worker: URL;
  readonly background: URL;
}

/** A device in one population of one coordinator. All pages of the origin for that share its state, and no others. */
export class BrowserDevice {
  readonly examples: LocalExamples;
  /** Hears how sessions end. After a crash of its worker the device begins anew by itself. */
  onending: (ending: Ending) => void = () => {};
  /** Hears that another page stopped this one's work, changed settings, or ended the device. It is done here then. */
  onnotice: (notice: Exclude<Notice, "begun">) => void = () => {};
  /** What the page says of the device, of which it tells those that its owner's policy lists; kept by `takePart`. */
  labels: Labels = {};
  readonly #database: IDBDatabase;
  readonly #store: IndexedDbStore;
  readonly #target: Target;
  readonly #script: URL;
  readonly #background: Background;
  readonly #standard: Owner;
  readonly #secret: Bytes | undefined;
  readonly #tell: (notice: Notice) => void;
  readonly #models = new Map<string, BrowserModel>();
  #owner: Owner;
  #worker: Worker | null = null;
  /** It took part when it was told to stop, and goes on once settings are changed. */
  #resumes = false;
  #reading: ReturnType<typeof setInterval> | undefined;
  #anew: ReturnType<typeof setTimeout> | undefined;

  private constructor(database: IDBDatabase, target: Target, standard: Owner, scripts: Scripts, secret?: Bytes) {
    this.#database = database;
    this.#store = new IndexedDbStore(database);
    this.examples = new LocalExamples(database, () => this.#owner.retention);
    this.#standard = standard;
    this.#secret = secret;
    this.#owner = standard;
    this.#tell = channelTo(target, (notice) => void this.#hear(notice));
    this.#target = target;
    this.#script = scripts.worker;
    this.#background = new Background(scripts.background, target);
  }

  /** The device with its kept state. standard: its owner's settings where none are kept.
   *
   * enrolmentSecret: proves to coordinator and authority that they know this page. Who opens the page can read it.
   * Throws StateDamaged where the browser keeps nothing for this page.
   */
  static async open(
    coordinator: URL,
    population: string,
    standard: Owner,
    scripts: Scripts,
    enrolmentSecret?: Bytes,
  ): Promise<BrowserDevice> {
    const target = { coordinator: coordinator.href, population };
    const device = new BrowserDevice(await openDatabase(target), target, standard, scripts, enrolmentSecret);
    await keepSecret(device.#store, enrolmentSecret);
    await device.#readOwner();
    return device;
  }

  /** The settings that hold now. */
  get owner(): Owner {
    return this.#owner;
  }

  /** Whether sessions run, or will again after a crash. */
  get takesPart(): boolean {
    return this.#worker !== null || this.#anew !== undefined;
  }

  /** The model of this name, for the page. Sessions that begin later refresh it when they end. */
  model(name: string): BrowserModel {
    const known = this.#models.get(name);
    const model = known ?? new BrowserModel(this.#script, () => ({ ...this.#target, owner: this.#owner, model: name }));
    this.#models.set(name, model);
    return model;
  }

  /** Whether the browser may wake the device while no page is open. */
  worksWhileClosed(): Promise<boolean> {
    return this.#background.isAllowed();
  }

  /** Keep other settings. The page that takes part begins again with them. Throws StateInUse. */
  async change(owner: Owner): Promise<void> {
    await this.#whileStopped("settings", async () => {
      await keepOwner(this.#store, owner);
      if (!owner.rules.whileClosed) await this.#background.forbid();
    });
  }

  /** Run sessions until `pause`: while the page is open and, if its owner and the browser let it, while none is.
   *
   * The settings are kept from now on. Throws StateDamaged, and ConfigError for labels that it may not have.
   */
  async takePart(): Promise<void> {
    if (this.#worker !== null) return;
    const labels = checkLabels(this.labels);
    this.#endWorker(); // with the time at which another would have begun
    this.#restModels(); // a refresh would hold up the sessions
    this.#tell("begun");
    const worker = this.#newWorker();
    this.#worker = worker;
    this.#reading = setInterval(() => {
      void readConditions().then((conditions) => worker.postMessage({ conditions } satisfies ToWorker));
    }, CONDITIONS_EVERY_MS);
    try {
      await keepLabels(this.#store, labels);
      if ((await keptOwner(this.#store)) === null) {
        await keepSecret(this.#store, this.#secret); // it may have been erased
        await keepOwner(this.#store, this.#owner);
        this.#tell("settings");
      }
      if (this.#owner.rules.whileClosed && (await waking()) === "now") await this.#background.allow();
    } catch (error) {
      this.#rest();
      throw error;
    }
    const conditions = await readConditions();
    worker.postMessage({ ...this.#target, conditions, models: [...this.#models.keys()] } satisfies ToWorker);
  }

  #newWorker(): Worker {
    const worker = new Worker(this.#script, { type: "module" });
    worker.onmessage = ({ data }: MessageEvent<Ending>) => {
      if ("stopped" in data) this.#rest();
      this.onending(data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      this.#endWorker();
      this.#anew = setTimeout(() => void this.takePart().catch((error) => this.#fail(error)), ANEW_AFTER_MS);
      this.onending(crashed(event.message ?? "the worker did not start"));
    };
    return worker;
  }

  /** End the work, of this page at once and while none is open. What was unfinished is given up the next time. */
  async pause(): Promise<void> {
    this.#rest();
    this.#tell("begun");
    await this.#background.forbid();
  }

  /** End the worker at once, whatever it does; its memory comes back. */
  #rest(): void {
    this.#resumes = false;
    this.#endWorker();
  }

  #restModels(): void {
    for (const model of this.#models.values()) model.rest();
  }

  #endWorker(): void {
    clearInterval(this.#reading);
    clearTimeout(this.#anew);
    this.#anew = undefined;
    this.#worker?.terminate();
    this.#worker = null;
  }

  /** The sessions so far, the oldest first. */
  async journal(): Promise<readonly Entry[]> {
    return sessionsIn(this.#store);
  }

  /** The plan of the last assignment; null when there was none, or it is not kept any more. */
  async lastPlan(): Promise<TrainedPlan | null> {
    const target = { ...this.#target, coordinator: new URL(this.#target.coordinator) };
    const last = await new AssignmentKeeper(this.#store, target).get();
    const kept = last === null ? null : await new CachedBlobs(this.#database).get(last.given.plan.sha256);
    if (last === null || kept === null) return null;
    const plan = decodePlan(kept, last.given.round);
    const { purpose } = last.given;
    return { purpose, name: plan.name, parameters: parameterCount(plan), reportBytes: 4 * reportSize(plan.report) };
  }

  /** Stop on all pages, and forget keys, enrolments and what is under way.
   *
   * Examples, personal models, journal and settings stay, and what guards go by: the use of the day, and the rounds and
   * releases that the device was shown. Throws StateInUse.
   */
  async leave(): Promise<void> {
    await this.#remove(["texts", "keys"], (of) => {
      of("keys").clear();
      for (const start of Object.values(IDENTITY)) of("texts").delete(IDBKeyRange.bound(start, `${start}\uffff`));
    });
  }

  /** Stop on all pages, and remove everything: examples, journal, settings, keys, guards. Throws StateInUse. */
  async erase(): Promise<void> {
    const parts = ["texts", "keys", "examples"] as const;
    await this.#remove(parts, (of) => {
      for (const part of parts) of(part).clear();
    });
  }

  /** Change parts of the database, and remove all blobs, while no page works or is woken. */
  async #remove(parts: Parameters<typeof change>[1], work: Parameters<typeof change>[2]): Promise<void> {
    await this.#whileStopped("left", async () => {
      await change(this.#database, parts, work);
      await this.#background.forbid();
      await new CachedBlobs(this.#database).clear();
    });
  }

  /** Change stored data while no page works, and notify the pages. If it fails, they continue with the old data. */
  async #whileStopped(notice: Notice, work: () => Promise<void>): Promise<void> {
    let done: Notice = "settings";
    this.#tell("stop");
    try {
      await this.#follow("stop");
      await alone(this.#target, work);
      done = notice;
    } finally {
      this.#tell(done);
      await this.#follow(done);
    }
  }

  /** Act on a notice of this page or another. */
  async #follow(notice: Notice): Promise<void> {
    if (notice === "stop") {
      this.#resumes ||= this.takesPart;
      this.#restModels();
      return this.#endWorker();
    }
    if (notice === "left") this.#rest();
    await this.#readOwner();
    if (this.#resumes) {
      this.#resumes = false;
      await this.takePart();
    }
  }

  async #hear(notice: Notice): Promise<void> {
    if (notice === "begun") return;
    try {
      await this.#follow(notice);
      this.onnotice(notice);
    } catch (error) {
      this.#fail(error);
    }
  }

  /** End the work after an error that no caller awaits. */
  #fail(error: unknown): void {
    this.#rest();
    this.onending(stoppedBy(error));
  }

  async #readOwner(): Promise<void> {
    this.#owner = (await keptOwner(this.#store)) ?? this.#standard;
  }
}
