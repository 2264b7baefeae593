/** Texts become the tokens that Python makes of them, and what cannot is refused in one line. */

import { expect, test } from "vitest";
import { concat, utf8 } from "../src/core/bytes.ts";
import type { Examples } from "../src/core/plans/examples.ts";
import { decodePlan, keptRefs, type Plan } from "../src/core/plans/plan.ts";
import { Work } from "../src/core/texts/characters.ts";
import { isolated, Tokenizer, tokenized, tokensOf } from "../src/core/texts/tokenizer.ts";
import { stacked, withoutZeros } from "../src/web/examples.ts";
import { type Vector, vectors } from "./vectors.ts";

const { texts, tokenizers, expressions, files } = vectors("tokenizers.json");
const [{ plan: planVector }, [wordPiece]] = [vectors("device.json"), tokenizers];
const WIDTH = 40;

function planOf(more: object = {}): Plan {
  const tokenizer = { blob: { sha256: "0".repeat(64), size: 3 }, padding: 0 };
  const field = { name: "text", dtype: "int32", shape: [6], high: 1000, tokenizer, ...more };
  return decodePlan(utf8(JSON.stringify({ ...JSON.parse(planVector.text), examples: { fields: [field] } })), 1);
}

function examplesOf(...rows: (string | Uint8Array)[]): Examples {
  const padded = rows.map((row) => {
    const data = typeof row === "string" ? utf8(row) : row;
    return concat(data, new Uint8Array(WIDTH - data.length));
  });
  return { count: rows.length, columns: new Map([["text", { shape: [WIDTH], values: concat(...padded) }]]) };
}

const file = async () => utf8(JSON.stringify(wordPiece.file));

test.for<Vector>(tokenizers)("the tokens of $name are Python's", ({ file, ids }) => {
  const tokenizer = new Tokenizer(file);
  for (const [place, text] of texts.entries()) {
    const { before, own, after } = tokenizer.encode(text, new Work());
    expect([text, [...before, ...own, ...after]]).toEqual([text, ids[place]]);
  }
});

test("words that every object has are in the vocabulary too", () => {
  const vocab = { "[UNK]": 0, proto: 1, "##type": 2, prototype: 3, constructor: 4, ["__proto__"]: 5 };
  const model = { ...(wordPiece.file as { model: object }).model, type: "WordPiece", unk_token: "[UNK]", vocab };
  const tokenizer = new Tokenizer({ ...wordPiece.file, added_tokens: [], post_processor: null, model });
  expect(tokenizer.encode("prototype constructor", new Work()).own).toEqual([3, 4]);
});

test("a text that is too long keeps what is around it, and is counted", async () => {
  const { examples, cut } = await tokenized(planOf(), examplesOf("a, b. c! d? e", "a", ""), file, () => true);
  const { shape, values } = examples.columns.get("text")!;
  const whole = new Tokenizer(wordPiece.file).encode("a, b", new Work()).own;
  const one = new Tokenizer(wordPiece.file).encode("a", new Work()).own;
  expect([shape, cut]).toEqual([[6], 1]);
  expect([...values].slice(0, 5)).toEqual([
    2,
    ...whole.slice(0, 3),
    new Tokenizer(wordPiece.file).encode(".", new Work()).own[0],
  ]);
  expect([...values].slice(5)).toEqual([3, 2, ...one, 3, 0, 0, 0, 2, 3, 0, 0, 0, 0]);
});

test("texts that are kept as long as they are give the same tokens, and other lines their zeros again", async () => {
  const rows = [new Uint8Array(WIDTH), ...["a, b. c! d? e", "a"].map(utf8)].map((row) => {
    const line = { shape: [WIDTH], values: concat(row, new Uint8Array(WIDTH - row.length)) };
    return { collection: "c", at: 0, fields: { text: withoutZeros(line) } };
  });
  const column = stacked("text", rows);
  expect([column.values.length, column.ends]).toEqual([14, [0, 13, 14]]);
  const examples = { count: 3, columns: new Map([["text", column]]) };
  const dense = examplesOf("", "a, b. c! d? e", "a");
  const tokens = async (given: Examples) => (await tokenized(planOf(), given, file, () => true)).examples.columns;
  expect(await tokens(examples)).toEqual(await tokens(dense));
  const lines = planOf({ dtype: "uint8", shape: [WIDTH], high: 256, tokenizer: undefined });
  const made = await tokenized(lines, examples, file, () => true);
  expect(made.examples.columns.get("text")).toEqual(dense.columns.get("text"));
});

