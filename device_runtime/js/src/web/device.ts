/** A device in a browser, as a page has it: take part, pause, leave, and what is kept. Training is in a worker. */

import type { Conditions } from "../core/conditions.ts";
import { AssignmentKeeper } from "../core/kept-assignment.ts";
import type { Outcome } from "../core/outcome.ts";
import { decodePlan, parameterCount } from "../core/plan.ts";
import { keptJson } from "../core/platform.ts";
import { reportSize } from "../core/report.ts";
import { type OwnRules, pageConditions } from "./conditions.ts";
import { change, openDatabase } from "./database.ts";
import { LocalExamples, type Retention } from "./examples.ts";
import { CachedBlobs, IndexedDbStore } from "./store.ts";

export type { Column, Values } from "../core/examples.ts";
export type { Outcome } from "../core/outcome.ts";
export type { OwnRules } from "./conditions.ts";
export type { Fields, LocalExamples, Retention } from "./examples.ts";

const CONDITIONS_EVERY_MS = 30_000;
const SETTINGS = "owner";
const JOURNAL = "journal";

/** The settings of the device's owner. policy: docs/device.md. */
export interface Owner {
  readonly policy: object;
  readonly rules: OwnRules;
  readonly retention: Retention;
}

/** What a page tells its worker: to begin, or the conditions of now. */
export interface Start {
  readonly coordinator: string;
  readonly population: string;
  readonly owner: Owner;
  readonly conditions: Conditions;
}
export type ToWorker = Start | { readonly conditions: Conditions };

/** What a worker tells its page: how a session ended, or why there will be no more. */
export type Ending =
  | { readonly outcome: Outcome }
  | { readonly stopped: { readonly reason: string; readonly detail: string } };

/** An entry of the journal: when a session ended, in seconds since 1970, and how. */
export type Entry = Outcome & { readonly at: number };

/** What a device was asked to train last: its plan, the numbers of the model, and the bytes of a report in clear. */
export interface TrainedPlan {
  readonly name: string;
  readonly parameters: number;
  readonly reportBytes: number;
}

/** A device in one population of one coordinator. Its state belongs to the page's origin. */
export class BrowserDevice {
  readonly examples: LocalExamples;
  /** Hears how sessions end. */
  onending: (ending: Ending) => void = () => {};
  readonly #database: IDBDatabase;
  readonly #store: IndexedDbStore;
  readonly #coordinator: URL;
  readonly #population: string;
  readonly #script: URL;
  #owner: Owner;
  #worker: Worker | null = null;
  #reading: ReturnType<typeof setInterval> | undefined;

  private constructor(database: IDBDatabase, owner: Owner, coordinator: URL, population: string, script: URL) {
    this.#database = database;
    this.#store = new IndexedDbStore(database);
    this.examples = new LocalExamples(database, owner.retention);
    this.#owner = owner;
    this.#coordinator = coordinator;
    this.#population = population;
    this.#script = script;
  }

  /** The device with its kept state. standard: its owner's settings where none are kept. script: the worker's.
   *
   * Throws StateDamaged where the browser keeps nothing for this page.
   */
  static async open(coordinator: URL, population: string, standard: Owner, script: URL): Promise<BrowserDevice> {
    const database = await openDatabase();
    const owner = await keptJson<Owner>(new IndexedDbStore(database), SETTINGS);
    return new BrowserDevice(database, owner ?? standard, coordinator, population, script);
  }

  get owner(): Owner {
    return this.#owner;
  }

  get takesPart(): boolean {
    return this.#worker !== null;
  }

  /** Keep other settings. A device that takes part begins again with them. */
  async change(owner: Owner): Promise<void> {
    await this.#store.write({ [SETTINGS]: JSON.stringify(owner) });
    this.#owner = owner;
    if (this.takesPart) {
      this.pause();
      await this.takePart();
    }
  }

  /** Run sessions until `pause`, while the page is open. */
  async takePart(): Promise<void> {
    if (this.#worker !== null) return;
    const worker = new Worker(this.#script, { type: "module" });
    this.#worker = worker;
    worker.onmessage = ({ data }: MessageEvent<Ending>) => {
      if ("stopped" in data) this.pause();
      this.onending(data);
    };
    worker.onerror = (event) => {
      this.pause();
      this.onending({ stopped: { reason: "runtime-failed", detail: event.message ?? "the worker did not start" } });
    };
    this.#reading = setInterval(() => {
      void pageConditions().then((conditions) => worker.postMessage({ conditions } satisfies ToWorker));
    }, CONDITIONS_EVERY_MS);
    const conditions = await pageConditions();
    const [coordinator, population] = [this.#coordinator.href, this.#population];
    worker.postMessage({ coordinator, population, owner: this.#owner, conditions } satisfies ToWorker);
  }

  /** End the worker at once, whatever it does; its memory comes back. What was unfinished is given up the next time. */
  pause(): void {
    clearInterval(this.#reading);
    this.#worker?.terminate();
    this.#worker = null;
  }

  /** The sessions so far, the oldest first. */
  async journal(): Promise<readonly Entry[]> {
    return (await keptJson<Entry[]>(this.#store, JOURNAL)) ?? [];
  }

  /** The plan of the last assignment; null when there was none, or it is not kept any more. */
  async lastPlan(): Promise<TrainedPlan | null> {
    const last = await new AssignmentKeeper(this.#store, this.#coordinator, this.#population).get();
    const kept = last === null ? null : await new CachedBlobs(this.#database).get(last.given.plan.sha256);
    if (last === null || kept === null) return null;
    const plan = decodePlan(kept, last.given.round);
    return { name: plan.name, parameters: parameterCount(plan), reportBytes: 4 * reportSize(plan.report) };
  }

  /** Stop, and forget the device's keys and everything about coordinators. Examples, journal and settings stay. */
  async leave(): Promise<void> {
    this.pause();
    const journal = await this.#store.get(JOURNAL);
    await change(this.#database, ["texts", "keys"], (of) => {
      of("texts").clear();
      of("keys").clear();
      of("texts").put(JSON.stringify(this.#owner), SETTINGS);
      if (journal !== null) of("texts").put(journal, JOURNAL);
    });
    await new CachedBlobs(this.#database).clear();
  }

  /** Stop, and remove everything: examples, journal, settings, keys. */
  async erase(): Promise<void> {
    this.pause();
    await change(this.#database, ["texts", "keys", "examples"], (of) => {
      for (const part of ["texts", "keys", "examples"] as const) of(part).clear();
    });
    await new CachedBlobs(this.#database).clear();
  }
}
