/** The device's part in a secure round: what it checks of an invitation, the values that both ends derive, and the
 * conversation. Spec: docs/spec/wire.md §8.
 */

import { type Bytes, bitLength, checked, concat, equal, fromHex, u64, utf8 } from "../bytes.ts";
import { sha256 } from "../cryptography.ts";
import { AlreadyRevealed, DeadlinePassed, Refused, SecaggRefused, StateDamaged } from "../errors.ts";
import type { AssignmentKeeper, KeptAssignment } from "../kept/sessions.ts";
import { decodeVectors } from "../plans/checkpoint.ts";
import { codecSchema } from "../plans/codecs.ts";
import type { BlobRef } from "../plans/plan.ts";
import * as reports from "../plans/report.ts";
import { Client, type SessionResult } from "../secagg/client.ts";
import { M, numberOf } from "../secagg/encoding.ts";
import { SecaggError } from "../secagg/errors.ts";
import * as invites from "../secagg/invite.ts";
import { type DemandedSegment, noiseOf } from "../secagg/packing.ts";
import type { Assignment } from "../wire/messages.ts";
import * as statements from "../wire/statements.ts";
import type { Visit } from "./enrolment.ts";

/** The seconds that a request waits for a message, and the seconds between two requests. */
const [WAIT_S, PAUSE_S] = [20, 0.2];
/** The unmasked vector of a report. */
export const UNWEIGHTED = "values";

/** The secure delivery of one assignment. */
export class SecureDelivery {
  readonly #visit: Visit;
  readonly #keeper: AssignmentKeeper;
  readonly #keepGoing: () => boolean;

  constructor(visit: Visit, keeper: AssignmentKeeper, keepGoing: () => boolean) {
    this.#visit = visit;
    this.#keeper = keeper;
    this.#keepGoing = keepGoing;
  }