test("work stops between two texts when there is no time left", async () => {
  let asked = 0;
  await expect(tokenized(planOf(), examplesOf("a", "b", "c"), file, () => ++asked < 2)).rejects.toThrow(
    "stopped while texts became tokens",
  );
  expect(asked).toBe(2);
});

function splitting(expression: string): Tokenizer {
  const split = { type: "Split", pattern: { Regex: expression }, behavior: "Isolated", invert: false };
  const qwen = tokenizers.find(({ name }: Vector) => name === "qwen").file;
  const { pretokenizers } = qwen.pre_tokenizer;
  return new Tokenizer({ ...qwen, pre_tokenizer: { type: "Sequence", pretokenizers: [split, ...pretokenizers] } });
}

test.for<Vector>(expressions.refused)("an expression with $what is refused: $expression", ({ expression, what }) => {
  expect(() => splitting(expression)).toThrow(`its tokenizer has ${what} in the expression`);
});

test.for<Vector>(expressions.taken)("the pieces of $expression are Python's", ({ expression, pieces }) => {
  for (const [place, text] of texts.entries()) {
    expect([text, isolated(expression)(text, new Work())]).toEqual([text, pieces[place]]);
  }
});

test.for<Vector>(files.refused)("a file with another $at is refused", ({ file }) => {
  expect(() => new Tokenizer(files.small)).not.toThrow();
  expect(() => new Tokenizer(file)).toThrow(/malformed tokenizer|its tokenizer has/);
});

/** A small file of byte pairs or words with other members. */
function small(more: object, model: object = {}): Tokenizer {
  return new Tokenizer({ ...files.small, ...more, model: { ...files.small.model, ...model } });
}

/** A vocabulary of runs of a, up to so many, and of b. */
function runsOfA(most: number): Record<string, number> {
  return Object.fromEntries([...Array.from({ length: most }, (_, k) => ["a".repeat(k + 1), k]), ["b", most]]);
}

const PIECES = { type: "WordPiece", unk_token: "b", continuing_subword_prefix: "", max_input_chars_per_word: 1000 };
const DOUBLED = Array.from({ length: 6 }, (_, k) => ["a".repeat(2 ** k), "a".repeat(2 ** k)]);
const flags = { single_word: false, lstrip: true, rstrip: true, normalized: false, special: true };
const addedTokens = Array.from({ length: 10_000 }, (_, k) => ({
  id: 9 + k,
  content: `${"a".repeat(250)}b${k}`,
  ...flags,
}));
const split = (expression: string) => ({
  pre_tokenizer: { type: "Split", pattern: { Regex: expression }, behavior: "Isolated", invert: false },
});

test.for<[string, string, () => Tokenizer]>([
  [
    "pieces of long words",
    `${"a".repeat(999)} `,
    () =>
      new Tokenizer({
        ...files.small,
        pre_tokenizer: { type: "BertPreTokenizer" },
        model: { ...PIECES, vocab: { ...runsOfA(1), [`${"a".repeat(999)}c`]: 2 } },
      }),
  ],
  ["merges of a word without end", "a", () => small({}, { vocab: runsOfA(64), merges: DOUBLED })],
  ["many added tokens", "a ", () => small({ added_tokens: addedTokens })],
  ["added tokens that nearly are there", "a", () => small({ added_tokens: addedTokens })],
  ["alternatives that overlap", "a", () => small(split(`${"(?:a|a|aa)".repeat(40)}b`))],
  ["repetitions in a row", "a", () => small(split(`${"a*".repeat(100)}b`))],
  ["what may be there in a row", "a", () => small(split(`${"a?".repeat(100)}b`))],
  ["a look at every letter", "a", () => small(split("a*(?!a)(?=b)|a"))],
])("the work for %s grows as the text does", ([, text, make]) => {
  const tokenizer = make();
  const [once, twice] = [4000, 8000].map((length) => {
    const work = new Work();
    tokenizer.encode(text.repeat(length / text.length), work);
    return work.steps / length;
  });
  expect(twice).toBeLessThan(1.2 * once! + 1);
  expect(twice).toBeLessThan(1100);
});

