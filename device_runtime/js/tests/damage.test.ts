/** Damaged bytes: every decoder refuses them with the error that it promises, or reads them as what they now are. */

import { zipSync } from "fflate";
import { expect, test } from "vitest";
import { type Bytes, checked, fromHex, parseJson, utf8 } from "../src/core/bytes.ts";
import { ConfigError, FormatError, PlanRefused, StateDamaged } from "../src/core/errors.ts";
import { AssignmentKeeper } from "../src/core/kept/sessions.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { decodeVectors } from "../src/core/plans/checkpoint.ts";
import { ExamplesError } from "../src/core/plans/examples.ts";
import { checkGraph } from "../src/core/plans/onnx-check.ts";
import { decodePlan } from "../src/core/plans/plan.ts";
import { SecaggError } from "../src/core/secagg/errors.ts";
import { checkCredential } from "../src/core/secagg/roster.ts";
import { type Assignment, decodeAnswer } from "../src/core/wire/messages.ts";
import {
  follow,
  successionSchema,
  verifiedEntry,
  verifiedHead,
  verifiedRelease,
  verifyPlan,
} from "../src/core/wire/statements.ts";
import { examplesOf } from "../src/node/npz-arrays.ts";
import { type ErrorKind, PATIENCE_MS, refusals, TIMES } from "./damage.ts";
import { MemoryStore } from "./memory-store.ts";
import { vectors } from "./vectors.ts";

const device = vectors("device.json");
const session = vectors("secagg/transcript.json");
const checkpoint = device.checkpoints[3];
const specs = Object.entries<number[]>(checkpoint.vectors).map(([name, one]) => ({ name, size: one.length }));

const TARGET = { coordinator: new URL("http://127.0.0.1:1"), population: "p" };
const PLACE = "assignment:http://127.0.0.1:1/:p";

const { plan, plan_signature, release, evaluating_release, entry, head } = device.statements;
const json = (text: string) => utf8(text);
const kept = (data: Bytes) => new TextDecoder().decode(data);
const key = (seed: number) => new Uint8Array(32).fill(seed);
const answers = Object.entries<string[]>(device.messages.good).flatMap(([kind, texts]) =>
  texts.map((text): Decoder => {
    return [`an answer, ${kind}`, json(text), (data) => decodeAnswer(kind as "assignment", data), FormatError];
  }),
);

type Decoder = [string, Bytes, (data: Bytes) => unknown, ErrorKind];

test.each<Decoder>([
  ...answers,
  [
    "a problem",
    json('{"type": "urn:muster:problem:unavailable", "status": 503}'),
    (data) => decodeAnswer("problem", data),
    FormatError,
  ],
  [
    "a receipt",
    json('{"assignment": "a", "task": "t", "round": 3, "sha256": "00"}'),
    (data) => decodeAnswer("receipt", data),
    FormatError,
  ],
  ["a plan", json(device.plan.text), (data) => decodePlan(data, 1), PlanRefused],
  ["a checkpoint", fromHex(checkpoint.bytes), (data) => decodeVectors(data, specs), FormatError],
  ["a graph", fromHex(device.runner.graphs["train.step"]), (data) => checkGraph(data, "g"), PlanRefused],
  ["a signed release", json(release.text), (data) => verifiedRelease({ ...release, text: kept(data) }), FormatError],
  [
    "a release with an evaluation",
    json(evaluating_release.text),
    (data) => verifiedRelease({ ...evaluating_release, text: kept(data) }),
    FormatError,
  ],
  [
    "a release's signature",
    json(release.value),
    (data) => verifiedRelease({ ...release, value: kept(data) }),
    FormatError,
  ],
  [
    "a key of a release",
    json(release.signer),
    (data) => verifiedRelease({ ...release, signer: kept(data) }),
    FormatError,
  ],
  ["an origin", json(entry.text), (data) => verifiedEntry({ ...entry, text: kept(data) }), FormatError],
  ["the head of a log", json(head.text), (data) => verifiedHead({ ...head, text: kept(data) }), FormatError],
  [
    "a plan's signature",
    json(plan_signature.value),
    (data) => verifyPlan(plan, { ...plan_signature, value: kept(data) }),
    FormatError,
  ],
  ["a succession", json(device.successions[0].shown), (data) => followed(data), FormatError],
  [
    "a credential",
    fromHex(session.sent.M1["10"]).slice(-88),
    (data) => checkCredential(key(2), key(3), data, 0n),
    SecaggError,
  ],
  [
    "a policy",
    json('{"min_cohort": 8, "signers": [], "plan": {"parameters": 9}}'),
    (data) => policyOf(parsed(data)),
    ConfigError,
  ],
  ["a kept assignment", await keptAssignment(), (data) => keeper(kept(data)).get(), StateDamaged],
  ["an archive of NumPy's arrays", archive(), examplesIn, ExamplesError],
])(
  "damaged bytes of %s are refused by name",
  async (_, data, decode, kind) => {
    expect(await refusals(data, decode, kind)).toBeGreaterThan(TIMES / 10);
  },
  PATIENCE_MS,
);

function followed(data: Bytes) {
  return follow(
    "server",
    checked(successionSchema, parseJson(data, "succession"), "succession"),
    fromHex(device.successions[0].pinned),
  );
}

/** An array of two float32 in an archive that is stored, not packed: what is damaged is not the checksum alone. */
function archive(): Bytes {
  const header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }".padEnd(117);
  const array = Uint8Array.of(0x93, ...utf8("NUMPY"), 1, 0, 118, 0, ...utf8(`${header}\n`), ...new Uint8Array(8));
  return zipSync({ "x.npy": array }, { level: 0 }) as Bytes;
}

/** The examples of an archive; fflate's own error says that it is none. */
function examplesIn(data: Bytes) {
  try {
    return examplesOf(data);
  } catch (error) {
    if (typeof (error as { code?: unknown }).code !== "number") throw error;
    throw new ExamplesError("invalid-examples", String(error));
  }
}

/** A keeper in whose store there is this text. */
function keeper(text: string): AssignmentKeeper {
  const store = new MemoryStore();
  void store.write({ [PLACE]: text });
  return new AssignmentKeeper(store, TARGET);
}

async function keptAssignment(): Promise<Bytes> {
  const store = new MemoryStore();
  const given = decodeAnswer("assignment", json(device.messages.good.assignment[0])) as Assignment;
  const work = { report: Uint8Array.of(1, 2, 255), collection: "typed", examples: 3, steps: 4, question: null };
  const keeps = new AssignmentKeeper(store, TARGET);
  await keeps.keep({ given, due: 1.5, phase: "trained", ...work });
  return json((await store.get(PLACE)) ?? "");
}

/** A policy as the command reads it: what is no JSON is no policy. */
function parsed(data: Bytes): object {
  try {
    return JSON.parse(kept(data)) as object;
  } catch (error) {
    throw new ConfigError(String(error));
  }
}
