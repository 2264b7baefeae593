/** The device's part in a secure round: what it checks of an invitation, and the conversation. Spec: docs/spec/wire.md §8. */

import { type Bytes, equal } from "../bytes.ts";
import { decodeVectors } from "../checkpoint.ts";
import { AlreadyRevealed, DeadlinePassed, Refused, SecaggRefused, StateDamaged } from "../errors.ts";
import type { AssignmentKeeper, KeptAssignment } from "../kept-assignment.ts";
import * as masking from "../masking.ts";
import type { Platform } from "../platform.ts";
import {
  boundsOf,
  digestOf,
  evaluationBy,
  type Release,
  type SumBounds,
  verifiedEntry,
  verifiedRelease,
} from "../release.ts";
import { hasCodecs, type ReportLayout, reportSize, weightOf } from "../report.ts";
import { Client, type SessionResult } from "../secagg/client.ts";
import { M, numberOf } from "../secagg/encoding.ts";
import { SecaggError } from "../secagg/errors.ts";
import { type AggregationPolicy, acceptInvitation, type HeldModel, type Invite } from "../secagg/invite.ts";
import { type DemandedSegment, noiseOf } from "../secagg/packing.ts";
import { LEAST_COHORT, leastHonest } from "../secagg/parameters.ts";
import type { Assignment } from "../wire/messages.ts";
import type { Enrolments } from "./enrolment.ts";
import type { Transport } from "./transport.ts";

/** The seconds that a request waits for a message, and the seconds between two requests. */
const [WAIT_S, PAUSE_S] = [20, 0.2];
/** The unmasked vector of a report. */
export const UNWEIGHTED = "values";

/** The surroundings of a secure round: the coordinator, the conversation, the parties, and the stored state. */
interface Means {
  readonly coordinator: URL;
  readonly transport: Transport;
  readonly enrolments: Enrolments;
  readonly keeper: AssignmentKeeper;
}

/** The secure delivery of one assignment. least: the fewest reports of a valid sum. */
export class SecureDelivery {
  readonly #platform: Platform;
  readonly #coordinator: URL;
  readonly #transport: Transport;
  readonly #enrolments: Enrolments;
  readonly #keeper: AssignmentKeeper;
  readonly #least: number;
  readonly #keepGoing: () => boolean;

  constructor(platform: Platform, means: Means, least: number, keepGoing: () => boolean) {
    this.#platform = platform;
    this.#coordinator = means.coordinator;
    this.#transport = means.transport;
    this.#enrolments = means.enrolments;
    this.#keeper = means.keeper;
    this.#least = least;
    this.#keepGoing = keepGoing;
  }

