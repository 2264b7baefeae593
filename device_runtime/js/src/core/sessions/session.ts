/** One session: check in, wait to be selected, do the work, upload once. Spec: docs/spec/wire.md.
 *
 * A device that was stopped finds its last assignment in the store, and first finishes that.
 */

import { plain, visible } from "../bytes.ts";
import * as errors from "../errors.ts";
import { keptBlobs, statedVersions } from "../kept/models.ts";
import {
  AssignmentKeeper,
  failure,
  type KeptAssignment,
  NOTHING_YET,
  type Outcome,
  writeJournal,
} from "../kept/sessions.ts";
import { countAnswer } from "../permission/guard.ts";
import { checkLabels, type Labels, type Place } from "../permission/policy.ts";
import { checkModel } from "../permission/releases.ts";
import { onSide } from "../plans/batches.ts";
import { decodeVectors, encodeVector, frozenOf } from "../plans/checkpoint.ts";
import { withGraphs } from "../plans/engine.ts";
import { checkExamples, type ExampleSource } from "../plans/examples.ts";
import { decodeTraining, FORMAT, keptRefs, type Plan, runGraphs } from "../plans/plan.ts";
import { reportSize, weigh } from "../plans/report.ts";
import { execute, type TrainingResult } from "../plans/runner.ts";
import { type Conditions, IDENTITY, type Platform } from "../platform.ts";
import { type Visit, visit } from "../protocol/enrolment.ts";
import { SecureDelivery, UNWEIGHTED } from "../protocol/secure.ts";
import { Hold, Transport } from "../protocol/transport.ts";
import { tokenized } from "../texts/tokenizer.ts";
import type { Assignment, Offer, Rejected } from "../wire/messages.ts";

export const VERSION = "0.1.0";
const SECRET_BYTES = 32;
const MOST_TASKS = 256;
const STOPPING = "a condition for work no longer holds: the application is stopping";
const NO_WORK = { collection: "", examples: 0, steps: 0, question: null } as const;
// Answers to an upload that leave no assignment to give up: unknown, decided, too late.
const OVER = [404, 409, 410];

/** Where and how a device takes part. */
export interface SessionConfig extends Place {
  /** Seconds to wait to be selected. */
  readonly waitS: number;
  /** What the app says of the device, of which it tells those that its policy lists: up to 16. */
  readonly labels?: Labels;
  /** Once it is aborted, the session gives up at once. */
  readonly stopping?: AbortSignal;
  /** Runs a session once the platform is free. */
  readonly inTurn?: (session: () => Promise<Outcome>) => Promise<Outcome>;
}

/** Run one session. Errors are in the outcome, and the coordinator is told if it was waiting. */
export async function runSession(platform: Platform, config: SessionConfig): Promise<Outcome> {
  const session = () => sessionOf(platform, config);
  return config.inTurn === undefined ? session() : config.inTurn(session);
}

async function sessionOf(platform: Platform, config: SessionConfig): Promise<Outcome> {
  const transport = new Transport(platform, config.coordinator);
  transport.stopping = config.stopping ?? transport.stopping;
  const session = new Session(platform, config, transport);
  try {
    await session.run();
  } catch (error) {
    if (!(error instanceof errors.DeviceError)) throw error;
    session.note(failure(session.cause(error)));
    if (error instanceof errors.PolicyForbids) session.note({ outcome: "not-now" });
  }
  // A plan and a graph contain foreign texts too, which end up in error messages.
  const detail = plain(session.outcome.detail);
  session.note({ detail, bytes_up: transport.moved.up, bytes_down: transport.moved.down });
  session.note({ told: toldOf(session.outcome, config.coordinator.origin) });
  await writeJournal(platform.store, { at: platform.now(), ...session.outcome });
  return session.outcome;
}

/** One pass through the protocol. */
class Session {
  outcome: Outcome = NOTHING_YET;
  readonly #platform: Platform;
  readonly #config: SessionConfig;
  readonly #transport: Transport;
  #visit!: Visit;
  readonly #keeper: AssignmentKeeper;
  #hold: Hold | null = null;
  #isTrained = false;
  /** Assignments of this session; those that an earlier one left are already counted. */
  #got = 0;
  /** The fewest examples that each offered task runs on. */
  #minExamples: ReadonlyMap<string, number> = new Map();

  constructor(platform: Platform, config: SessionConfig, transport: Transport) {
    this.#platform = platform;
    this.#keeper = new AssignmentKeeper(platform.store, config);
    this.#config = config;
    this.#transport = transport;
  }

