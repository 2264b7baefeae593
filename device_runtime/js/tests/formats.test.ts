/** Messages, plans, checkpoints, reports and statements are read and written as in Python. */

import { expect, test } from "vitest";
import { base64, checked, concat, fromBase64, fromHex, hex, parseJson, u64, utf8 } from "../src/core/bytes.ts";
import { sha256, signingKey } from "../src/core/cryptography.ts";
import { FormatError, NonFiniteReport, PlanRefused } from "../src/core/errors.ts";
import { checkLabels } from "../src/core/permission/policy.ts";
import { decodeVectors, encodeVector, vectorDigest } from "../src/core/plans/checkpoint.ts";
import { type Codec, codedSize, encode } from "../src/core/plans/codecs.ts";
import { checkGraph } from "../src/core/plans/onnx-check.ts";
import { decodePlan, decodeTraining, PREDICT, parameterCount } from "../src/core/plans/plan.ts";
import { concatenate, reportSize, weigh } from "../src/core/plans/report.ts";
import type { Platform } from "../src/core/platform.ts";
import { deviceId, keyText, signatureBase, signatureFields } from "../src/core/protocol/call.ts";
import { evidence } from "../src/core/protocol/enrolment.ts";
import * as masking from "../src/core/protocol/secure.ts";
import { noiseOf } from "../src/core/secagg/packing.ts";
import { decodeAnswer } from "../src/core/wire/messages.ts";
import {
  digestOf,
  follow,
  successionSchema,
  verifiedEntry,
  verifiedHead,
  verifiedRelease,
  verifyPlan,
} from "../src/core/wire/statements.ts";
import { bytesOf, floats, type Vector, values, vectors } from "./vectors.ts";

const device = vectors("device.json");

test.each([0, 1, 2, 3, 12_287, 12_288, 12_289, 40_000])("%s bytes have the one spelling of base64", (size) => {
  const data = Uint8Array.from({ length: size }, (_, place) => (place * 7919) % 256);
  const letters = Buffer.from(data).toString("base64");
  expect(base64(data)).toBe(letters);
  expect(fromBase64(letters)).toEqual(data);
});

test.each(["QUJDRA", "QUJDRB==", "QUJDRA=", "QUJDRA \n", "QUJD RA=", "QU JD", " QUJD", "QUJD=", "QUJDR", "=", "-_-_"])(
  "base64 in another spelling is refused: %j",
  (letters) => {
    expect(() => fromBase64(letters)).toThrow(RangeError);
  },
);

test("an assignment keeps integers that a number would round", () => {
  const given = decodeAnswer("assignment", utf8(device.messages.good.assignment[0]));
  expect(given).toMatchObject({ outcome: "assigned", round: 3, minimum: 8, over_selected: true, lost_after_s: 5.25 });
  expect(given).toMatchObject({ seed: BigInt(device.messages.seed), slot: BigInt(device.messages.slot) });
  expect(given).toMatchObject({ secagg: Uint8Array.of(0, 1), plan: { size: 2 ** 40 }, release: null });
});

test.each(device.messages.alike_assignments as string[])("the form of a message does not matter: %s", (text) => {
  const [given] = device.messages.good.assignment as string[];
  expect(decodeAnswer("assignment", utf8(text))).toEqual(decodeAnswer("assignment", utf8(given!)));
});

test("every answer that Python writes is read", () => {
  for (const [kind, texts] of Object.entries<string[]>(device.messages.good)) {
    for (const one of texts) {
      decodeAnswer(kind as "assignment", utf8(one));
    }
  }
});

test("the target of an assignment and of a release is a text of 1 to 1,000 characters", async () => {
  const { targeted_assignment, bad_targets } = device.messages;
  expect(decodeAnswer("assignment", utf8(targeted_assignment))).toMatchObject({ target: "𝟛".repeat(1000) });
  for (const bad of bad_targets as string[]) expect(() => decodeAnswer("assignment", utf8(bad))).toThrow(/at target/);
  expect((await verifiedRelease(device.statements.targeted_release)).bounds.target).toBe("region = eu");
});

test("labels are taken up to their limits, and named beyond them", () => {
  for (const good of device.labels.good) expect(checkLabels(good)).toBe(good);
  for (const bad of device.labels.bad) expect(() => checkLabels(bad)).toThrow(/^(label ".*"|label region|17 labels)/s);
  expect(() => checkLabels({ region: "\ud800" })).toThrow(/control characters/);
});

