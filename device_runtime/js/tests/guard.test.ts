/** The guard: what a day's use is worth when the clock was wrong. */

import { expect, test } from "vitest";
import { Guard } from "../src/core/permission/guard.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import type { Platform } from "../src/core/platform.ts";
import { MemoryStore } from "./memory-store.ts";

const DAY_S = 86_400;
const policy = policyOf({ per_day: { sessions: 1 } });
const place = { coordinator: new URL("http://127.0.0.1:1"), population: "p", policy };

test("the use of a day counts for a day by a clock that goes back, no less and no more", async () => {
  const store = new MemoryStore();
  const at = (now: number) => Guard.of({ store, now: () => now } as unknown as Platform, place, { up: 0, down: 0 });
  await store.write({ answers: "[]" });
  await (await at(1e9 + 60 * DAY_S)).spend(1); // the clock is two months ahead
  const refused = /per_day.sessions/;
  for (const later of [0, DAY_S - 1]) {
    const guard = await at(1e9 + later);
    expect(() => guard.checkIn()).toThrow(refused);
  }
  (await at(1e9 + DAY_S)).checkIn();
});
