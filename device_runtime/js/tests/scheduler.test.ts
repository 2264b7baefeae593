/** The scheduler: when a device comes back, also after a restart. */

import { expect, test } from "vitest";
import { NOTHING_YET, type Outcome } from "../src/core/kept/sessions.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import type { Platform } from "../src/core/platform.ts";
import { drawnS, runForever, runIfDue } from "../src/core/sessions/scheduler.ts";
import type { SessionConfig } from "../src/core/sessions/session.ts";
import { MemoryStore } from "./memory-store.ts";

const policy = policyOf({ require_https: true }); // so that no session calls anybody
const config: SessionConfig = { coordinator: new URL("http://127.0.0.1:1"), population: "p", policy, waitS: 1 };

test.each<[string, Partial<Outcome>, number, number]>([
  ["a report", { outcome: "reported" }, 0, 2],
  ["a round that ended first", { outcome: "not-needed" }, 0, 2],
  ["a failure that may pass", { outcome: "failed", retryable: "transient" }, 60, 300],
  ["a failure that stays", { outcome: "failed", retryable: "permanent" }, 7200, 21_600],
  ["rules of its own", { outcome: "not-now" }, 60, 60],
  ["a window of the coordinator's", { outcome: "rejected", retry: { min_s: 5, max_s: 30 } }, 5, 30],
  ["a window without time", { outcome: "rejected", retry: { min_s: 0, max_s: 0 } }, 1, 1],
  ["a window of years", { outcome: "rejected", retry: { min_s: 1e9, max_s: 1e9 } }, 86_400, 86_400],
])("after %s a device comes back in its window", (_, facts, least, most) => {
  expect([0, 1].map((chance) => drawnS({ ...NOTHING_YET, ...facts }, chance))).toEqual([least, most]);
});

test("rules that do not hold are looked at every minute and told once", async () => {
  const found = await ran(new MemoryStore(), 4);
  expect(found).toEqual({ slept: [60, 60, 60, 60], told: ["not-now"] });
});

test("a time to come back is honoured after a restart, but not longer than it was", async () => {
  const [store, place] = [new MemoryStore(), "due:http://127.0.0.1:1/:p"];
  await store.write({ [place]: JSON.stringify({ at: 1090, withinS: 100 }) });
  expect((await ran(store, 3)).slept).toEqual([60, 30, 60]);
  await store.write({ [place]: JSON.stringify({ at: 1e9, withinS: 45 }) }); // the clock was set back
  expect((await ran(store, 2)).slept).toEqual([45, 60]); // then a session, after which it looks at its rules again
});

test("a device that is woken comes back in time though the clock was ahead when its time was drawn", async () => {
  const [store, place] = [new MemoryStore(), "due:http://127.0.0.1:1/:p"];
  await store.write({ [place]: JSON.stringify({ at: 1e9, withinS: 45 }) });
  const ranAt = async (now: number) => {
    await runIfDue({ store, now: () => now } as unknown as Platform, config);
    return (await store.get("journal")) !== null;
  };
  expect(await ranAt(1000)).toBe(false);
  expect(await ranAt(1044)).toBe(false);
  expect(await ranAt(1046)).toBe(true);
});

/** What came of a device that is stopped at its nth sleep, from second 1000 on. */
async function ran(store: MemoryStore, sleeps: number) {
  const [stop, slept, told] = [new AbortController(), [] as number[], [] as string[]];
  let now = 1000;
  const sleep = async (seconds: number) => {
    slept.push(seconds);
    now += seconds;
    if (slept.length === sleeps) stop.abort();
  };
  const platform = { store, now: () => now, sleep } as unknown as Platform;
  await runForever(platform, config, ({ outcome }) => told.push(outcome), stop.signal);
  return { slept, told };
}