test("a plan says what its predict graph takes and gives", () => {
  const { predict } = decodePlan(utf8(device.plan.predicting), 1);
  expect(predict).toMatchObject({ inputs: ["x"], outputs: [{ name: "output", shape: [2] }], batch_size: 1 });
  expect(decodePlan(utf8(device.plan.text), 1).predict).toBeNull();
});

test.each(device.plan.bad as string[])("a plan that predicts otherwise than it may is refused: %#", (text) => {
  expect(() => decodePlan(utf8(text), 1)).toThrow(PlanRefused);
});

test("a plan that asks says its question, of 4,000 characters at most", () => {
  expect([...decodePlan(utf8(device.plan.asking), 1).question!]).toHaveLength(4000);
  expect(decodePlan(utf8(device.plan.text), 1).question).toBeUndefined();
  for (const text of device.plan.bad_questions as string[]) {
    expect(() => decodePlan(utf8(text), 1)).toThrow(/question/);
  }
});

test.for<[string, string]>(Object.entries(device.plan.divisions.refused))(
  "a predict graph that divides by data is refused: %s",
  ([, bytes]) => {
    expect(() => checkGraph(fromHex(bytes), PREDICT)).toThrow("graph predict: it divides by data");
    checkGraph(fromHex(bytes), "train.step");
  },
);

test.for<[string, string]>(Object.entries(device.plan.divisions.allowed))(
  "a predict graph may divide by constants: %s",
  ([, bytes]) => {
    checkGraph(fromHex(bytes), PREDICT);
  },
);

test("integers of up to 64 bits are exact, and no longer ones", () => {
  const [most, more] = ["9".repeat(20), "9".repeat(21)];
  expect(parseJson(`[${most}, ${more}]`, "list")).toEqual([BigInt(most), 1e21]);
});

test.each(device.messages.bad_assignments as string[])("a text that is no assignment is refused: %s", (bad) => {
  expect(() => decodeAnswer("assignment", utf8(bad))).toThrow(FormatError);
});

test("an error names the member that is wrong", () => {
  expect(() => decodeAnswer("assignment", utf8(device.messages.bad_assignments[1]))).toThrow(
    /assignment.*at assignment/,
  );
});

test("a plan runs its trips in turn, and its layouts have Python's hashes", async () => {
  for (const [round, hash] of Object.entries(device.plan.layout_hash)) {
    const plan = decodePlan(utf8(device.plan.text), Number(round));
    expect(hex(await masking.layoutHash(plan.report, 7n))).toBe(hash);
    expect(parameterCount(plan)).toBe(device.plan.parameters);
    expect(plan.passes).toHaveLength(Number(round) % 2 === 1 ? 2 : 1);
  }
});

test.each([
  ["another version", '"version":1', '"version":2', /version 2/],
  ["a graph too few", '"report":{"sha256"', '"repor":{"sha256"', /the passes need/],
  ["a negative size", '"size":3', '"size":-3', /size/],
  ["a batch of nothing", '"batch_size":4', '"batch_size":0', /batch_size/],
  [
    "fractions that are ignored",
    '"name":"y"',
    '"ignored":-100,"name":"y"',
    /y ignores -100: it must be int32 or int64/,
  ],
  ["an ignored class", '"name":"y"', '"ignored":1,"name":"y"', /ignored/],
  ["two weights", '"name":"delta"', '"name":"weight"', /weight/],
  [
    "kept vectors without their graphs",
    '"kept":[]',
    '"kept":[{"name":"c_i","size":3}]',
    /the passes need .*kept\.next/,
  ],
])("a plan with %s is refused", (_, from, to, message) => {
  expect(() => decodePlan(utf8(device.plan.text.replace(from, to)), 1)).toThrow(PlanRefused);
  expect(() => decodePlan(utf8(device.plan.text.replace(from, to)), 1)).toThrow(message);
});

test("a plan whose devices keep vectors is read, and trains nobody here", () => {
  const value = JSON.parse(device.plan.text);
  const [graphs] = Object.values<Record<string, unknown>>(value.graphs);
  for (const name of ["kept.first", "kept.next"]) graphs![name] = graphs!["report"];
  value.graphs = { onnx: graphs };
  const data = utf8(JSON.stringify({ ...value, kept: [{ name: "c_i", size: 3 }], second: null }));
  expect(decodePlan(data, 1).kept).toHaveLength(1);
  expect(() => decodeTraining(data, 1)).toThrow(PlanRefused);
  expect(() => decodeTraining(data, 1)).toThrow(/keep vectors between rounds: .*in Python/);
});

