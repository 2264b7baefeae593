/** An assignment that is kept comes back as it was, and damage is told and forgotten. */

import { expect, test } from "vitest";
import { utf8 } from "../src/core/bytes.ts";
import { StateDamaged } from "../src/core/errors.ts";
import { AssignmentKeeper } from "../src/core/kept/sessions.ts";
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
