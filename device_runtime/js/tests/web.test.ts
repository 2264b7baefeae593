/** The pure parts of the device in a browser: which examples stay, when it may work, and what a person reads. */

import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { ending, entry, size } from "../page/words.ts";
import * as errors from "../src/core/errors.ts";
import { NOTHING_YET, sessionsIn, writeJournal } from "../src/core/kept/sessions.ts";
import { UNKNOWN } from "../src/core/platform.ts";
import { allowed, unmetered } from "../src/web/conditions.ts";
import { heldTo, retained } from "../src/web/examples.ts";
import { MemoryStore } from "./memory-store.ts";

const at = (collection: string, time: number) => ({ collection, at: time, fields: {} });

test("the newest examples of a collection stay, and none that is too old", () => {
  const all = [at("a", 0), at("a", 50), at("b", 60), at("a", 70), at("a", 80)];
  expect(retained(all, { maxAgeS: 40, most: 2 }, 100)).toEqual([false, false, true, true, true]);
  expect(retained(all, { maxAgeS: 1000, most: 3 }, 100)).toEqual([false, true, true, true, true]);
});

test("an example of the future is of now from when it is seen, unless the clock was reset", () => {
  const now = 1.8e9;
  const all = [at("a", now + 1e9), at("a", now - 5)];
  const held = heldTo(all, now);
  expect(held.map((one) => one.at)).toEqual([now, now - 5]);
  expect(retained(held, { maxAgeS: 40, most: 2 }, now + 41)).toEqual([false, false]);
  expect(heldTo(all, 100)).toEqual(all);
});

test.each([
  [{ saveData: true, type: "wifi" }, false],
  [{ type: "cellular" }, false],
  [{ type: "ethernet" }, true],
  [{ type: "unknown" }, null],
  [undefined, null],
])("a network that says %o is unmetered: %s", (network, expected) => {
  expect(unmetered(network)).toBe(expected);
});

test("what the owner forbids is forbidden only where it is known to be so", () => {
  const strict = { onBattery: false, onMetered: false };
  const lax = { onBattery: true, onMetered: true };
  for (const now of [{ charging: false }, { unmetered: false }]) {
    expect(() => allowed({ ...UNKNOWN, ...now }, strict)).toThrow(errors.PolicyForbids);
    expect(allowed({ ...UNKNOWN, ...now }, lax)).toMatchObject(now);
  }
  expect(allowed(UNKNOWN, strict)).toBe(UNKNOWN);
});

test("a person reads how a session ended in a sentence", () => {
  const reported = { ...NOTHING_YET, outcome: "reported", round: 3, examples: 1, secure: true } as const;
  expect(ending({ outcome: reported })).toEqual({
    text: "Done: round 3, 1 example, masked: only the sum over many devices can be read.",
    kind: "good",
  });
  const failed = { ...NOTHING_YET, reason: "unreachable", detail: "no network" };
  expect(ending({ outcome: failed })).toEqual({
    text: "The coordinator cannot be reached: no network. It tries again by itself.",
    kind: "bad",
  });
  const stopped = { reason: "state-in-use", detail: "" };
  expect(ending({ stopped })).toEqual({ text: "Another page of this site takes part already.", kind: "bad" });
  const unknown = { reason: "constructor", detail: "" };
  expect(ending({ stopped: unknown }).text).toBe("The coordinator refused it (constructor).");
});

test("every reason of a device and of a coordinator has words of its own", () => {
  const spec = readFileSync(new URL("../../../docs/spec/wire.md", import.meta.url), "utf-8");
  const tables = /\| reason \|.*?\n\n.*\| abort reason \|.*?\n\n/s.exec(spec)![0];
  const named = [...tables.matchAll(/^\| `([a-z-]+)` \|/gm)].map(([, reason]) => reason!);
  const own = Object.values(errors)
    .filter((One) => One.length <= 1)
    .map((One) => new (One as new (words: string) => { reason?: string })("").reason)
    .filter((reason) => reason !== undefined); // an abstract one has none
  expect(named.length).toBeGreaterThan(15);
  const refusals = ["device-revoked", "not-attested", "too-many-requests", "unavailable", "unknown-population"];
  for (const one of refusals) expect(spec).toContain(`\n| \`${one}\` | `);
  const without = [...named, ...own, ...refusals].filter((reason) => {
    return ending({ stopped: { reason, detail: "" } }).text.startsWith("The coordinator refused it");
  });
  expect(without).toEqual([]);
});

test("an entry of the journal says what was sent, in which round", () => {
  const one = { ...NOTHING_YET, at: 0, outcome: "reported", task: "0123456789", round: 2, examples: 5 } as const;
  const [, what, sent] = entry({ ...one, bytes_up: 1500 });
  expect(what).toBe("A report on 5 examples, in the clear: the coordinator can read it. Round 2 of task 01234567.");
  expect(entry({ ...one, target: "region = eu" })[1]).toMatch(/ of task 01234567, for devices with region = eu\.$/);
  expect([sent, size(12), size(2_500_000)]).toEqual(["1.5 kB", "12 bytes", "2.5 MB"]);
});

test("what belongs to a model and to no session is no entry of the journal", async () => {
  const store = new MemoryStore();
  expect(await sessionsIn(store)).toEqual([]);
  for (const outcome of ["model-refused", "personal-dropped"] as const) {
    await writeJournal(store, { at: 1, outcome, detail: "model keyboard" });
  }
  const personal = { ...NOTHING_YET, task: "model keyboard", bytes_up: 9 };
  await writeJournal(store, { at: 2, ...personal, outcome: "personalised" });
  await writeJournal(store, { at: 3, ...personal });
  await writeJournal(store, { at: 4, ...NOTHING_YET, outcome: "reported", task: "01" });
  expect((await sessionsIn(store)).map(({ at }) => at)).toEqual([4]);
});
