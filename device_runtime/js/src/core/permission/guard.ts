/** The guard: it checks the owner's policy before anything runs. The rules: docs/device.md.
 *
 * The coordinator receives only the name of the reason. The value and the limit stay in the outcome.
 */

import { PlanRefused, PolicyForbids } from "../errors.ts";
import type { KeptAssignment } from "../kept/sessions.ts";
import * as plans from "../plans/plan.ts";
import { reportSize } from "../plans/report.ts";
import { type BytesMoved, keptJson, type Platform } from "../platform.ts";
import type { Assignment } from "../wire/messages.ts";
import { verifyPlan } from "../wire/statements.ts";
import { breaking, type Labels, type Place, refused } from "./policy.ts";
import { checkRelease } from "./releases.ts";

const DAY_S = 86_400;
const FLOAT_BYTES = 4;
const PLACE = "spent";

/** The use at a time, in seconds since 1970. */
interface Spent {
  readonly at: number;
  readonly seconds: number;
  readonly bytes: number;
  readonly sessions: number;
}

/** The checks of one session, in the order of their use. */
export class Guard {
  readonly #platform: Platform;
  readonly #place: Place;
  readonly #moved: BytesMoved;
  #spent: readonly Spent[] = [];
  /** Answers to questions of the last week, before this session. */
  #answers = 0;
  #started: number | null = null;

  private constructor(platform: Platform, place: Place, moved: BytesMoved) {
    this.#platform = platform;
    this.#place = place;
    this.#moved = moved;
  }

