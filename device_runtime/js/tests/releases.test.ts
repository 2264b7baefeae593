/** The vectors that a signed entry names, as a device that trains and one that evaluates check them. */

import { expect, test } from "vitest";
import { utf8 } from "../src/core/bytes.ts";
import { PlanRefused } from "../src/core/errors.ts";
import { checkModel } from "../src/core/permission/releases.ts";
import { vectorDigest } from "../src/core/plans/checkpoint.ts";
import type { Assignment } from "../src/core/wire/messages.ts";

const [TRAINS, EVALUATES] = ["a".repeat(64), "b".repeat(64)];
const [MODEL, OTHER, EDGES] = [
  [0, 1, 2],
  [9, 9, 9],
  [0, 1],
].map((values) => Float32Array.from(values));
const pair = await crypto.subtle.generateKey("Ed25519", true, ["sign", "verify"]);
const signer = `ed25519:${Buffer.from(await crypto.subtle.exportKey("raw", pair.publicKey)).toString("base64url")}`;

async function signed(what: string, statement: object) {
  const text = JSON.stringify(statement);
  const value = await crypto.subtle.sign("Ed25519", pair.privateKey, utf8(`muster.${what}.v1\0${text}`));
  return { text, signer, value: Buffer.from(value).toString("base64url") };
}

/** The assignment of a plan, after a round whose entry names a model, or none. */
async function given(plan: string, params?: string): Promise<Assignment> {
  const bounds = { clip_norm: 1, bits: 20, max_examples: 100, min_sum: 8, noise_multiplier: 0, honest: 0 };
  const evaluation = { plan: EVALUATES, bounds, constants: { edges: await vectorDigest(EDGES!) } };
  const same = { population: "phones", plan: TRAINS, checkpoint: "c".repeat(64), bounds, lineage: signer };
  const release = await signed("release", { version: 1, ...same, evaluation, counter: 1, expires_at: 2 ** 40 });
  const entry = { release: "d".repeat(64), round: 1, parent: "e".repeat(64), checkpoint: "f".repeat(64) };
  const lineage = await signed("lineage", params === undefined ? entry : { ...entry, params });
  return { plan: { sha256: plan, size: 1 }, secagg: utf8("M0"), release, lineage } as Partial<Assignment> as Assignment;
}

test.each([
  ["evaluates its model", EVALUATES, true, { params: MODEL, edges: EDGES }, null],
  [
    "evaluates another model",
    EVALUATES,
    true,
    { params: OTHER, edges: EDGES },
    /vector params .* not the model of round 1/,
  ],
  [
    "evaluates with other constants",
    EVALUATES,
    true,
    { params: MODEL, edges: OTHER },
    /vector edges .* not the released/,
  ],
  ["trains on its model", TRAINS, true, { params: MODEL, c: EDGES }, null],
  ["trains on another model", TRAINS, true, { params: OTHER, c: EDGES }, /vector params .* not the model of round 1/],
  ["trains where it names no model", TRAINS, false, { params: OTHER }, null],
])("an entry of a lineage and a device that %s", async (_, plan, names, received, refused) => {
  const found = new Map(Object.entries(received as Record<string, Float32Array<ArrayBuffer>>));
  const checked = checkModel(await given(plan!, names ? await vectorDigest(MODEL!) : undefined), found);
  if (refused === null) return await expect(checked).resolves.toBeUndefined();
  const error = await checked.catch((reason: unknown) => reason);
  expect(error).toBeInstanceOf(PlanRefused);
  expect(String(error)).toMatch(refused);
});
