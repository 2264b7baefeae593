/** The scheduler of sessions: for ever, as the coordinator's retry windows and the device's own rules allow. */

import type { Outcome } from "./outcome.ts";
import { keptJson, type Platform } from "./platform.ts";
import { runSession, type SessionConfig } from "./session.ts";
import type { RetryWindow } from "./wire/messages.ts";

// Faults that are mended on this device. After a restart it need not wait.
const MENDED_HERE = ["bad-configuration", "invalid-examples", "state-in-use"];
// When to come back where the coordinator did not say; after a report at once, as it says so at the next check-in.
const AFTER_WORK = { min_s: 0, max_s: 2 };
const MINUTES = { min_s: 60, max_s: 300 };
const HOURS = { min_s: 2 * 3600, max_s: 6 * 3600 };
// How often to look whether the device's own rules hold. Nothing is sent, so nobody needs these spread.
const OWN_RULES = { min_s: 60, max_s: 60 };
// A coordinator may name any window; a device neither comes back in a busy loop nor stays away for ever.
const [SHORTEST_S, LONGEST_S] = [1, 86_400];
// The clock is looked at this often: a machine that slept, or a clock that was set, shows.
const LONGEST_NAP_S = 60;

/** A time to come back, in seconds since 1970, and how long that was when it was drawn. */
interface Due {
  readonly at: number;
  readonly withinS: number;
}

/** Run sessions until `stop`: each comes at a random time in the window that the last one's outcome names.
 *
 * That time is kept in the store and honoured after a restart. While the device's own rules do not hold, they are looked
 * at every minute; `tell` hears of each reason once. Throws ConfigError, and StateDamaged where nothing can be kept.
 */
export async function runForever(
  platform: Platform,
  config: SessionConfig,
  tell: (outcome: Outcome) => void,
  stop: AbortSignal,
): Promise<void> {
  const place = dueOf(config);
  let due = await keptJson<Due>(platform.store, place);
  let told = "";
  while (!stop.aborted) {
    const leftS = remainingS(due, platform.now());
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

/** Run one session, if the kept time to come back has come. Throws as `runForever`. */
export async function runIfDue(platform: Platform, config: SessionConfig): Promise<void> {
  const place = dueOf(config);
  if (remainingS(await keptJson<Due>(platform.store, place), platform.now()) > 0) return;
  await drawn(platform, place, await runSession(platform, config));
}

function dueOf({ coordinator, population }: SessionConfig): string {
  return `due:${coordinator.href}:${population}`;
}

/** Draw when to come back after an outcome, and keep that where a restart changes nothing. */
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

/** When to come back after an outcome for which the coordinator named none. */
function defaultWindow({ outcome, retryable }: Outcome): RetryWindow {
  if (outcome === "reported" || outcome === "not-needed") return AFTER_WORK;
  if (outcome === "not-now") return OWN_RULES;
  return retryable === "permanent" ? HOURS : MINUTES;
}

/** Seconds until then, and never more than when it was drawn: a clock may have been set back. */
function remainingS(due: Due | null, now: number): number {
  return due === null ? 0 : Math.min(due.at - now, due.withinS);
}
