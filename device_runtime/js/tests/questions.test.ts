/** Questions: the count of a week, and the words for a device's owner. */

import { expect, test } from "vitest";
import { NOTHING_YET } from "../src/core/kept/sessions.ts";
import { answersOf, countAnswer } from "../src/core/permission/guard.ts";
import { toldOf } from "../src/core/sessions/session.ts";
import { MemoryStore } from "./memory-store.ts";

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
