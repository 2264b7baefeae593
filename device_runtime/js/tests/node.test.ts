/** Node's store and examples: what is written stays, and what is damaged is said. */

import { mkdtempSync, readFileSync, rmSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { strToU8, zipSync } from "fflate";
import { afterEach, beforeEach, expect, test } from "vitest";
import { StateDamaged, StateInUse } from "../src/core/errors.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { ExamplesError } from "../src/core/plans/examples.ts";
import { keptJson } from "../src/core/platform.ts";
import { NpzExamples } from "../src/node/npz.ts";
import { FileBlobs, SqliteStore } from "../src/node/store.ts";
import { damaged } from "./damage.ts";

let folder = "";
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "device-"));
});
afterEach(() => {
  rmSync(folder, { recursive: true });
});

test("what a store is told survives its end", async () => {
  const store = new SqliteStore(folder);
  await store.write({ a: "1", b: "2" });
  await store.write({ a: null, b: "3" });
  store.close();
  const again = new SqliteStore(folder);
  expect([await again.get("a"), await again.get("b")]).toEqual([null, "3"]);
  again.close();
});

test("a write that fails changes nothing", async () => {
  const store = new SqliteStore(folder);
  await store.write({ a: "1" });
  await expect(store.write({ a: "2", b: {} as string })).rejects.toThrow(StateDamaged);
  expect(await store.get("a")).toBe("1");
  store.close();
});

test("one process at a time uses a folder", () => {
  const store = new SqliteStore(folder);
  expect(() => new SqliteStore(folder)).toThrow(StateInUse);
  store.close();
});

test("the folder and the file of a store are their owner's alone", () => {
  const made = join(folder, "state");
  new SqliteStore(made).close();
  expect([made, join(made, "state.db")].map((path) => statSync(path).mode & 0o777)).toEqual([0o700, 0o600]);
});

test("a file that is no store is said to be none", async () => {
  writeFileSync(join(folder, "state.db"), "x".repeat(5000));
  expect(() => new SqliteStore(folder)).toThrow(StateDamaged);
});

test("the state of another program is refused and left as it is", () => {
  const path = join(folder, "state.db");
  const theirs = new DatabaseSync(path);
  theirs.exec("PRAGMA application_id = 7; CREATE TABLE kept (task TEXT)");
  theirs.close();
  const before = readFileSync(path);
  expect(() => new SqliteStore(folder)).toThrow(/name another folder/);
  expect(readFileSync(path)).toEqual(before);
});

test("kept text that is no JSON is an error that names it", async () => {
  const store = new SqliteStore(folder);
  await store.write({ spent: "{" });
  await expect(keptJson(store, "spent")).rejects.toThrow(/spent is not JSON/);
  store.close();
});

test("a blob that was never put is none", async () => {
  const blobs = new FileBlobs(folder);
  expect(await blobs.get("ab")).toBeNull();
  await blobs.put("ab", Uint8Array.of(1, 2));
  expect(await blobs.get("ab")).toEqual(Uint8Array.of(1, 2));
});

test("blobs are trimmed to a size, the longest unused first", async () => {
  const blobs = new FileBlobs(folder);
  await blobs.trim(0, new Set()); // there is none yet
  const names = ["oldest", "older", "newest"];
  for (const [at, name] of names.entries()) {
    await blobs.put(name, new Uint8Array(10));
    utimesSync(join(folder, "blobs", name), at, at);
  }
  await blobs.get("oldest"); // used just now
  await blobs.trim(20, new Set());
  const kept = await Promise.all(names.map(async (name) => (await blobs.get(name)) !== null));
  expect(kept).toEqual([true, false, true]);
});

test("a blob that was used by a clock ahead does not push out what is used now", async () => {
  const blobs = new FileBlobs(folder);
  for (const name of ["ahead", "now"]) await blobs.put(name, new Uint8Array(10));
  utimesSync(join(folder, "blobs", "ahead"), 4e9, 4e9);
  await blobs.trim(10, new Set());
  expect([await blobs.get("ahead"), await blobs.get("now")]).toEqual([null, new Uint8Array(10)]);
});

