/** Releases of models: this device's demands on one before it fetches what it names. Spec: docs/spec/plan.md §11. */

import { FormatError, ModelRefused, PlanRefused } from "../errors.ts";
import type { Platform } from "../platform.ts";
import { type ModelRelease, type Signed, verifiedModelRelease } from "../release.ts";
import type { Policy } from "./policy.ts";

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
export async function signedRelease({ signers }: Policy, signed: Signed): Promise<ModelRelease> {
  if (signers.length > 0 && !signers.includes(signed.signer)) {
    throw new ModelRefused("against signers of this device's policy: it does not name who signed the model release");
  }
  try {
    return await verifiedModelRelease(signed);
  } catch (error) {
    throw error instanceof FormatError ? new ModelRefused(error.message) : error;
  }
}

/** Check a release for the model `name` of a population, and remember its counter. Throws ModelRefused. */
export async function checkModelRelease(
  { store, now }: Platform,
  release: ModelRelease,
  signer: string,
  population: string,
  name: string,
): Promise<void> {
  const place = `model-released:${signer}:${population}:${name}`;
  const seen = Number((await store.get(place)) ?? 0);
  demand(release.population === population, `it is for population ${release.population}`);
  demand(release.name === name, `it is for model ${release.name}`);
  demand(release.expires_at === undefined || release.expires_at > now(), "it has expired");
  demand(release.counter >= seen, `its counter is ${release.counter}; this device has seen ${seen}`);
  await store.write({ [place]: String(release.counter) });
}

function demand(holds: boolean, why: string): void {
  if (!holds) throw new ModelRefused(`the model release is refused: ${why}`);
}