  /** Where the token of the last rejection is kept. */
  get #tokenPlace(): string {
    return `${IDENTITY.token}${this.#config.coordinator.href}:${this.#config.population}`;
  }

  note(facts: Partial<Outcome>): void {
    this.outcome = { ...this.outcome, ...facts };
  }

  /** The cause of an error: once the session is told to stop, it cuts its own connections. */
  cause(error: errors.DeviceError): errors.DeviceError {
    const cut = error instanceof errors.TransportError && this.#config.stopping?.aborted;
    return cut ? new errors.NotAllowedNow(STOPPING) : error;
  }

  /** Everything from the policy to the receipt. */
  async run(): Promise<void> {
    this.#visit = await visit(this.#platform, this.#config, this.#transport);
    const { guard, enrolments } = this.#visit;
    const earlier = await this.#keeper.get();
    try {
      if (earlier === null || earlier.phase === "reported" || earlier.due <= this.#platform.now()) {
        guard.checkIn();
        await this.#takePart(earlier);
      } else {
        await this.#finish(earlier);
      }
    } finally {
      this.note({ device: enrolments.device });
      await guard.spend(this.#got);
    }
    await this.#visit.trim();
  }

  /** Finish the assignment that a stopped device left, or give it up. */
  async #finish(kept: KeptAssignment): Promise<void> {
    const { given, question } = kept;
    this.note({ question });
    await this.#visit.guard.checkKept(kept).catch(async (error: unknown) => {
      // Only the owner is told: a population that is no longer allowed must not hear from this device.
      if (error instanceof errors.PlanRefused || error instanceof errors.PolicyForbids) await this.#keeper.drop();
      throw error;
    });
    this.#noteAssignment(given);
    await this.#holding(given, async () => {
      if (kept.phase === "assigned") {
        // It is not trained again, because this work may have been what stopped the device.
        throw new errors.RuntimeFailed("the device was stopped while it worked");
      }
      this.#isTrained = true;
      this.note({ examples: kept.examples, steps: kept.steps });
      await this.#deliver(kept, await this.#plan(given));
    });
  }

  async #takePart(last: KeptAssignment | null): Promise<void> {
    const { examples, engine, memoryBytes } = this.#platform;
    const now = await this.#platform.conditions();
    const token = await this.#platform.store.get(this.#tokenPlace);
    const labels = this.#visit.guard.told(checkLabels(this.#config.labels ?? {}));
    const answer = await this.#transport.checkIn(this.#config.population, {
      capabilities: {
        runtime: "muster-js",
        version: VERSION,
        engine: engine.name,
        formats: [FORMAT],
        secagg: ["SA1"],
        memory_mb: memoryBytes === null ? null : roundedMb(memoryBytes),
      },
      examples: statedExamples(this.#visit.guard.visible(await examples.counts())),
      conditions: statedConditions(now),
      ...(await statedVersions(this.#platform.store, this.#config)),
      ...(token !== null && { token }),
      ...(Object.keys(labels).length > 0 && { labels }),
    });
    if (answer.outcome === "rejected") return this.#rejected(answer);
    this.#minExamples = new Map(answer.offers.map(({ task, min_examples }) => [task, min_examples]));
    const tasks = (await acceptableTasks(answer.offers, examples, now, this.#visit.guard.shows)).slice(0, MOST_TASKS);
    if (tasks.length === 0) {
      // The coordinator is not told: the finding may be private, and silence looks like a lost connection.
      return this.note({ outcome: "rejected", reason: "unwilling", retry: answer.retry, retryable: "transient" });
    }
    const given = await this.#transport.awaitAssignment(answer.session, this.#config.waitS, tasks);
    if (given.outcome === "rejected") return this.#rejected(given);
    if (last?.given.assignment === given.assignment) {
      throw new errors.BadAnswer(`assignment ${given.assignment} came again after this device was done with it`);
    }
    this.#noteAssignment(given);
    await this.#holding(given, async () => {
      const [kept, plan] = await this.#train(given);
      await this.#deliver(kept, plan);
    });
    if (this.outcome.outcome === "reported") this.note({ retry: answer.retry });
  }

  /** Bytes that the cache must hold for a plan between rounds: all that it needs, but for what models keep anyway. */
  async #toCache(given: Assignment, plan: Plan): Promise<number> {
    const stays = await keptBlobs(this.#platform.store);
    const refs = [given.plan, given.checkpoint, ...keptRefs(plan)].filter(({ sha256 }) => !stays.has(sha256));
    const sizes = new Map(refs.map(({ sha256, size }) => [sha256, size]));
    return [...sizes.values()].reduce((sum, size) => sum + size, 0);
  }

  /** Train, and keep the report. */
  async #train(given: Assignment): Promise<[KeptAssignment, Plan]> {
    const { guard } = this.#visit;
    const due = this.#platform.now() + given.report_within_s;
    const assigned = { given, due, phase: "assigned", report: new Uint8Array(), ...NO_WORK } as const;
    await this.#keeper.keep(assigned);
    this.#got = 1;
    await guard.spend(this.#got); // now: a device that is killed at work has used it
    await guard.checkAssignment(given);
    const plan = await this.#plan(given);
    const question = shownQuestion(plan);
    this.note({ question });
    guard.checkQuestion(question);
    const counts = await this.#platform.examples.counts();
    guard.checkCache(await this.#toCache(given, plan));
    guard.checkPlan(given, plan, counts.get(plan.examples.collection) ?? 0);
    if (given.secagg !== null) {
      await this.#secure(due).check(given, plan.report);
    }
    const result = await this.#execute(given, plan, due);
    const report =
      given.secagg === null
        ? encodeVector("report", weigh(plan.report, result.values, result.weight))
        : encodeVector(UNWEIGHTED, result.values);
    const work = { collection: plan.examples.collection, examples: result.examples, steps: result.steps, question };
    const kept = { ...assigned, phase: "trained", report, ...work } as const;
    if (question !== null) await countAnswer(this.#platform);
    await this.#keeper.keep(kept);
    this.#isTrained = true;
    this.note({ examples: result.examples, steps: result.steps });
    return [kept, plan];
  }

  async #execute(given: Assignment, plan: Plan, due: number): Promise<TrainingResult> {
    const { engine, random } = this.#platform;
    const refs = Object.entries(runGraphs(plan));
    const { blob } = this.#visit;
    const keepGoing = () => this.#keepGoing(due);
    const stored = await this.#platform.examples.load(plan.examples.collection);
    const { examples: all, cut } = await tokenized(plan, stored, blob, keepGoing);
    this.note({ cut });
    checkExamples(plan, all);
    const examples = await onSide(plan, all, this.#minExamples.get(given.task) ?? 0);
    const broadcast = decodeVectors(await this.#transport.blob(given.checkpoint), plan.broadcast);
    await checkModel(given, broadcast);
    const frozen = await frozenOf(plan, blob);
    // In a secure round a graph's noise must stay secret: a plan could use it to place examples apart in the sum.
    const secret = given.secagg === null ? new Uint8Array() : random(SECRET_BYTES);
    const key = { seed: given.seed, round: given.round, slot: given.slot, secret };
    return withGraphs(engine, refs, blob, (graphs) =>
      execute({ engine, plan, graphs, broadcast, frozen, examples, key, keepGoing }),
    );
  }

  /** Send the stored report. It stays stored until its receipt has arrived, unless it is no longer needed. */
  async #deliver(kept: KeptAssignment, plan: Plan): Promise<void> {
    const { given } = kept;
    this.note({ numbers: reportSize(plan.report) });
    if (given.secagg === null) {
      if (given.over_selected) await this.#hold?.ask();
      await this.#transport.report(given.assignment, kept.report);
    } else {
      const { summed } = await this.#secure(kept.due).run(kept, plan.report);
      if (!summed) throw new errors.SumAbandoned("the secure aggregation ended without a sum");
    }
    this.note({ outcome: "reported" });
    await this.#keeper.keep({ ...kept, phase: "reported", report: new Uint8Array() });
  }

  /** Work on an assignment, hold it meanwhile, and give it up when it fails for good. */
  async #holding(given: Assignment, work: () => Promise<void>): Promise<void> {
    this.#hold = new Hold(this.#platform, this.#transport, given);
    try {
      await work();
    } catch (error) {
      const known =
        error instanceof errors.DeviceError
          ? error
          : new errors.RuntimeFailed(`the device's own code failed: ${String(error)}`);
      // A report that may still arrive stays kept: the next session sends it if there is time left.
      const mayArrive = known instanceof errors.TransportError && !(known instanceof errors.Refused && known.final);
      if (!(mayArrive && this.#isTrained)) await this.#giveUp(given, this.cause(known));
      this.note(failure(this.cause(known)));
      if (known instanceof errors.AssignmentError) this.note({ outcome: "aborted" });
    } finally {
      this.#hold.end();
    }
  }

  /** End an assignment without a report, and say why. */
  async #giveUp(given: Assignment, error: errors.DeviceError): Promise<void> {
    if (!(error instanceof errors.Refused && OVER.includes(error.status))) {
      const reason = error instanceof errors.AssignmentError ? error.reason : "runtime-failed";
      await this.#transport.abort(given.assignment, reason).catch((failed: unknown) => {
        if (!(failed instanceof errors.TransportError)) throw failed; // the outcome keeps the first failure
      });
    }
    await this.#keeper.drop();
  }

  #keepGoing(due: number): boolean {
    if (this.#config.stopping?.aborted) throw new errors.NotAllowedNow(STOPPING);
    this.#hold?.check();
    this.#visit.guard.checkWork();
    return this.#platform.now() < due;
  }

  #secure(due: number): SecureDelivery {
    return new SecureDelivery(this.#visit, this.#keeper, () => this.#keepGoing(due));
  }

  async #plan(given: Assignment): Promise<Plan> {
    return decodeTraining(await this.#visit.blob(given.plan), given.round);
  }

  #noteAssignment({ task, round, attempt, secagg, target = "" }: Assignment): void {
    this.note({ task, round, attempt, secure: secagg !== null, target: visible(target) });
  }

  async #rejected({ reason, retry, token, formats }: Rejected): Promise<void> {
    await this.#platform.store.write({ [this.#tokenPlace]: token || null });
    const wanted = reason === "unsupported-format" ? `this device runs ${FORMAT}; wanted: ${formats}` : "";
    const retryable = reason === "unsupported-format" ? "permanent" : "transient";
    this.note({ outcome: "rejected", reason, detail: wanted, retry, retryable });
  }
}