  /** The guard of a session. It knows the use of the last day; one of the future counts for a day from now on.
   *
   * moved: the bytes of this session, as they are counted.
   */
  static async of(platform: Platform, place: Place, moved: BytesMoved): Promise<Guard> {
    const [now, kept] = [platform.now(), (await keptJson<Spent[]>(platform.store, PLACE)) ?? []];
    const recent = kept.filter(({ at }) => now - at < DAY_S).map((one) => ({ ...one, at: Math.min(one.at, now) }));
    if (kept.some(({ at }) => at > now)) await platform.store.write({ [PLACE]: JSON.stringify(recent) });
    const guard = new Guard(platform, place, moved);
    [guard.#spent, guard.#answers] = [recent, (await answersOf(platform)).length];
    return guard;
  }

  /** Count the use of this session so far, replacing its earlier count. */
  async spend(sessions: number): Promise<void> {
    const bytes = this.#moved.up + this.#moved.down;
    const now = { at: this.#platform.now(), seconds: this.seconds, bytes, sessions };
    await this.#platform.store.write({ [PLACE]: JSON.stringify([...this.#spent, now]) });
  }

  /** Check the population and the day's budget before the first request. Throws PolicyForbids. */
  checkIn(): void {
    this.checkPopulation();
    const { per_day } = this.#place.policy;
    for (const rule of ["compute_seconds", "bytes", "sessions"] as const) {
      const [used, most] = [this.#used(rule === "compute_seconds" ? "seconds" : rule), per_day[rule]];
      if (most !== null && used >= most) {
        throw forbidden(`per_day.${rule}`, `${used} of ${most} are used up in the last 24 hours`);
      }
    }
  }

  /** Check the population, before anything is asked of the coordinator for it. Throws PolicyForbids. */
  checkPopulation(): void {
    const { populations } = this.#place.policy;
    if (populations !== null && !populations.includes(this.#place.population)) {
      throw forbidden("populations", `it does not name ${this.#place.population}`);
    }
  }

  /** Check the limits of a plan before fetching what predicts. missing: bytes that are still to come.
   *
   * Throws PlanRefused.
   */
  checkPredict(plan: plans.Plan, sizes: ReadonlyMap<string, number>, missing: number): void {
    const { plan: limits } = this.#place.policy;
    const all = [...sizes.values()].reduce((sum, size) => sum + size, 0);
    const kept = all - (sizes.get("plan") ?? 0) - (sizes.get("parameters") ?? 0);
    atMost("plan.parameters", plans.parameterCount(plan), limits.parameters);
    atMost("plan.graph_bytes", kept, limits.graph_bytes);
    atMost("plan.memory_bytes", all, limits.memory_bytes);
    this.#checkBytes(missing);
  }

  /** The counts of examples in collections that a coordinator may know. */
  visible(counts: ReadonlyMap<string, number>): Map<string, number> {
    return new Map([...counts].filter(([name]) => this.shows(name)));
  }

  /** The labels that a coordinator may know. */
  told(labels: Labels): Labels {
    return Object.fromEntries(Object.entries(labels).filter(([name]) => this.#place.policy.labels.includes(name)));
  }

  /** Whether a plan may train on a collection, and a coordinator may know its number of examples. */
  readonly shows = (collection: string): boolean => this.#place.policy.collections?.includes(collection) ?? true;

  /** Check an earlier session's work before finishing it: the policy may have changed.
   *
   * A finished report is checked against all rules but the plan's limits, unfinished work only against the population.
   * Throws PolicyForbids or PlanRefused.
   */
  async checkKept({ given, phase, collection, report, question }: KeptAssignment): Promise<void> {
    this.checkPopulation();
    if (phase === "assigned") return;
    await this.#checkRound(given, true);
    this.#checkCollection(collection);
    this.#checkBytes(report.length);
    this.checkQuestion(question, this.#answers - 1); // this one is counted already
  }

  /** Check cohort, signature or release, and size before fetching the plan. Throws PlanRefused. */
  async checkAssignment(given: Assignment): Promise<void> {
    await this.#checkRound(given, false);
    this.checkSizes(given.plan, given.checkpoint);
  }

  /** Check sizes before fetching a plan and the model's parameters. Throws PlanRefused. */
  checkSizes(plan: plans.BlobRef, parameters: plans.BlobRef): void {
    if (plan.size > plans.MOST_PLAN_BYTES) {
      throw new PlanRefused(`the plan has ${plan.size} bytes, a device reads at most ${plans.MOST_PLAN_BYTES}`);
    }
    this.#checkBytes(plan.size + parameters.size);
    atMost("plan.memory_bytes", plan.size + parameters.size, this.#place.policy.plan.memory_bytes);
  }

  /** Check that the cache can hold the bytes that a plan needs between rounds. Throws PlanRefused. */
  checkCache(needed: number): void {
    // What does not stay would be fetched in every round. With 0 that is what the owner wants.
    atMost("cache_bytes", needed, this.#place.policy.cache_bytes || null);
  }

  /** Check schema, limits and collection before reading examples and fetching graphs. This starts the timer.
   *
   * examples: their number. Throws PlanRefused.
   */
  checkPlan(given: Pick<Assignment, "plan" | "checkpoint">, plan: plans.Plan, examples: number): void {
    const limits = this.#place.policy.plan;
    const received = plan.broadcast.find(({ name }) => name === "params")?.size;
    if (received !== plans.parameterCount(plan)) {
      throw new PlanRefused(
        `the plan's schema has ${plans.parameterCount(plan)} parameters, its broadcast ${received}`,
      );
    }
    const vectors = [...plan.broadcast, ...plan.passes.flatMap((pass) => pass.carry), ...plan.report.segments];
    const kept = plans.keptRefs(plan).reduce((sum, { size }) => sum + size, 0);
    const report = FLOAT_BYTES * reportSize(plan.report);
    const visited = plan.passes.reduce((sum, { loop }) => sum + loop.batch_size * plans.stepCount(loop, examples), 0);
    atMost("plan.parameters", Math.max(...vectors.map(({ size }) => size)), limits.parameters);
    atMost("plan.graph_bytes", kept, limits.graph_bytes);
    const held = given.plan.size + given.checkpoint.size + kept + report + plans.batchBytes(plan);
    atMost("plan.memory_bytes", held, limits.memory_bytes);
    this.#checkBytes(kept + given.checkpoint.size + report);
    atMost("plan.batch_examples", visited, limits.batch_examples);
    this.#checkCollection(plan.examples.collection);
    this.#started = this.#platform.workSeconds();
  }

  /** Call this while training. Throws PlanRefused when the compute seconds of plan or day are used up. */
  checkWork(): void {
    atMost("plan.compute_seconds", this.seconds, this.#place.policy.plan.compute_seconds);
    atMost("per_day.compute_seconds", this.#used("seconds") + this.seconds, this.#place.policy.per_day.compute_seconds);
  }

  /** Seconds of work in this session. */
  get seconds(): number {
    return this.#started === null ? 0 : this.#platform.workSeconds() - this.#started;
  }

  /** Check what a plan asks, or null, before anything else of it. answers: those of the last week. Throws PlanRefused. */
  checkQuestion(question: string | null, answers = this.#answers): void {
    const { allowed, per_week } = this.#place.policy.questions;
    if (question === null) return;
    if (!allowed) throw refused("questions.allowed", "the plan asks a question");
    if (per_week !== null && answers >= per_week) {
      throw refused("questions.per_week", `${answers} of ${per_week} are answered within a week`);
    }
  }

  #used(what: "seconds" | "bytes" | "sessions"): number {
    return this.#spent.reduce((sum, one) => sum + one[what], 0);
  }

  #checkCollection(collection: string): void {
    if (!this.shows(collection)) {
      throw refused("collections", `the plan wants ${collection}`);
    }
  }

  /** more: bytes that this session still needs, as far as known. */
  #checkBytes(more: number): void {
    const session = this.#moved.up + this.#moved.down + more;
    atMost("per_day.bytes", this.#used("bytes") + session, this.#place.policy.per_day.bytes);
  }

  /** Check cohort, and signature or release. again: an earlier session accepted the assignment. */
  async #checkRound(given: Assignment, again: boolean): Promise<void> {
    const { require_secure_aggregation, min_cohort, min_noise_multiplier } = this.#place.policy;
    if (require_secure_aggregation && given.secagg === null) {
      throw refused("require_secure_aggregation", "the round asks for the report in the clear");
    }
    if (min_cohort > (given.minimum ?? 1)) {
      throw refused(
        "min_cohort",
        `the round may count with ${given.minimum ?? 1} reports, the least allowed is ${min_cohort}`,
      );
    }
    if (min_noise_multiplier > 0 && given.secagg === null) {
      throw refused("min_noise_multiplier", "the round asks for the report in the clear, without noise");
    }
    if (given.secagg === null) {
      await this.#checkSignature(given);
    } else {
      await checkRelease(this.#platform, this.#place, given, again);
    }
  }

  async #checkSignature({ plan, plan_signature: signature }: Assignment): Promise<void> {
    const { signers } = this.#place.policy;
    if (signers.length === 0) return;
    if (signature === null || !signers.includes(signature.signer)) {
      throw refused(
        "signers",
        `the plan is signed by ${signature?.signer ?? "nobody"}, which the policy does not name`,
      );
    }
    await verifyPlan(plan, signature).catch(breaking("signers"));
  }
}

function atMost(rule: string, found: number, allowed: number | null): void {
  if (allowed !== null && found > allowed) {
    throw refused(rule, `${found} found, ${allowed} allowed`);
  }
}

function forbidden(rule: string, why: string): PolicyForbids {
  return new PolicyForbids(`against ${rule} of this device's policy: ${why}`);
}

const WEEK_S = 7 * 86_400;
/** Where the times of answers are kept. */
const ANSWERS_PLACE = "answers";

/** The times of the answers of the last seven days, in seconds since 1970. Throws StateDamaged.
 *
 * A clock that goes back gives none of them back: an answer of the future counts for a week from now on.
 */
export async function answersOf({ store, now }: Pick<Platform, "store" | "now">): Promise<readonly number[]> {
  const [at, kept] = [now(), (await keptJson<number[]>(store, ANSWERS_PLACE)) ?? []];
  const recent = kept.filter((one) => at - one < WEEK_S).map((one) => Math.min(one, at));
  if (recent.join() !== kept.join()) await store.write({ [ANSWERS_PLACE]: JSON.stringify(recent) });
  return recent;
}

/** Count one more answer, before anything of it is sent. */
export async function countAnswer(platform: Pick<Platform, "store" | "now">): Promise<void> {
  const answers = [...(await answersOf(platform)), platform.now()];
  await platform.store.write({ [ANSWERS_PLACE]: JSON.stringify(answers) });
}