test.for<Vector>(device.checkpoints)(
  "vectors are read, and one vector is written, as by safetensors",
  ({ vectors: named, bytes }) => {
    const specs = Object.entries<number[]>(named).map(([name, one]) => ({ name, size: one.length }));
    const found = decodeVectors(fromHex(bytes), specs);
    expect(Object.fromEntries([...found].map(([name, one]) => [name, [...one]]))).toEqual(named);
    if (specs.length === 1) {
      expect(hex(encodeVector(specs[0]!.name, found.get(specs[0]!.name)!))).toBe(bytes);
    }
    expect(() => decodeVectors(fromHex(bytes), [{ name: "other", size: 1 }])).toThrow(FormatError);
    expect(() =>
      decodeVectors(
        fromHex(bytes),
        specs.map((spec) => ({ ...spec, size: spec.size + 1 })),
      ),
    ).toThrow(FormatError);
  },
);

test("a checkpoint that is cut anywhere is refused", () => {
  const { bytes } = device.checkpoints[0];
  for (let end = 0; end < bytes.length; end += 2) {
    expect(() => decodeVectors(fromHex(bytes.slice(0, end)), [{ name: "report", size: 7 }])).toThrow(FormatError);
  }
  expect(() => decodeVectors(fromHex(`${bytes}00`), [{ name: "report", size: 7 }])).toThrow(FormatError);
});

test("vectors that overlap, or leave a gap, are refused", () => {
  const specs = ["a", "b"].map((name) => ({ name, size: 1 }));
  const file = (a: number[], b: number[]) => {
    const of = (offsets: number[]) => ({ dtype: "F32", shape: [1], data_offsets: offsets });
    const header = utf8(JSON.stringify({ a: of(a), b: of(b) }));
    return concat(u64(BigInt(header.length)), header, new Uint8Array(8));
  };
  expect(decodeVectors(file([4, 8], [0, 4]), specs).size).toBe(2);
  expect(() => decodeVectors(file([0, 4], [0, 4]), specs)).toThrow(FormatError);
  expect(() => decodeVectors(file([0, 4], [2, 6]), specs)).toThrow(FormatError);
});

test.for<Vector>(device.reports)("a report of weight $weight has Python's bits", (one) => {
  const parts = new Map([
    ["delta", floats(one.delta)],
    ["train.metrics", floats(one.metrics)],
    ["plain.metrics", floats(one.more_metrics)],
  ]);
  if (one.values === null) {
    expect(() => concatenate(one.layout, parts, one.weight, one.clip)).toThrow(NonFiniteReport);
    return;
  }
  const kept = concatenate(one.layout, parts, one.weight, one.clip);
  expect(hex(bytesOf(kept))).toBe(one.values);
  expect(hex(bytesOf(weigh(one.layout, kept, one.weight)))).toBe(one.weighed);
});

test.for<Vector>(device.codecs)("$size values travel as Python's bits", async (one) => {
  const key = { seed: BigInt(one.seed), round: one.round };
  const coded = await encode(one.codecs, floats(one.values), key, one.segment);
  expect(hex(await sha256(bytesOf(coded)))).toBe(one.coded_sha256);
});

test("low-rank factors are Python's up to rounding", async () => {
  const { codecs, seed, round, segment, ...one } = device.low_rank;
  const coded = await encode(codecs, floats(one.values), { seed: BigInt(seed), round }, segment);
  const expected = floats(one.coded);
  expect(coded).toHaveLength(expected.length);
  coded.forEach((value, place) => {
    expect(value).toBeCloseTo(expected[place]!, 4);
  });
});

test.each([
  [{ codec: "rotation", block: 12 }, /power of two/],
  [{ codec: "subsample", kept: 101 }, /at most as many/],
  [{ codec: "count_sketch", rows: 3, columns: 34 }, /at most as many/],
  [{ codec: "count_sketch", rows: 17, columns: 1 }, /17 rows; there may be 16/],
  [{ codec: "low_rank", rank: 2, matrices: [[9, 11]] as [number, number][] }, /99 values/],
] as const)("a codec that does not fit its 100 values is refused: %o", (codec, words) => {
  expect(() => codedSize([codec as Codec], 100)).toThrow(words);
});

test("more codecs of a segment than a device goes through are refused", () => {
  const codecs = new Array<Codec>(9).fill({ codec: "subsample", kept: 2 });
  expect(codedSize(codecs.slice(1), 100)).toBe(2);
  expect(() => codedSize(codecs, 100)).toThrow(/9 codecs of a segment; there may be 8/);
});