const MEBIBYTE = 1 << 20;
const MOST_COLLECTIONS = 64;

/** The conditions that a coordinator is told. Levels are rounded: exact ones would help to recognise a device. */
function statedConditions({ charging, idle, unmetered, battery, freeStorageBytes }: Conditions): object {
  return {
    charging,
    idle,
    unmetered,
    battery: battery === null ? null : Math.round(10 * battery) / 10,
    free_storage_mb: freeStorageBytes === null ? null : roundedMb(freeStorageBytes),
  };
}

/** The numbers of examples that a device states, by collection: rounded down, and only of the largest collections. */
function statedExamples(counts: ReadonlyMap<string, number>): Record<string, number> {
  const named = [...counts].filter(([name]) => name.length > 0 && name.length <= 200);
  const largest = named.sort(([, a], [, b]) => b - a).slice(0, MOST_COLLECTIONS);
  return Object.fromEntries(largest.map(([name, count]) => [name, roundedDown(count)]));
}

/** MiB, rounded down to a power of two. */
function roundedMb(bytes: number): number {
  return roundedDown(Math.floor(bytes / MEBIBYTE));
}

/** The tasks whose rules all hold, in the order of the offers. A rule on an unknown value does not hold.
 *
 * shows: whether the owner lets a coordinator know of a collection. Any other is treated as missing.
 */
