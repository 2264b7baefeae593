/** Releases: this device's demands on a secure round before it trains, and on a model before it fetches what that names.
 *
 * Of a round, a key that the owner's policy names must have released the plan, its first checkpoint and the parameters of
 * sums. Every later checkpoint must descend from the first, and a model that is evaluated be that of such a checkpoint. The
 * store remembers releases, so that none can be rolled back. Spec: docs/spec/plan.md §9 to §11.
 */

import { equal, fromHex, utf8 } from "../bytes.ts";
import { FormatError, ModelRefused, PlanRefused } from "../errors.ts";
import { vectorDigest } from "../plans/checkpoint.ts";
import type { Float32 } from "../plans/report.ts";
import { keptJson, type Platform } from "../platform.ts";
import { climb, depth } from "../secagg/roster.ts";
import type { Assignment } from "../wire/messages.ts";
import * as statements from "../wire/statements.ts";
import { breaking, type Place, type Policy, refused } from "./policy.ts";

const LOG = "require_release_log";

/** The release of a secure round, with its digest and the lineage entry of the assignment. */
interface Shown {
  readonly release: statements.Release;
  readonly signed: statements.Signed;
  readonly digest: string;
  readonly entry: statements.LineageEntry | null;
}

/** Check an assignment of a secure round against its release, and remember the release and the checkpoint.
 *
 * again: an earlier session accepted it, so that a newer head of the log may have been shown since. Throws PlanRefused,
 * which names the broken rule.
 */
export async function checkRelease(
  { store, now }: Platform,
  { policy, population }: Place,
  given: Assignment,
  again: boolean,
): Promise<void> {
  const shown = await readRelease(policy, given);
  const { release, signed, digest, entry } = shown;
  const counterPlace = `released:${signed.signer}:${population}`;
  const seen = Number((await store.get(counterPlace)) ?? 0);
  demand(release.population === population, "release", `it is for population ${release.population}`);
  const plan = given.plan.sha256;
  const evaluates = statements.evaluationBy(release, plan) !== null;
  demand(release.plan === plan || evaluates, "release", "it is for another plan");
  demand(release.expires_at > now(), "release", "it has expired");
  demand(release.counter >= seen, "release", `its counter is ${release.counter}; this device has seen ${seen}`);
  const [promised, least] = [statements.boundsOf(release, plan).noise_multiplier, policy.min_noise_multiplier];
  demand(
    promised >= least,
    "min_noise_multiplier",
    `devices would add noise of ${promised}, the least allowed is ${least}`,
  );
  const entryPlace = `lineage:${digest}`;
  const last = await keptJson<statements.LineageEntry>(store, entryPlace);
  (evaluates ? checkEvaluated : checkCheckpoint)(given, shown, last);
  const changes: Record<string, string> = { [counterPlace]: String(release.counter) };
  if (entry !== null && entry.round > (last?.round ?? 0)) {
    changes[entryPlace] = JSON.stringify(entry);
  }
  if (policy.require_release_log) {
    const head = await provenHead(release, signed, given);
    const headPlace = `log:${release.lineage}`;
    if (!again) {
      const last = (await keptJson<statements.TreeHead>(store, headPlace)) ?? head;
      const grew = head.size > last.size || (head.size === last.size && head.root === last.root);
      demand(grew, LOG, `the head of ${head.size} contradicts one of ${last.size} that was shown before`);
      changes[headPlace] = JSON.stringify(head);
    }
  }
  await store.write(changes);
}

async function readRelease(policy: Policy, given: Assignment): Promise<Shown> {
  const signed = given.release;
  if (signed === null) {
    throw refused("signers", "the secure round has no signed release");
  }
  demand(
    policy.signers.includes(signed.signer),
    "signers",
    `the release is signed by ${signed.signer}, which it does not name`,
  );
  const entry =
    given.lineage === null ? null : await statements.verifiedEntry(given.lineage).catch(breaking("signers"));
  const release = await statements.verifiedRelease(signed).catch(breaking("signers"));
  return { release, signed, digest: await statements.digestOf(signed), entry };
}

function checkCheckpoint(given: Assignment, shown: Shown, last: statements.LineageEntry | null): void {
  const [rule, { release, entry }] = ["lineage", shown];
  if (entry === null) {
    const first = given.checkpoint.sha256 === release.checkpoint;
    demand(first, rule, "the checkpoint is not the release's, and no signed entry comes with it");
    demand(given.round === 1, rule, `no signed entry comes with the checkpoint of round ${given.round}`);
    demand(last === null, rule, `the first checkpoint comes again after that of round ${last?.round}`);
    return;
  }
  const fits = entry.checkpoint === given.checkpoint.sha256;
  demand(fits, rule, "the signed entry is for another checkpoint");
  const inTurn = entry.round === given.round - 1 && entry.round >= 1;
  demand(inTurn, rule, `the checkpoint of round ${entry.round} comes in round ${given.round}`);
  const older = last !== null && entry.round < last.round;
  demand(!older, rule, `the checkpoint of round ${entry.round} comes after that of ${last?.round}`);
  checkEntry(given, shown, entry, last);
}

