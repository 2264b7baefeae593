/** Texts become the tokens that Python makes of them, and what cannot is refused in one line. */

import { expect, test } from "vitest";
import { concat, utf8 } from "../src/core/bytes.ts";
import type { Examples } from "../src/core/examples.ts";
import { Expression } from "../src/core/expression.ts";
import { decodePlan, keptRefs, type Plan } from "../src/core/plan.ts";
import { tokenized } from "../src/core/texts.ts";
import { Tokenizer } from "../src/core/tokenizer.ts";
import { type Vector, vectors } from "./vectors.ts";

const { texts, tokenizers, expressions } = vectors("tokenizers.json");
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
    const { before, own, after } = tokenizer.encode(text);
    expect([text, [...before, ...own, ...after]]).toEqual([text, ids[place]]);
  }
});

test("words that every object has are in the vocabulary too", () => {
  const vocab = { "[UNK]": 0, proto: 1, "##type": 2, prototype: 3, constructor: 4, ["__proto__"]: 5 };
  const model = { ...(wordPiece.file as { model: object }).model, type: "WordPiece", unk_token: "[UNK]", vocab };
  const tokenizer = new Tokenizer({ ...wordPiece.file, added_tokens: [], post_processor: null, model });
  expect(tokenizer.encode("prototype constructor").own).toEqual([3, 4]);
});

test("a text that is too long keeps what is around it, and is counted", async () => {
  const { examples, cut } = await tokenized(planOf(), examplesOf("a, b. c! d? e", "a", ""), file, () => true);
  const { shape, values } = examples.columns.get("text")!;
  const whole = new Tokenizer(wordPiece.file).encode("a, b").own;
  const one = new Tokenizer(wordPiece.file).encode("a").own;
  expect([shape, cut]).toEqual([[6], 1]);
  expect([...values].slice(0, 5)).toEqual([2, ...whole.slice(0, 3), new Tokenizer(wordPiece.file).encode(".").own[0]]);
  expect([...values].slice(5)).toEqual([3, 2, ...one, 3, 0, 0, 0, 2, 3, 0, 0, 0, 0]);
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
    const letters = Array.from(text as string);
    const found = [...new Expression(expression).matches(letters)].map((ends) => letters.slice(...ends).join(""));
    expect([text, found]).toEqual([text, pieces[place]]);
  }
});

test.for<[string, string]>([
  ["alternatives that overlap", `${"(?:a|a|aa)".repeat(40)}b`],
  ["repetitions in a row", `${"a*".repeat(100)}b`],
  ["what may be there in a row", `${"a?".repeat(100)}b`],
  ["a look at every letter", "a*(?!a)(?=b)|a"],
])("a text takes no more than seconds for %s", ([, expression]) => {
  const letters = Array.from("a".repeat(5000));
  expect([...new Expression(expression).matches(letters)].length).toBeLessThanOrEqual(letters.length);
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
  ["no file", {}, examplesOf("a"), { version: 1 }, /the tokenizer of field text does not load: malformed tokenizer/],
  [
    "an unknown kind",
    {},
    examplesOf("a"),
    { ...wordPiece.file, normalizer: { type: "Precompiled" } },
    /has the normalizer Precompiled, which devices in TypeScript do not know/,
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