async function acceptableTasks(
  offers: readonly Offer[],
  examples: ExampleSource,
  now: Conditions,
  shows: (collection: string) => boolean,
): Promise<string[]> {
  const counts = await examples.counts();
  const accepted: string[] = [];
  for (const offer of offers) {
    const shown = shows(offer.collection);
    const held = shown ? (counts.get(offer.collection) ?? 0) : 0;
    const age = offer.max_example_age_s;
    const recent = age === null || !shown ? held : await examples.countRecent(offer.collection, age);
    if (rulesHold(offer, now) && held >= offer.min_examples && recent >= offer.min_recent_examples) {
      accepted.push(offer.task);
    }
  }
  return accepted;
}

function rulesHold(offer: Offer, now: Conditions): boolean {
  const flags = (["charging", "idle", "unmetered"] as const).every((rule) => !offer[rule] || now[rule] === true);
  const battery = offer.min_battery === null || (now.battery !== null && now.battery >= offer.min_battery);
  const least = offer.min_free_storage_bytes;
  return flags && battery && (least === null || (now.freeStorageBytes !== null && now.freeStorageBytes >= least));
}

/** The greatest power of two that is not above a count; 0 for 0. */
function roundedDown(count: number): number {
  return count === 0 ? 0 : 2 ** Math.floor(Math.log2(count));
}

/** What a plan asks, as its owner sees it: one line; null where it asks nothing. */
function shownQuestion({ question }: Plan): string | null {
  return question === undefined ? null : visible(question.trim().split(/\s+/u).join(" "));
}

/** What became of a question that `by` asked, in words for the owner; empty where none was asked. As in Python. */
export function toldOf({ outcome, reason, detail, question, numbers, secure }: Outcome, by: string): string {
  const asked = `${question}, by ${by}`;
  const why = detail.startsWith("against ") ? `it is ${detail}` : detail || reason;
  if (question === null) return "";
  if (outcome === "reported") {
    const count = numbers.toLocaleString("en");
    return `answered a question: ${question}; sent ${count} numbers, ${secure ? "masked" : "in the clear"}`;
  }
  if (numbers > 0) return `made an answer to: ${asked}; not counted because ${why}`;
  return `was asked: ${asked}; ${reason === "plan-refused" ? "refused" : "not answered"} because ${why}`;
}