test("half a character is refused in a text of an app", () => {
  const [field] = planOf().examples.fields;
  const tokenizer = new Tokenizer(wordPiece.file);
  expect(() => tokensOf(field!, tokenizer, ["a", "b\ud800"], 2, new Work())).toThrow(
    "fails at the text of example 1: half a character",
  );
});

test("work stops within a text when there is no time left", async () => {
  let asked = 0;
  const tokenizer = new Tokenizer(wordPiece.file);
  const work = new Work(() => ++asked < 3);
  expect(() => tokenizer.encode("fox ".repeat(100_000), work)).toThrow("stopped while texts became tokens");
  expect(work.steps).toBeLessThan(500_000);
});

test("tokens that an app made itself stay as they are", async () => {
  const made = { count: 1, columns: new Map([["text", { shape: [6], values: new Int32Array(6) }]]) };
  expect((await tokenized(planOf(), made, file, () => true)).examples).toEqual(made);
});

test("a tokenizer is among the blobs that a device keeps", () => {
  expect(keptRefs(planOf()).at(-1)).toEqual({ sha256: "0".repeat(64), size: 3 });
});

test.for<[string, object, Examples, object, RegExp]>([
  ["no UTF-8", {}, examplesOf("a", new Uint8Array([0xff, 0x41])), wordPiece.file, /example 1 is not text in UTF-8/],
  [
    "another vocabulary",
    { high: 4 },
    examplesOf("a b"),
    wordPiece.file,
    /gives token \d+; the model knows those below 4/,
  ],
  [
    "padding that a text has",
    { tokenizer: { blob: { sha256: "0".repeat(64), size: 3 }, padding: 2 } },
    examplesOf("a b"),
    wordPiece.file,
    /gives token 2, which is the field's padding/,
  ],
  ["no room", { shape: [2] }, examplesOf("a b"), wordPiece.file, /room for 2 tokens, and its tokenizer adds 2/],
  [
    "a trial with other tokens",
    { tokenizer: { ...planOf().examples.fields[0]!.tokenizer, trial: [["fox", [2, 3]]] } },
    examplesOf("a"),
    wordPiece.file,
    /does not load: "fox" has other tokens here than where the plan was exported/,
  ],
  ["no file", {}, examplesOf("a"), { version: 1 }, /the tokenizer of field text does not load: malformed tokenizer/],
  [
    "an unknown kind",
    {},
    examplesOf("a"),
    { ...wordPiece.file, normalizer: { type: "Precompiled" } },
    /malformed tokenizer: .*received "Precompiled" at normalizer.type/,
  ],
])("%s is refused", async ([, more, examples, content, message]) => {
  const blob = async () => utf8(JSON.stringify(content));
  await expect(tokenized(planOf(more), examples, blob, () => true)).rejects.toThrow(message);
});

test.for<[object, RegExp]>([
  [{ shape: [] }, /tokens are int32\[length\]/],
  [{ dtype: "int64" }, /tokens are int32\[length\]/],
  [{ high: null }, /the vocabulary as high/],
  [
    { tokenizer: { blob: { sha256: "0".repeat(64), size: 3 }, padding: 1000 } },
    /padded with 1000; tokens are below 1000/,
  ],
])("a plan whose field is no text is refused: %j", ([more, message]) => {
  expect(() => planOf(more)).toThrow(message);
});
