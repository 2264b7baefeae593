/** The training of a personal model: a version's plan, its examples and graphs, under the owner's limits. */

import type { Bytes } from "./bytes.ts";
import { decodeFrozen, decodeVectors } from "./checkpoint.ts";
import { Graph } from "./engine.ts";
import { checkExamples } from "./examples.ts";
import type { Guard } from "./permission/guard.ts";
import { divided, localGraphs, type Measured, personalise } from "./personal.ts";
import { type BlobRef, type Plan, parameterCount } from "./plan.ts";
import type { Platform } from "./platform.ts";
import type { ModelRelease } from "./release.ts";
import { tokenized } from "./texts.ts";

/** Of the order of examples: the same examples give the same model, so nobody tries until chance says that one helps. */
const KEY = { seed: 0n, round: 0, slot: 0n, secret: new Uint8Array() };

/** What became of a personal model.
 *
 * version: the released one that it was made from. before, after: the mean loss on the `leftOut` examples, at the
 * released and at the personal parameters, which were trained on `examples`. kept: whether the personal ones are used
 * from now on; else the released ones are.
 */
export interface Personalised {
  readonly version: number;
  readonly before: number;
  readonly after: number;
  readonly examples: number;
  readonly leftOut: number;
  readonly kept: boolean;
}

/** What a training needs. moved: bytes of this visit. mine: a blob of the version. fetch: a graph. keep: notes graphs that
 * stay. keepGoing: asked between steps.
 */
interface Means {
  readonly platform: Platform;
  readonly guard: Guard;
  readonly moved: number;
  readonly mine: (ref: BlobRef) => Promise<Bytes>;
  readonly fetch: (ref: BlobRef) => Promise<Bytes>;
  readonly keep: (refs: readonly BlobRef[]) => Promise<void>;
  readonly keepGoing: () => boolean;
}

/** The local steps of a version's plan, measured, with the numbers of examples trained on and left out. */
export async function trained(
  release: ModelRelease,
  plan: Plan,
  { platform, guard, moved, mine, fetch, keep, keepGoing }: Means,
): Promise<Measured & { readonly examples: number; readonly leftOut: number }> {
  const { engine, examples: source } = platform;
  const { collection } = plan.examples;
  const refs = localGraphs(plan);
  const count = (await source.counts()).get(collection) ?? 0;
  guard.checkPlan({ plan: release.plan, checkpoint: release.parameters }, plan, count, moved);
  const { examples: all } = await tokenized(plan, await source.load(collection), mine, keepGoing);
  checkExamples(plan, all);
  const [examples, leftOut] = await divided(plan, all);
  const broadcast = decodeVectors(await mine(release.parameters), [{ name: "params", size: parameterCount(plan) }]);
  const frozen = plan.frozen === null ? new Map() : decodeFrozen(await mine(plan.frozen.blob), plan.frozen.vectors);
  const graphs = new Map<string, Graph>();
  try {
    for (const [name, ref] of refs) graphs.set(name, await Graph.load(engine, await fetch(ref), name));
    await keep([...refs.values()]);
    const work = { engine, plan, graphs, broadcast, frozen, examples, key: KEY, keepGoing };
    return { ...(await personalise(work, leftOut)), examples: examples.count, leftOut: leftOut.count };
  } finally {
    for (const graph of graphs.values()) await graph.release();
  }
}
