/** What a device keeps: its assignment, the models of its apps, and the use that its owner limits. */

import { expect, test } from "vitest";
import { utf8 } from "../src/core/bytes.ts";
import { StateDamaged } from "../src/core/errors.ts";
import { ModelKeeper, statedVersions } from "../src/core/kept/models.ts";
import { AssignmentKeeper, NOTHING_YET } from "../src/core/kept/sessions.ts";
import { answersOf, countAnswer, Guard } from "../src/core/permission/guard.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import type { Platform } from "../src/core/platform.ts";
import { toldOf } from "../src/core/sessions/session.ts";
import { type Assignment, decodeAnswer } from "../src/core/wire/messages.ts";
import { MemoryStore } from "./memory-store.ts";
import { vectors } from "./vectors.ts";

const [text] = vectors("device.json").messages.good.assignment;
const given = decodeAnswer("assignment", utf8(text)) as Assignment;
const work = { report: Uint8Array.of(1, 2, 255), collection: "typed", examples: 3, steps: 4, question: null };
const kept = { given, due: 1.5, phase: "trained", ...work } as const;

const coordinator = new URL("http://127.0.0.1:1");

test("a kept assignment has its wide integers and bytes, and is of one population", async () => {
  const store = new MemoryStore();
  const [keeper, other] = ["p", "q"].map((population) => new AssignmentKeeper(store, { coordinator, population }));
  expect(await keeper!.get()).toBeNull();
  await keeper!.keep(kept);
  expect(await keeper!.get()).toEqual(kept);
  expect(await other!.get()).toBeNull();
  await keeper!.drop();
  expect(await keeper!.get()).toBeNull();
});

test("a kept assignment that was damaged is an error once", async () => {
  const [store, place] = [new MemoryStore(), "assignment:http://127.0.0.1:1/:p"];
  const keeper = new AssignmentKeeper(store, { coordinator, population: "p" });
  await keeper.keep(kept);
  await store.write({ [place]: ((await store.get(place)) ?? "").replace("trained", "trainee") });
  await expect(keeper.get()).rejects.toThrow(StateDamaged);
  expect(await keeper.get()).toBeNull();
});

function version(number: number) {
  return { signed: { text: JSON.stringify({ number }), signer: "ed25519:a", value: "b" }, blobs: [] };
}

test("trials are counted for each version, whatever becomes of the others", async () => {
  const keeper = new ModelKeeper(new MemoryStore(), { coordinator, population: "phones" }, "keyboard");
  await keeper.count("a", 1);
  await keeper.fetch(version(2));
  await keeper.count("b", 1);
  await keeper.refuse({ signed: version(1).signed, engine: "onnxruntime-node", why: "it is bad", final: true });
  await keeper.fetch(version(3));
  await keeper.take();
  expect([await keeper.trials("a"), await keeper.trials("b"), await keeper.trials("c")]).toEqual([1, 1, 0]);
  await keeper.count("a", 0);
  for (let other = 0; other < 16; other++) await keeper.count(`${other}`, 1);
  expect([await keeper.trials("a"), await keeper.trials("b"), await keeper.trials("0")]).toEqual([0, 0, 1]);
});

test("a population states its own models alone, whatever others are called", async () => {
  const store = new MemoryStore();
  for (const [population, number] of [
    ["phones", 1],
    ["phones of friends", 2],
  ] as const) {
    const keeper = new ModelKeeper(store, { coordinator, population }, "keyboard");
    await keeper.fetch(version(number));
    await keeper.take();
    const { signed } = version(number + 2);
    await keeper.refuse({ signed, engine: "onnxruntime-node", why: "it is bad", final: true });
  }
  const stated = { models: { keyboard: 1 }, refused: { keyboard: 3 } };
  expect(await statedVersions(store, { coordinator, population: "phones" })).toEqual(stated);
  expect(await statedVersions(store, { coordinator, population: "phones of" })).toEqual({});
});

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

const WEEK_S = 7 * 86_400;

test("the count of a week survives a clock that goes back", async () => {
  const store = new MemoryStore();
  const at = (time: number) => ({ store, now: () => time });
  await countAnswer(at(1e9));
  await countAnswer(at(1e9 + 10));
  expect(await answersOf(at(1e9 + WEEK_S - 1))).toHaveLength(2);
  expect(await answersOf(at(1e9 - 60 * WEEK_S))).toHaveLength(2);
  expect(await answersOf(at(1e9 - 59 * WEEK_S - 1))).toHaveLength(2);
  expect(await answersOf(at(1e9 - 59 * WEEK_S))).toHaveLength(0);
});

test("the owner is told what became of a question", () => {
  const asked = { ...NOTHING_YET, question: "SELECT COUNT(*)" };
  const refused = { ...asked, reason: "plan-refused", detail: "against questions.allowed of this device's policy: x" };
  const by = "https://fl.example";
  expect(toldOf(NOTHING_YET, by)).toBe("");
  expect(toldOf({ ...asked, outcome: "reported", numbers: 1200, secure: true }, by)).toBe(
    "answered a question: SELECT COUNT(*); sent 1,200 numbers, masked",
  );
  expect(toldOf({ ...asked, outcome: "reported", numbers: 1 }, by)).toMatch(/sent 1 numbers, in the clear$/);
  expect(toldOf(refused, by)).toBe(
    "was asked: SELECT COUNT(*), by https://fl.example; refused because it is against questions.allowed of this " +
      "device's policy: x",
  );
  expect(toldOf({ ...asked, reason: "too-few-examples" }, by)).toMatch(/; not answered because too-few-examples$/);
  expect(toldOf({ ...asked, reason: "unavailable", numbers: 5 }, by)).toMatch(
    /^made an answer to: SELECT COUNT\(\*\), by https:\/\/fl.example; not counted because unavailable$/,
  );
});
