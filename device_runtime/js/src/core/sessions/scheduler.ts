/** The scheduler: it runs sessions forever, as the coordinator's retry windows and the device's own rules allow. */

import type { Outcome } from "../kept/sessions.ts";
import { keptJson, type Platform } from "../platform.ts";
import type { RetryWindow } from "../wire/messages.ts";
import { runSession, type SessionConfig } from "./session.ts";

// Faults that the owner repairs on this device. After a restart it need not wait.
const MENDED_HERE = ["bad-configuration", "invalid-examples", "state-in-use"];
// When to return if the coordinator did not say; after a report at once, as the next check-in has an answer.
const AFTER_WORK = { min_s: 0, max_s: 2 };
const MINUTES = { min_s: 60, max_s: 300 };
const HOURS = { min_s: 2 * 3600, max_s: 6 * 3600 };
// How often to check the device's own rules. Nothing is sent, so the checks need no random spread.
const OWN_RULES = { min_s: 60, max_s: 60 };
// A coordinator may name any window; a device neither returns in a busy loop nor stays away forever.
const [SHORTEST_S, LONGEST_S] = [1, 86_400];
// How often to read the clock, so as to notice that the machine slept or the clock was set.
const LONGEST_NAP_S = 60;

/** A time to return, in seconds since 1970, and the delay that was drawn. */
interface Due {
  readonly at: number;
  readonly withinS: number;
}

/** Run sessions until `stop`, each at a random time in the window that the last outcome names.
 *
 * That time is stored and honoured after a restart. While the device's own rules do not hold, they are checked every
 * minute; `tell` is called once for each reason. Throws ConfigError, and StateDamaged if nothing can be stored.
 */
export async function runForever(
  platform: Platform,
  config: SessionConfig,
  tell: (outcome: Outcome) => void,
  stop: AbortSignal,
): Promise<void> {
  const place = dueOf(config);
  let due = await keptDue(platform, place);
  let told = "";
  while (!stop.aborted) {
    due = held(due, platform.now());
    const leftS = due === null ? 0 : due.at - platform.now();
    if (leftS > 0) {
      await platform.sleep(Math.min(leftS, LONGEST_NAP_S));
      continue;
    }
    const outcome = await runSession(platform, config);
    due = await drawn(platform, place, outcome);
    const ended = `${outcome.outcome} ${outcome.reason} ${outcome.detail}`;
    if (outcome.outcome !== "not-now" || ended !== told) tell(outcome);
    told = ended;
  }
}

/** Run one session, if the stored time to return has come. Throws as `runForever`. */
export async function runIfDue(platform: Platform, config: SessionConfig): Promise<void> {
  const place = dueOf(config);
  const due = await keptDue(platform, place);
  if (due !== null && due.at > platform.now()) return;
  await drawn(platform, place, await runSession(platform, config));
}

function dueOf({ coordinator, population }: SessionConfig): string {
  return `due:${coordinator.href}:${population}`;
}

/** Draw the time to return after an outcome, and store it so that it survives a restart. */
async function drawn(platform: Platform, place: string, outcome: Outcome): Promise<Due> {
  const withinS = drawnS(outcome, Math.random());
  const due = { at: platform.now() + withinS, withinS };
  if (outcome.outcome !== "not-now" && !MENDED_HERE.includes(outcome.reason)) {
    await platform.store.write({ [place]: JSON.stringify(due) });
  }
  return due;
}

/** Seconds to stay away after an outcome; `chance` is drawn uniformly below 1. */
export function drawnS(outcome: Outcome, chance: number): number {
  const { min_s, max_s } = outcome.retry ?? defaultWindow(outcome);
  const seconds = min_s + chance * (max_s - min_s);
  return outcome.retry === null ? seconds : Math.min(Math.max(seconds, SHORTEST_S), LONGEST_S);
}

/** The window after an outcome for which the coordinator named none. */
function defaultWindow({ outcome, retryable }: Outcome): RetryWindow {
  if (outcome === "reported" || outcome === "not-needed") return AFTER_WORK;
  if (outcome === "not-now") return OWN_RULES;
  return retryable === "permanent" ? HOURS : MINUTES;
}

/** The stored time to return, which is held to the clock of now: else it would stay ahead at every start. */
async function keptDue(platform: Platform, place: string): Promise<Due | null> {
  const kept = await keptJson<Due>(platform.store, place);
  const due = held(kept, platform.now());
  if (due?.at !== kept?.at) await platform.store.write({ [place]: JSON.stringify(due) });
  return due;
}

/** The time to return, never later than when it was drawn, since the clock may have been set back. */
function held(due: Due | null, now: number): Due | null {
  return due === null ? null : { ...due, at: Math.min(due.at, now + due.withinS) };
}