test("more segments of a report than a coordinator goes over are refused", () => {
  const [open, present] = ['"segments":[', JSON.parse(device.plan.text).report.segments.length];
  const withMore = (count: number) => {
    const more = Array.from({ length: count }, (_, number) => `{"name":"s${number}","size":1,"reduction":"mean"},`);
    return utf8(device.plan.text.replace(open, open + more.join("")));
  };
  expect(decodePlan(withMore(64 - present), 1).report.segments.length).toBe(64);
  expect(() => decodePlan(withMore(65 - present), 1)).toThrow(/65 segments; there may be 64/);
});

test.for(Object.entries<Vector>(device.refused_layouts))("a plan is refused whose range is %s", ([, layout]) => {
  const plan = JSON.parse(device.plan.text);
  expect(() => decodePlan(utf8(JSON.stringify({ ...plan, report: layout })), 1)).toThrow(/range/);
});

test("a plan with ranges is read", () => {
  const plan = JSON.parse(device.plan.text);
  const { layout } = device.masking.ranged;
  expect(decodePlan(utf8(JSON.stringify({ ...plan, report: layout })), 1).report.segments[0]!.range).toEqual(
    layout.segments[0].range,
  );
});

test("a codec that no device knows is refused by name", () => {
  const unknown = device.plan.text.replaceAll('"codecs":[]', '"codecs":[{"codec":"other"}]');
  expect(() => decodePlan(utf8(unknown), 1)).toThrow(/"other"/);
});

test("what a secure round sums of a report with ranges is Python's", async () => {
  const { layout, ...expected } = device.masking.ranged;
  const { bounds, noisy } = device.masking;
  expect(rows(layout, bounds)).toEqual(expected.fixed_points);
  expect(rows(layout, noisy)).toEqual(expected.noisy_fixed_points);
  const given = floats(expected.values);
  expect(hex(bytesOf(masking.summedValues(layout, bounds, given)))).toBe(expected.summed);
  expect(hex(bytesOf(masking.summedValues(layout, noisy, given)))).toBe(expected.noisy_summed);
  expect(hex(await masking.layoutHash(layout, BigInt(device.messages.seed)))).toBe(expected.layout_hash);
});

function rows(given: Vector, under: Vector) {
  return masking
    .fixedPoints(given, under)
    .map((one) => [one.size, one.inBits, one.low, one.high, one.norm, one.weighted]);
}

test("the derivations of a secure round are Python's", async () => {
  const { layout, bounds, ...expected } = device.masking;
  const [plan, checkpoint] = [expected.plan, expected.checkpoint].map((sha256) => ({ sha256, size: 0 }));
  expect(rows(layout, bounds)).toEqual(expected.fixed_points);
  expect(rows(layout, expected.noisy)).toEqual(expected.noisy_fixed_points);
  expect(rows(expected.rotated, bounds)).toEqual(expected.rotated_fixed_points);
  expect(rows(expected.rotated, expected.noisy)).toEqual(expected.rotated_noisy_fixed_points);
  const summed = masking.summedValues(layout, expected.noisy, values(reportSize(layout) - 1));
  expect(hex(new Uint8Array(summed.buffer))).toBe(expected.noisy_values);
  for (const [[size, inBits, low, high, norm], multiplier, honest, noise] of expected.noise_shares) {
    const segment = { size, inBits, low, high, norm, weighted: true };
    expect(noiseOf(segment, multiplier, honest)).toBe(noise);
  }
  expect(masking.greatestWeight(layout, bounds)).toBe(expected.greatest_weight);
  expect(hex(await masking.layoutHash(layout, BigInt(device.messages.seed)))).toBe(expected.layout_hash);
  expect(hex(await masking.taskHash("tâche-1"))).toBe(expected.task_hash);
  expect(hex(await masking.modelHash(plan!, checkpoint!))).toBe(expected.model_hash);
  expect(masking.sessionNumber(2 ** 31 - 1, 5)).toBe(BigInt(expected.session_number));
  expect(masking.lastSessionNumber(7)).toBe(BigInt(expected.last_session_number));
  const key = await signingKey(new Uint8Array(32).fill(1));
  expect(keyText(key.public)).toBe(expected.device_key);
  expect(await deviceId(expected.device_key)).toBe(expected.device);
});

