/** Damaged bytes: every decoder refuses them with the error that it promises, or reads them as what they now are. */

import { expect, test } from "vitest";
import { type Bytes, fromHex, utf8 } from "../src/core/bytes.ts";
import { decodeVectors } from "../src/core/checkpoint.ts";
import { FormatError, PlanRefused } from "../src/core/errors.ts";
import { checkGraph } from "../src/core/onnx-check.ts";
import { philox } from "../src/core/philox.ts";
import { decodePlan } from "../src/core/plan.ts";
import { decodeState } from "../src/core/secagg/client-state.ts";
import { SecaggError } from "../src/core/secagg/errors.ts";
import { decodeRoster } from "../src/core/secagg/roster.ts";
import { decodeAnswer } from "../src/core/wire/messages.ts";
import { vectors } from "./vectors.ts";

const TIMES = Number(process.env["MUSTER_FUZZ"] ?? 300);
const PATIENCE_MS = 600_000;
const device = vectors("device.json");
const session = vectors("secagg/transcript.json");
const checkpoint = device.checkpoints[3];
const specs = Object.entries<number[]>(checkpoint.vectors).map(([name, one]) => ({ name, size: one.length }));

/** Bytes with up to four changed, some cut off, or some twice: the same in every run. */
function damaged(data: Bytes, seed: number): Bytes {
  const drawn = philox([BigInt(seed), 0n], 10);
  const place = (which: number) => Number(drawn[which]! % BigInt(data.length));
  const found = data.slice();
  for (let change = 0; change <= Number(drawn[0]! % 4n); change++) {
    found[place(2 + change)] = Number(drawn[6 + change]! & 255n);
  }
  const kind = drawn[1]! % 4n;
  if (kind === 0n) return found.slice(0, place(2));
  if (kind === 1n) return Uint8Array.of(...found.slice(0, place(2)), ...found.slice(place(3)));
  return found;
}

test.each<[string, Bytes, (data: Bytes) => unknown, new (...words: never[]) => Error]>([
  ["a plan", utf8(device.plan.text), (data) => decodePlan(data, 1), PlanRefused],
  ["an assignment", utf8(device.messages.good.assignment[0]), (data) => decodeAnswer("assignment", data), FormatError],
  ["a checkpoint", fromHex(checkpoint.bytes), (data) => decodeVectors(data, specs), FormatError],
  ["a graph", fromHex(device.runner.graphs["train.step"]), (data) => checkGraph(data, "g"), PlanRefused],
  [
    "a roster",
    fromHex(session.got_by_slot_10.M2),
    (data) => decodeRoster(data, fromHex(session.invite_hash), 100),
    SecaggError,
  ],
  ["a kept state", fromHex(session.got_by_slot_10.M2), decodeState, SecaggError],
])(
  "damaged bytes of %s are refused by name",
  (_, data, decode, kind) => {
    let refused = 0;
    for (let seed = 0; seed < TIMES; seed++) {
      try {
        decode(damaged(data, seed));
      } catch (error) {
        expect(error, `seed ${seed}`).toBeInstanceOf(kind);
        refused += 1;
      }
    }
    expect(refused).toBeGreaterThan(TIMES / 10);
  },
  PATIENCE_MS,
);
