/** Questions: the answers of the last week, for a policy's limit, and what the journal says of a question. */

import type { Outcome } from "./outcome.ts";
import type { Plan } from "./plan.ts";
import { keptJson, type Platform } from "./platform.ts";
import { visible } from "./visible.ts";

const WEEK_S = 7 * 86_400;
const PLACE = "answers";

/** The times of the answers of the last seven days, in seconds since 1970. Throws StateDamaged.
 *
 * A clock that goes back gives none of them back: an answer of the future counts for a week from now on.
 */
export async function answersOf({ store, now }: Pick<Platform, "store" | "now">): Promise<readonly number[]> {
  const [at, kept] = [now(), (await keptJson<number[]>(store, PLACE)) ?? []];
  const recent = kept.filter((one) => at - one < WEEK_S).map((one) => Math.min(one, at));
  if (recent.join() !== kept.join()) await store.write({ [PLACE]: JSON.stringify(recent) });
  return recent;
}

/** Count one more answer, before anything of it is sent. */
export async function countAnswer(platform: Pick<Platform, "store" | "now">): Promise<void> {
  const answers = [...(await answersOf(platform)), platform.now()];
  await platform.store.write({ [PLACE]: JSON.stringify(answers) });
}

/** What a plan asks, as its owner sees it: one line; null where it asks nothing. */
export function shownQuestion({ question }: Plan): string | null {
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