  /** Throws SecaggRefused, before any work, for an invitation that this device would not accept. */
  async check(given: Assignment, layout: ReportLayout): Promise<void> {
    await explained(async () => this.#accept(await this.#policy(given), given, layout));
  }

  /** Take part to the end, continuing where an earlier session stopped. Throws SecaggRefused or TransportError. */
  async run(kept: KeptAssignment, layout: ReportLayout): Promise<SessionResult> {
    return explained(async () => {
      const bounds = await releasedBounds(kept.given);
      const last = bounds.noise_multiplier > 0 ? M.MASKED : M.UNMASK;
      let [client, message] = kept.phase === "masked" ? await this.#resume(kept) : await this.#begin(kept, layout);
      for (;;) {
        const reply = await client.receive(message);
        if (reply.message === undefined) return client.result;
        if (numberOf(reply.message) === last) {
          // The sums of two attempts could differ by one device, whose report would be the difference. With noise, others
          // can open a sum that this device is in, and every further one would tell more than one round may.
          await this.#answer(kept.given, masking.lastSessionNumber(kept.given.round));
        }
        if (reply.keep !== undefined) {
          kept = { ...kept, phase: "masked", report: reply.keep };
          await this.#keeper.keep(kept);
        }
        message = await this.#say(kept.given.assignment, reply.message);
      }
    });
  }

  /** The client of a new session, and M0. This notes the round, which must happen before M1 leaves. */
  async #begin(kept: KeptAssignment, layout: ReportLayout): Promise<[Client, Bytes]> {
    const { given, report, examples } = kept;
    const policy = await this.#policy(given);
    const { credential } = await this.#enrolments.credential();
    const invite = await this.#accept(policy, given, layout);
    const values = decodeVectors(report, [{ name: UNWEIGHTED, size: reportSize(layout) - 1 }]).get(UNWEIGHTED);
    if (values === undefined) {
      throw new StateDamaged("the kept report does not fit its plan");
    }
    const bounds = await releasedBounds(given);
    const vector = masking.summedValues(layout, bounds, values);
    const weight = Math.min(weightOf(layout, examples), invite.wMax);
    const [lastRound, now] = [await this.#lastRound(given), BigInt(Math.floor(this.#platform.now()))];
    await this.#answer(given, invite.round);
    const input = { vector, weight, credential, lastRound, now, ...(await held(given, layout)) };
    return [new Client(this.#enrolments.keys.secagg, policy, input, this.#platform.random), given.secagg!];
  }

  /** The client of a session in which the masked report may have left, and M8. */
  async #resume({ given, report }: KeptAssignment): Promise<[Client, Bytes]> {
    const client = Client.restore(this.#enrolments.keys.secagg, await this.#policy(given), report);
    return [client, await this.#hear(given.assignment, M.SURVIVORS)];
  }

  /** The policy with the keys that this device pinned. The assignment must show the pinned key or a successor. */
  async #policy(given: Assignment): Promise<AggregationPolicy> {
    const { authority } = await this.#enrolments.credential();
    const serverKey = await this.#enrolments.server(given.server);
    return { serverKey, authority, minSum: Math.max(this.#least, LEAST_COHORT) };
  }

  /** The invitation of an assignment, if this device may accept it. */
  async #accept(policy: AggregationPolicy, given: Assignment, layout: ReportLayout): Promise<Invite> {
    const last = await this.#lastRound(given);
    if (last === masking.lastSessionNumber(given.round)) {
      throw new AlreadyRevealed(`this device did its part in an earlier attempt at round ${given.round}`);
    }
    const release = await verifiedRelease(given.release!);
    const invite = await acceptInvitation(policy, given.secagg!, await held(given, layout), last);
    await checkInvitation(invite, given, layout, release);
    return invite;
  }

  /** The greatest session number of its task, or of its release, that this device answered; -1 when it answered none.
   *
   * A coordinator can choose a task's name freely, but cannot offer the model of a release again under another name. An
   * evaluation of a round's model counts apart.
   */
  async #lastRound(given: Assignment): Promise<bigint> {
    const kept = await Promise.all((await this.#answeredPlaces(given)).map((place) => this.#platform.store.get(place)));
    return kept.map((number) => BigInt(number ?? -1)).reduce((a, b) => (a > b ? a : b));
  }

  /** Note that this device will not answer this or an earlier round of the task or release again. */
  async #answer(given: Assignment, number: bigint): Promise<void> {
    const places = await this.#answeredPlaces(given);
    await this.#platform.store.write(Object.fromEntries(places.map((place) => [place, String(number)])));
  }

  async #answeredPlaces({ task, release, plan, lineage }: Assignment): Promise<string[]> {
    if (release === null) {
      throw new SecaggRefused("the invitation comes without a release");
    }
    const evaluates = lineage !== null && evaluationBy(await verifiedRelease(release), plan.sha256) !== null;
    const model = evaluates ? `/${(await verifiedEntry(lineage)).round}` : "";
    return [`answered:${this.#coordinator.href}:${task}`, `answered:${await digestOf(release)}${model}`];
  }

  /** Send a message. Returns the coordinator's next one. */
  async #say(assignment: string, message: Bytes): Promise<Bytes> {
    const number = numberOf(message);
    try {
      const answer = await this.#transport.say(assignment, number, message, WAIT_S);
      return answer === null ? await this.#hear(assignment, number + 1) : only(number + 1, answer);
    } catch (error) {
      if (error instanceof Refused && error.reason === "unusable-message" && number === M.ADVERTISE) {
        await this.#enrolments.refused();
      }
      throw error;
    }
  }

  async #hear(assignment: string, number: number): Promise<Bytes> {
    while (this.#keepGoing()) {
      const message = await this.#transport.hear(assignment, number, WAIT_S);
      if (message !== null) return only(number, message);
      await this.#platform.sleep(PAUSE_S);
    }
    throw new DeadlinePassed(`message M${number} of the secure aggregation did not come in time`);
  }
}

/** The bounds of the sums of an assignment, which was checked. */
async function releasedBounds({ release, plan }: Assignment): Promise<SumBounds> {
  return boundsOf(await verifiedRelease(release!), plan.sha256);
}

/** The hashes of the model and the layout that this device holds. */
async function held({ plan, checkpoint, seed }: Assignment, layout: ReportLayout): Promise<HeldModel> {
  return { modelHash: await masking.modelHash(plan, checkpoint), layoutHash: await masking.layoutHash(layout, seed) };
}

/** The message, if it has that number; otherwise a coordinator could make a device repeat a step forever. */
function only(number: number, message: Bytes): Bytes {
  if (numberOf(message) !== number) {
    throw new SecaggRefused(`M${message[0]} of the secure aggregation came instead of M${number}`);
  }
  return message;
}

/** Throws SecaggRefused for an invitation that is not for its assignment, or contradicts the release. */
async function checkInvitation(
  invite: Invite,
  given: Assignment,
  layout: ReportLayout,
  release: Release,
): Promise<void> {
  const bounds = boundsOf(release, given.plan.sha256);
  const expected = demanded(layout, bounds);
  const found = invite.segments.map(({ fieldBits: _, ...segment }) => segment);
  const same = (a: DemandedSegment, b: DemandedSegment | undefined) =>
    (Object.keys(a) as (keyof DemandedSegment)[]).every((name) => a[name] === b?.[name]);
  const [task, round] = [await masking.taskHash(given.task), masking.sessionNumber(given.round, given.attempt)];
  if (!equal(invite.task, task) || invite.round !== round) {
    throw new SecaggRefused("the invitation is for another task or round than the assignment");
  }
  if (hasCodecs(layout) && release.seed !== given.seed) {
    throw new SecaggRefused("the report's codecs have another seed than the released one");
  }
  if (invite.minSum < bounds.min_sum) {
    throw new SecaggRefused(`the sum may be over ${invite.minSum} devices, the release demands ${bounds.min_sum}`);
  }
  if (invite.wMax !== masking.greatestWeight(layout, bounds)) {
    throw new SecaggRefused(`the greatest weight is ${invite.wMax}, not the one that is released`);
  }
  const honest = leastHonest(invite.minSum, invite.nMax);
  if (bounds.noise_multiplier > 0 && (bounds.honest < 1 || bounds.honest > honest)) {
    throw new SecaggRefused(
      `noise is to come from ${bounds.honest} devices, and a sum over ${invite.minSum} of a roster of up to ` +
        `${invite.nMax} may have ${honest} honest ones`,
    );
  }
  if (bounds.noise_multiplier > 0 && layout.weighting !== "uniform") {
    throw new SecaggRefused("noise would hide the values of the report, and not the number of examples");
  }
  if (found.length !== expected.length || !expected.every((one, place) => same(one, found[place]))) {
    throw new SecaggRefused("the invitation's segments are not those of the plan's report under the release's bounds");
  }
}

/** The segments that release and plan demand. */
function demanded(layout: ReportLayout, bounds: SumBounds): DemandedSegment[] {
  return masking.fixedPoints(layout, bounds).map((one) => ({
    ...one,
    noise: bounds.noise_multiplier === 0 ? 0 : noiseOf(one, bounds.noise_multiplier, bounds.honest),
  }));
}

async function explained<T>(step: () => Promise<T>): Promise<T> {
  try {
    return await step();
  } catch (error) {
    throw error instanceof SecaggError ? new SecaggRefused(`${error.name}: ${error.message}`) : error;
  }
}