test("signed statements are verified, and one changed character is seen", async () => {
  const { plan, plan_signature, release, keyed_release, evaluating_release, entry, evaluated_entry, head } =
    device.statements;
  await verifyPlan(plan, plan_signature);
  expect((await verifiedRelease(release)).population).toBe("phones");
  expect((await verifiedRelease(release)).seed).toBe(undefined);
  expect((await verifiedRelease(keyed_release)).seed).toBe(BigInt(device.messages.seed));
  expect((await verifiedEntry(entry)).round).toBe(1);
  expect((await verifiedEntry(entry)).params).toBe(undefined);
  const { evaluation, bounds } = await verifiedRelease(evaluating_release);
  expect((await verifiedRelease(release)).evaluation).toBe(undefined);
  expect([evaluation?.plan, evaluation?.bounds]).toEqual(["12".repeat(32), bounds]);
  const [, , , several] = device.checkpoints;
  expect((await verifiedEntry(evaluated_entry)).params).toBe(
    await vectorDigest(Float32Array.from(several.vectors.params)),
  );
  expect((await verifiedHead(head)).size).toBe(3);
  expect(await digestOf(release)).toBe(release.digest);
  await expect(verifyPlan({ ...plan, sha256: "00".repeat(32) }, plan_signature)).rejects.toThrow(FormatError);
  await expect(verifiedRelease({ ...release, text: release.text.replace("phones", "phoney") })).rejects.toThrow(
    FormatError,
  );
  await expect(verifiedEntry(release)).rejects.toThrow(FormatError);
  await expect(verifiedHead({ ...head, signer: `${head.signer}=` })).rejects.toThrow(/not a public key/);
});

test.for<Vector>(device.successions)("a pinned key leads where Python says", async ({ shown, pinned, leads_to }) => {
  const succession = checked(successionSchema, parseJson(shown, "succession"), "succession");
  const led = follow("server", succession, fromHex(pinned));
  await (leads_to === null
    ? expect(led).rejects.toThrow(FormatError)
    : led.then((key) => expect(hex(key)).toBe(leads_to)));
});

test.for<Vector>(device.attestations)("evidence at $created is Python's", async (one) => {
  const { key, created, secret, proof, challenge, said } = one;
  const knowing = { enrolmentSecret: fromHex(secret) } as unknown as Platform;
  expect(await evidence(knowing, key, created)).toEqual(proof);
  const asked: string[] = [];
  const attest = async (of: Uint8Array) => {
    asked.push(hex(of));
    return Array.isArray(said)
      ? { kind: "android-key", chain: said.map(fromHex) }
      : { kind: "app-attest", statement: fromHex(said) };
  };
  expect(await evidence({ ...knowing, attest } as Platform, key, created)).toEqual(one.evidence);
  expect(asked).toEqual([challenge]);
  expect(await evidence({} as Platform, key, created)).toEqual({ kind: "none" });
});

test("a phone that attests no key now says so, and the next session tries again", async () => {
  const attest = () => Promise.reject(new Error("the Keystore is locked"));
  const failed = await evidence({ attest } as unknown as Platform, "ed25519:k", 1).catch((error: unknown) => error);
  expect(failed).toMatchObject({ reason: "key-unavailable", permanent: false });
  expect(String(failed)).toContain("the Keystore is locked");
});

const requests = vectors("requests.json").filter((one: Vector) => one.outcome === "good");

test.for<Vector>(requests)("signature base: $name", (one) => {
  const [, covered, rest] = /^\w+=\(([^)]*)\)(.*)$/.exec(one.signature_input)!;
  const names = covered!.split(" ").map((name: string) => name.replaceAll('"', ""));
  const request = { method: one.method, url: new URL(`http://${one.host}${one.target}`), fields: one.fields };
  expect(new TextDecoder().decode(signatureBase(request, names, `(${covered})${rest}`))).toBe(one.base);
});

test("a request that this device signs has the fields of the vectors", async () => {
  const key = await signingKey(new Uint8Array(32).fill(1));
  const one = requests.find(({ name }: { name: string }) => name === "a check-in with a body, Ed25519");
  const request = { method: one.method, url: new URL(`http://${one.host}${one.target}`), fields: one.fields };
  const counting = (size: number) => Uint8Array.from({ length: size }, (_, place) => place);
  const keyid = /keyid="([^"]+)"/.exec(one.signature_input)![1]!;
  const fields = await signatureFields({ keyid, key }, request, 1763740800, counting);
  expect(fields["signature-input"]).toBe(one.signature_input);
  const mine = keyText(key.public) === one.key ? one.signature : expect.stringMatching(/^device=:.{88}:$/);
  expect(fields.signature).toEqual(mine);
});
