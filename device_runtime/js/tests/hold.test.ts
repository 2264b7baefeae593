/** A hold hears while a device works that its report is not wanted any more. */

import { expect, test, vi } from "vitest";
import { Refused } from "../src/core/errors.ts";
import type { Platform } from "../src/core/platform.ts";
import { Hold, type Transport } from "../src/core/protocol/transport.ts";
import type { Assignment } from "../src/core/wire/messages.ts";

test.each(["no-longer-needed", "too-stale"])("work stops once the coordinator says %s", async (reason) => {
  const refused = new Refused(410, reason, "", { retry: null, afterS: 0, theirTime: null });
  const transport = { spokeAt: -Infinity, hold: () => Promise.reject(refused) } as unknown as Transport;
  let now = 0;
  const sleep = async (seconds: number) => {
    now += seconds;
  };
  const platform = { now: () => now, sleep } as unknown as Platform;
  const hold = new Hold(platform, transport, { assignment: "a", lost_after_s: 5 } as Assignment);
  await vi.waitFor(() => expect(() => hold.check()).toThrow(refused));
  hold.end();
});

test("a hold is opened again soon though the clock is set back", async () => {
  const [held, slept] = [[] as number[], [] as number[]];
  let now = 1e9;
  const open = async () => {
    now -= 1e8;
    held.push(now);
  };
  const transport = { spokeAt: now, hold: open } as unknown as Transport;
  const sleep = async (seconds: number) => {
    slept.push(seconds);
    now += seconds;
    if (slept.length >= 5) await new Promise(() => {}); // this is enough
  };
  const platform = { now: () => now, sleep } as unknown as Platform;
  const hold = new Hold(platform, transport, { assignment: "a", lost_after_s: 5 } as Assignment);
  await vi.waitFor(() => expect(slept).toHaveLength(5));
  hold.end();
  expect(Math.max(...slept)).toBeLessThanOrEqual(1);
  expect(held).toHaveLength(4);
});