function checkEvaluated(given: Assignment, shown: Shown, last: statements.LineageEntry | null): void {
  const [rule, { entry }] = ["lineage", shown];
  if (entry === null) throw refused(rule, "no signed entry comes with the model that is evaluated");
  const names = entry.params !== undefined && entry.round >= 1;
  demand(names, rule, `the signed entry of round ${entry.round} names no model to evaluate`);
  demand(given.round === 1, rule, `an evaluation of the release has one round, and this is round ${given.round}`);
  checkEntry(given, shown, entry, last);
}

/** Refuse unless an entry belongs to the release, and to the last entry that this device was shown. */
function checkEntry(
  given: Assignment,
  shown: Shown,
  entry: statements.LineageEntry,
  last: statements.LineageEntry | null,
): void {
  const { release, digest } = shown;
  const rule = "lineage";
  demand(given.lineage?.signer === release.lineage, rule, "the checkpoint is not signed by the release's key");
  demand(entry.release === digest, rule, "the signed entry is for another release");
  const descends = entry.round > 1 || entry.parent === release.checkpoint;
  demand(descends, rule, "the checkpoint of round 1 does not descend from the release's");
  if (last !== null) {
    entry.round < last.round ? checkDescent(entry, last) : checkDescent(last, entry);
  }
}

/** Refuse unless two entries are the same, or the checkpoint of the later can follow the other's. */
function checkDescent(before: statements.LineageEntry, after: statements.LineageEntry): void {
  const same =
    after.parent === before.parent && after.checkpoint === before.checkpoint && after.params === before.params;
  const follows = after.round !== before.round + 1 || after.parent === before.checkpoint;
  demand(after.round !== before.round || same, "lineage", `two checkpoints of round ${after.round} are signed`);
  demand(follows, "lineage", `the checkpoint of round ${after.round} does not descend from that of ${before.round}`);
}

/** Check the vectors of a secure assignment that was checked: the model that its entry names, if any, and the constants
 * of an evaluation.
 *
 * Who trains checks it too: else the entry of a round could name any model to those who evaluate. Throws PlanRefused.
 */
export async function checkModel(
  { secagg, release: signed, lineage, plan }: Assignment,
  received: ReadonlyMap<string, Float32>,
): Promise<void> {
  if (secagg === null || signed === null || lineage === null) return;
  const evaluation = statements.evaluationBy(await statements.verifiedRelease(signed), plan.sha256);
  const entry = await statements.verifiedEntry(lineage);
  const named = new Map([...Object.entries(evaluation?.constants ?? {}), ["params", entry.params]]);
  for (const [name, vector] of received) {
    if (evaluation === null && (name !== "params" || entry.params === undefined)) continue;
    const origin = name === "params" ? `the model of round ${entry.round}` : "the released one";
    const same = named.get(name) === (await vectorDigest(vector));
    demand(same, "lineage", `the vector ${name} of the checkpoint is not ${origin}`);
  }
}

/** The head of a log that holds the release. */
async function provenHead(
  release: statements.Release,
  signed: statements.Signed,
  { log }: Assignment,
): Promise<statements.TreeHead> {
  if (log === null || log.head.signer !== release.lineage) {
    throw refused(LOG, "no head that the release's lineage key signed comes with it");
  }
  const head = await statements.verifiedHead(log.head).catch(breaking(LOG));
  const leaf = utf8(`${signed.signer}\n${signed.text}`);
  const fits = log.position < head.size && log.path.length === 32 * depth(head.size);
  const leads = fits && equal(await climb(leaf, log.position, log.path), fromHex(head.root));
  demand(leads, LOG, "the proof does not lead from the release to the head");
  return head;
}

function demand(holds: boolean, rule: string, why: string): void {
  if (!holds) throw refused(rule, why);
}

/** A refusal by limits of the policy, which its owner may change. */
export class AgainstLimits extends ModelRefused {}

/** Make a check of the policy's limits. Throws AgainstLimits. */
export function withinLimits(check: () => void): void {
  try {
    check();
  } catch (error) {
    throw error instanceof PlanRefused ? new AgainstLimits(error.message) : error;
  }
}

/** The release, if a key that the policy names signed it; any key if it names none, as for plans of plain rounds.
 *
 * Throws ModelRefused.
 */
export async function signedRelease({ signers }: Policy, signed: statements.Signed): Promise<statements.ModelRelease> {
  if (signers.length > 0 && !signers.includes(signed.signer)) {
    throw new ModelRefused("against signers of this device's policy: it does not name who signed the model release");
  }
  try {
    return await statements.verifiedModelRelease(signed);
  } catch (error) {
    throw error instanceof FormatError ? new ModelRefused(error.message) : error;
  }
}

/** Check a release for the model `name` of a population, and remember its counter. Throws ModelRefused. */
export async function checkModelRelease(
  { store, now }: Platform,
  release: statements.ModelRelease,
  signer: string,
  population: string,
  name: string,
): Promise<void> {
  const place = `model-released:${signer}:${population}:${name}`;
  const seen = Number((await store.get(place)) ?? 0);
  demandModel(release.population === population, `it is for population ${release.population}`);
  demandModel(release.name === name, `it is for model ${release.name}`);
  demandModel(release.expires_at === undefined || release.expires_at > now(), "it has expired");
  demandModel(release.counter >= seen, `its counter is ${release.counter}; this device has seen ${seen}`);
  await store.write({ [place]: String(release.counter) });
}

function demandModel(holds: boolean, why: string): void {
  if (!holds) throw new ModelRefused(`the model release is refused: ${why}`);
}