test("blobs to keep stay, and do not count", async () => {
  const blobs = new FileBlobs(folder);
  for (const name of ["kept", "other"]) await blobs.put(name, new Uint8Array(10));
  await blobs.trim(10, new Set(["kept"]));
  expect([await blobs.get("kept"), await blobs.get("other")]).toEqual([new Uint8Array(10), new Uint8Array(10)]);
  await blobs.trim(0, new Set(["kept"]));
  expect([await blobs.get("kept"), await blobs.get("other")]).toEqual([new Uint8Array(10), null]);
});

test.each([
  ["no zip", strToU8("no zip"), /cannot be read/],
  ["no array", zipSync({ "x.npy": strToU8("no array at all") }), /not for plain arrays/],
  ["an object array", npz("|O", "(2,)", 16), /holds \|O/],
  ["columns in the other order", npz("<f4", "(2, 2)", 16, "True"), /C order/],
  ["too few bytes", npz("<f4", "(2, 3)", 16), /6 values, which its 16 bytes are not/],
])("a file of examples that holds %s is refused", async (_, data, words) => {
  writeFileSync(join(folder, "examples.npz"), data);
  const examples = new NpzExamples(join(folder, "examples.npz"));
  await expect(examples.load("default")).rejects.toThrow(ExamplesError);
  await expect(examples.load("default")).rejects.toThrow(words);
});

test("damaged files of examples are refused by name", async () => {
  const [path, good] = [join(folder, "examples.npz"), npz("<f4", "(2, 2)", 16)];
  let refused = 0;
  for (let seed = 0; seed < 200; seed++) {
    writeFileSync(path, damaged(Uint8Array.from(good), seed));
    const error = await new NpzExamples(path).load("default").catch((found: unknown) => found);
    if (error instanceof Error) expect(error, `seed ${seed}`).toBeInstanceOf(ExamplesError);
    refused += Number(error instanceof Error);
  }
  expect(refused).toBeGreaterThan(20);
});

test("every file of a folder is the collection of its name", async () => {
  writeFileSync(join(folder, "digits.npz"), npz("<f4", "(2, 2)", 16));
  writeFileSync(join(folder, "words.npz"), npz("<i8", "(3,)", 24));
  writeFileSync(join(folder, "notes.txt"), "no examples");
  const examples = new NpzExamples(folder);
  expect(await examples.counts()).toEqual(new Map(Object.entries({ digits: 2, words: 3 })));
  expect((await examples.load("words")).columns.get("x")?.values).toEqual(new BigInt64Array(3));
  expect((await examples.load("default")).count).toBe(0);
});

test.each([
  [{ min_cohort: 0 }, /^min_cohort = 0: Expected >=1$/],
  [{ signers: ["ed25519:short"] }, /^signers: .* is not a public key/],
  [{ populatoins: ["p"] }, /^populatoins = \["p"\]: there is no such key; there are populations, collections, /],
  [{ labels: ["region", "Ring"] }, /^labels: label "Ring": a name has 1 to 32 of a-z, 0-9 and _, and begins with/],
  [{ plan: { parameters: -1 } }, /^plan.parameters = -1: Expected >=0$/],
  [{ plan: { memory: 1 } }, /^plan.memory = 1: there is no such key; there are parameters, /],
  [{ plan: 3 }, /^plan = 3: it must be an object/],
  [[], /^it must be an object/],
  [{ cache_bytes: -1 }, /cache_bytes/],
  [{ question: { allowed: true } }, /question = .*: there is no such key/],
  [{ questions: { allow: true } }, /questions.allow = true: there is no such key; there are allowed, per_week$/],
  [{ questions: { allowed: "no" } }, /questions.allowed = "no"/],
  [{ questions: { per_week: -1 } }, /questions.per_week = -1/],
  [{ questions: { per_week: 1.5 } }, /questions.per_week = 1.5/],
  [{ authority_url: "https://a.example" }, /needs authority/],
  [{ authority_url: "a.example" }, /^authority_url = "a.example": it must be a URL/],
])("a policy with %o is refused", (settings, words) => {
  expect(() => policyOf(settings)).toThrow(words);
});

function npz(descr: string, shape: string, size: number, fortran = "False"): Uint8Array {
  const header = `{'descr': '${descr}', 'fortran_order': ${fortran}, 'shape': ${shape}, }`.padEnd(117);
  const head = Uint8Array.of(0x93, ...strToU8("NUMPY"), 1, 0, header.length + 1, 0, ...strToU8(`${header}\n`));
  return zipSync({ "x.npy": Uint8Array.of(...head, ...new Uint8Array(size)) });
}