  /** Throws SecaggRefused, before any work, for an invitation that this device would not accept. */
  async check(given: Assignment, layout: reports.ReportLayout): Promise<void> {
    await explained(async () => this.#accept(await this.#policy(given), given, layout));
  }

  /** Take part to the end, continuing where an earlier session stopped. Throws SecaggRefused or TransportError. */
  async run(kept: KeptAssignment, layout: reports.ReportLayout): Promise<SessionResult> {
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
          await this.#answer(kept.given, lastSessionNumber(kept.given.round));
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
  async #begin(kept: KeptAssignment, layout: reports.ReportLayout): Promise<[Client, Bytes]> {
    const { given, report, examples } = kept;
    const policy = await this.#policy(given);
    const { credential } = await this.#visit.enrolments.credential();
    const invite = await this.#accept(policy, given, layout);
    const values = decodeVectors(report, [{ name: UNWEIGHTED, size: reports.reportSize(layout) - 1 }]).get(UNWEIGHTED);
    if (values === undefined) {
      throw new StateDamaged("the kept report does not fit its plan");
    }
    const bounds = await releasedBounds(given);
    const vector = summedValues(layout, bounds, values);
    const weight = Math.min(reports.weightOf(layout, examples), invite.wMax);
    const [lastRound, now] = [await this.#lastRound(given), BigInt(Math.floor(this.#visit.platform.now()))];
    await this.#answer(given, invite.round);
    const input = { vector, weight, credential, lastRound, now, ...(await held(given, layout)) };
    return [new Client(this.#visit.enrolments.keys.secagg, policy, input, this.#visit.platform.random), given.secagg!];
  }

  /** The client of a session in which the masked report may have left, and M8. */
  async #resume({ given, report }: KeptAssignment): Promise<[Client, Bytes]> {
    const client = Client.restore(this.#visit.enrolments.keys.secagg, await this.#policy(given), report);
    return [client, await this.#hear(given.assignment, M.SURVIVORS)];
  }

  /** The policy with the keys that this device pinned. The assignment must show the pinned key or a successor. */
  async #policy(given: Assignment): Promise<invites.AggregationPolicy> {
    const { authority } = await this.#visit.enrolments.credential();
    const serverKey = await this.#visit.enrolments.server(given.server);
    return { serverKey, authority, minSum: Math.max(this.#visit.place.policy.min_cohort, invites.LEAST_COHORT) };
  }

  /** The invitation of an assignment, if this device may accept it. */
  async #accept(
    policy: invites.AggregationPolicy,
    given: Assignment,
    layout: reports.ReportLayout,
  ): Promise<invites.Invite> {
    const last = await this.#lastRound(given);
    if (last === lastSessionNumber(given.round)) {
      throw new AlreadyRevealed(`this device did its part in an earlier attempt at round ${given.round}`);
    }
    const release = await statements.verifiedRelease(given.release!);
    const invite = await invites.acceptInvitation(policy, given.secagg!, await held(given, layout), last);
    await checkInvitation(invite, given, layout, release);
    return invite;
  }

  /** The greatest session number of its task, or of its release, that this device answered; -1 when it answered none.
   *
   * A coordinator can choose a task's name freely, but cannot offer the model of a release again under another name. An
   * evaluation of a round's model counts apart.
   */
  async #lastRound(given: Assignment): Promise<bigint> {
    const kept = await Promise.all(
      (await this.#answeredPlaces(given)).map((place) => this.#visit.platform.store.get(place)),
    );
    return kept.map((number) => BigInt(number ?? -1)).reduce((a, b) => (a > b ? a : b));
  }

  /** Note that this device will not answer this or an earlier round of the task or release again. */
  async #answer(given: Assignment, number: bigint): Promise<void> {
    const places = await this.#answeredPlaces(given);
    await this.#visit.platform.store.write(Object.fromEntries(places.map((place) => [place, String(number)])));
  }

  async #answeredPlaces({ task, release, plan, lineage }: Assignment): Promise<string[]> {
    if (release === null) {
      throw new SecaggRefused("the invitation comes without a release");
    }
    const evaluates =
      lineage !== null && statements.evaluationBy(await statements.verifiedRelease(release), plan.sha256) !== null;
    const model = evaluates ? `/${(await statements.verifiedEntry(lineage)).round}` : "";
    return [
      `answered:${this.#visit.place.coordinator.href}:${task}`,
      `answered:${await statements.digestOf(release)}${model}`,
    ];
  }

  /** Send a message. Returns the coordinator's next one. */
  async #say(assignment: string, message: Bytes): Promise<Bytes> {
    const number = numberOf(message);
    try {
      const answer = await this.#visit.transport.secagg(assignment, number, WAIT_S, message);
      return answer === null ? await this.#hear(assignment, number + 1) : only(number + 1, answer);
    } catch (error) {
      if (error instanceof Refused && error.reason === "unusable-message" && number === M.ADVERTISE) {
        await this.#visit.enrolments.refused();
      }
      throw error;
    }
  }

  async #hear(assignment: string, number: number): Promise<Bytes> {
    while (this.#keepGoing()) {
      const message = await this.#visit.transport.secagg(assignment, number, WAIT_S);
      if (message !== null) return only(number, message);
      await this.#visit.platform.sleep(PAUSE_S);
    }
    throw new DeadlinePassed(`message M${number} of the secure aggregation did not come in time`);
  }
}

/** The bounds of the sums of an assignment, which was checked. */
async function releasedBounds({ release, plan }: Assignment): Promise<statements.SumBounds> {
  return statements.boundsOf(await statements.verifiedRelease(release!), plan.sha256);
}

/** The hashes of the model and the layout that this device holds. */
async function held({ plan, checkpoint, seed }: Assignment, layout: reports.ReportLayout): Promise<invites.HeldModel> {
  return { modelHash: await modelHash(plan, checkpoint), layoutHash: await layoutHash(layout, seed) };
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
  invite: invites.Invite,
  given: Assignment,
  layout: reports.ReportLayout,
  release: statements.Release,
): Promise<void> {
  const bounds = statements.boundsOf(release, given.plan.sha256);
  const expected = demanded(layout, bounds);
  const found = invite.segments.map(({ fieldBits: _, ...segment }) => segment);
  const same = (a: DemandedSegment, b: DemandedSegment | undefined) =>
    (Object.keys(a) as (keyof DemandedSegment)[]).every((name) => a[name] === b?.[name]);
  const [task, round] = [await taskHash(given.task), sessionNumber(given.round, given.attempt)];
  if (!equal(invite.task, task) || invite.round !== round) {
    throw new SecaggRefused("the invitation is for another task or round than the assignment");
  }
  if (reports.hasCodecs(layout) && release.seed !== given.seed) {
    throw new SecaggRefused("the report's codecs have another seed than the released one");
  }
  if (given.target !== bounds.target) {
    throw new SecaggRefused(
      `the assignment is for ${wanted(given.target)}, and the release is for ${wanted(bounds.target)}`,
    );
  }
  if (invite.minSum < bounds.min_sum) {
    throw new SecaggRefused(`the sum may be over ${invite.minSum} devices, the release demands ${bounds.min_sum}`);
  }
  if (invite.wMax !== greatestWeight(layout, bounds)) {
    throw new SecaggRefused(`the greatest weight is ${invite.wMax}, not the one that is released`);
  }
  const honest = invites.leastHonest(invite.minSum, invite.nMax);
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

function wanted(target: string | undefined): string {
  return target === undefined ? "any device" : `devices with ${target}`;
}

/** The segments that release and plan demand. */
function demanded(layout: reports.ReportLayout, bounds: statements.SumBounds): DemandedSegment[] {
  return fixedPoints(layout, bounds).map((one) => ({
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

/** A sum without a range is sent as two numbers: whole units, and the rest in steps. */
const [METRIC_BITS, METRIC_UNIT, METRIC_STEP] = [20, 16, 2 ** -14];
const CLAMPED_BITS = 10;

/** How the values of a segment become fixed-point numbers of `bits` in [low, high]. */
type FixedPoint = Omit<DemandedSegment, "noise">;

/** The fixed-point formats of all values that a round sums, as `summedValues` has them. Plan and release determine them.
 *
 * With noise, all mean segments are treated as one, whatever their ranges: they are scaled down together, and 0 is one
 * of the steps.
 */
export function fixedPoints(layout: reports.ReportLayout, bounds: statements.SumBounds): FixedPoint[] {
  if (bounds.noise_multiplier > 0) return [noisyFixedPoint(layout, bounds)];
  return reports.unweighted(layout).flatMap((segment) => formats(segment, bounds));
}

/** Those of a segment without noise: two of a sum without a range, which is split, else one. */
function formats(segment: reports.Segment, bounds: statements.SumBounds): FixedPoint[] {
  const { size, range } = segment;
  if (range !== undefined) {
    return [{ size, inBits: range.bits, low: range.low, high: range.high, norm: 0, weighted: false }];
  }
  if (segment.reduction === "mean") {
    const [norm, high] = [bounds.clip_norm, reach(segment, bounds.clip_norm)];
    return [{ size: reports.codedSizeOf(segment), inBits: bounds.bits, low: -high, high, norm, weighted: true }];
  }
  const half = 2 ** (METRIC_BITS - 1);
  return [1, METRIC_STEP].map((step) => {
    return { size, inBits: METRIC_BITS, low: -half * step, high: (half - 1) * step, norm: 0, weighted: false };
  });
}

function noisyFixedPoint(layout: reports.ReportLayout, { bits, clip_norm: clip }: statements.SumBounds): FixedPoint {
  const means = reports.unweighted(layout).filter(({ reduction }) => reduction === "mean");
  const half = 2 ** (bits - 1);
  const step = Math.max(...means.map((segment) => reach(segment, clip))) / (half - 1);
  const size = means.reduce((sum, segment) => sum + reports.codedSizeOf(segment), 0);
  return { size, inBits: bits, low: -half * step, high: (half - 1) * step, norm: clip, weighted: true };
}

/** The greatest absolute value in a mean segment; rotated values exceed it with probability below 2^-10. */
function reach(segment: reports.Segment, clip: number): number {
  const last = segment.codecs.findLast(({ codec }) => codec !== "subsample");
  if (last?.codec !== "rotation") return clip;
  const exponent = (CLAMPED_BITS + 1 + bitLength(reports.codedSizeOf(segment))) * Math.LN2;
  return clip * Math.min(1, Math.sqrt((2 * exponent) / last.block));
}

/** What a round sums of the values of a report: sums without a range in two parts.
 *
 * With noise there are no metrics, as nothing would hide them.
 */
export function summedValues(
  layout: reports.ReportLayout,
  bounds: statements.SumBounds,
  values: reports.Float32,
): reports.Float32 {
  const noisy = bounds.noise_multiplier > 0;
  const summed = new Float32Array(fixedPoints(layout, bounds).reduce((sum, { size }) => sum + size, 0));
  let [begin, end] = [0, 0];
  for (const segment of reports.unweighted(layout)) {
    const part = values.subarray(begin, begin + reports.codedSizeOf(segment));
    begin += part.length;
    if (segment.reduction === "mean" || (segment.range !== undefined && !noisy)) {
      summed.set(part, end);
      end += part.length;
    } else if (!noisy) {
      const units = part.map((value) => Math.trunc(value / METRIC_UNIT));
      summed.set(units, end);
      summed.set(
        part.map((value, place) => value - METRIC_UNIT * units[place]!),
        end + part.length,
      );
      end += 2 * part.length;
    }
  }
  return summed;
}

/** The greatest weight of a device: 1 when all devices count equally. */
export function greatestWeight(layout: reports.ReportLayout, bounds: statements.SumBounds): number {
  return layout.weighting === "examples" ? bounds.max_examples : 1;
}

/** The name of a task in an invitation, 32 bytes. */
export function taskHash(task: string): Promise<Bytes> {
  return sha256(utf8(task));
}

/** The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one. */
export function sessionNumber(round: number, attempt: number): bigint {
  return (BigInt(round) << 32n) | BigInt(attempt);
}

/** The greatest session number of a round: a device that answered it takes part in no other attempt. */
export function lastSessionNumber(round: number): bigint {
  return sessionNumber(round, 0xffffffff);
}

/** A hash of the model, 32 bytes, that masks depend on: with another plan or checkpoint they do not cancel out. */
export function modelHash(plan: BlobRef, checkpoint: BlobRef): Promise<Bytes> {
  return sha256(concat(fromHex(plan.sha256), fromHex(checkpoint.sha256)));
}

/** The digest of a report layout, 32 bytes. With codecs it covers the task's seed, which keys them.
 *
 * The layout is compact JSON, with its members in the specification's order, as schemas list them. Ranges are covered
 * as bytes, since languages write the same number in different ways.
 */
export function layoutHash(layout: reports.ReportLayout, seed: bigint): Promise<Bytes> {
  const { segments, weighting, bounded, bits } = layout;
  const key = reports.hasCodecs(layout) ? u64(seed) : new Uint8Array();
  const listed = segments.map(({ name, size, reduction, labels, codecs }) => {
    return { name, size, reduction, labels, codecs: codecs.map((codec) => checked(codecSchema, codec, "codec")) };
  });
  const ranges = segments.map(({ range }, index) => (range === undefined ? new Uint8Array() : packed(range, index)));
  return sha256(concat(utf8(JSON.stringify({ segments: listed, weighting, bounded, bits })), key, ...ranges));
}

/** The range of a segment, with the segment's index. */
function packed({ low, high, bits }: NonNullable<reports.Segment["range"]>, index: number): Bytes {
  const ends = new DataView(new ArrayBuffer(16));
  ends.setFloat64(0, low, true);
  ends.setFloat64(8, high, true);
  return concat(u64(BigInt(index)), new Uint8Array(ends.buffer), Uint8Array.of(bits));
}
