/** The file of a tokenizer, member by member: what has the same meaning for devices in every language, and nothing else.
 * device_runtime/texts.py is the same table. Spec: plan §1.3.
 */

import * as v from "valibot";
import { checked } from "../bytes.ts";
import { PlanRefused } from "../errors.ts";
import { codesOf, isSpace } from "./characters.ts";

const MOST_PARTS = 16;
const LONGEST_WORD = 1000;
const LONGEST_ADDED = 256;
/** Tokens are below this. */
export const TOKENS = 1 << 24;

const id = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(TOKENS - 1));
const nothing = v.nullable(v.literal(""));
const boolean = v.boolean();
const vocabulary = v.custom<Record<string, number>>(
  (value) => {
    const ids: unknown[] = Object.values(value ?? {});
    return (
      typeof value === "object" &&
      value !== null &&
      ids.every((one) => v.is(id, one)) &&
      new Set(ids).size === ids.length
    );
  },
  "not a vocabulary of words, each with an id of its own", // a record would lose the words prototype and constructor
);
const added = v.strictObject({
  id,
  content: v.pipe(
    v.string(),
    v.check((content) => content !== "" && [...content].length <= LONGEST_ADDED, "an empty or a very long token"),
  ),
  single_word: v.literal(false),
  lstrip: boolean,
  rstrip: boolean,
  normalized: boolean,
  special: boolean,
});
const bpe = v.strictObject({
  type: v.literal("BPE"),
  vocab: vocabulary,
  merges: v.array(v.tuple([v.string(), v.string()])),
  unk_token: v.nullable(v.string()),
  fuse_unk: boolean,
  ignore_merges: boolean,
  byte_fallback: v.literal(false),
  dropout: v.nullable(v.literal(0)),
  continuing_subword_prefix: nothing,
  end_of_word_suffix: nothing,
});
const wordPiece = v.strictObject({
  type: v.literal("WordPiece"),
  vocab: vocabulary,
  unk_token: v.string(),
  continuing_subword_prefix: v.string(),
  max_input_chars_per_word: v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(LONGEST_WORD)),
});
const normalizer = v.variant("type", [
  v.strictObject({
    type: v.literal("BertNormalizer"),
    clean_text: boolean,
    handle_chinese_chars: boolean,
    strip_accents: v.nullable(boolean),
    lowercase: boolean,
  }),
  v.strictObject({ type: v.picklist(["Lowercase", "NFC", "NFD", "NFKC", "NFKD"]) }),
]);
const byteLevel = v.strictObject({
  type: v.literal("ByteLevel"),
  add_prefix_space: boolean,
  trim_offsets: boolean,
  use_regex: boolean,
});
const preTokenizer = v.variant("type", [
  v.strictObject({ type: v.literal("BertPreTokenizer") }),
  byteLevel,
  v.strictObject({ type: v.literal("Digits"), individual_digits: boolean }),
  v.strictObject({
    type: v.literal("Split"),
    pattern: v.strictObject({ Regex: v.string() }),
    behavior: v.literal("Isolated"),
    invert: v.literal(false),
  }),
]);
const pair = v.tuple([v.string(), id]);
const special = v.strictObject({ SpecialToken: v.strictObject({ id: v.string(), type_id: id }) });
const sequence = v.strictObject({ Sequence: v.strictObject({ id: v.literal("A"), type_id: id }) });
const postProcessor = v.variant("type", [
  v.strictObject({ type: v.literal("BertProcessing"), cls: pair, sep: pair }),
  v.strictObject({
    type: v.literal("RobertaProcessing"),
    cls: pair,
    sep: pair,
    trim_offsets: boolean,
    add_prefix_space: boolean,
  }),
  byteLevel,
  v.strictObject({
    type: v.literal("TemplateProcessing"),
    single: v.array(v.union([special, sequence])),
    pair: v.array(v.unknown()),
    special_tokens: v.record(
      v.string(),
      v.strictObject({ id: v.string(), ids: v.array(id), tokens: v.array(v.string()) }),
    ),
  }),
]);
const fileSchema = v.strictObject({
  version: v.literal("1.0"),
  truncation: v.null(),
  padding: v.null(),
  decoder: v.null(),
  added_tokens: v.array(added),
  normalizer: partsOf("normalizers", normalizer),
  pre_tokenizer: partsOf("pretokenizers", preTokenizer),
  post_processor: partsOf("processors", postProcessor),
  model: v.variant("type", [bpe, wordPiece]),
});

/** A file: of every kind of part a list. */
type TokenizerFile = v.InferOutput<typeof fileSchema>;
export type Added = v.InferOutput<typeof added>;
export type BytePairs = v.InferOutput<typeof bpe>;
export type WordPiece = v.InferOutput<typeof wordPiece>;
export type Normalizer = v.InferOutput<typeof normalizer>;
export type PreTokenizer = v.InferOutput<typeof preTokenizer>;
export type PostProcessor = v.InferOutput<typeof postProcessor>;

/** The members of a file, checked. Throws FormatError or PlanRefused, naming what devices do not know. */
export function checkedFile(file: unknown): TokenizerFile {
  const found = checked(fileSchema, file, "tokenizer");
  const { added_tokens, pre_tokenizer, post_processor, model } = found;
  if (pre_tokenizer.filter(({ type }) => type === "ByteLevel").length > 1)
    throw unknown("two pre-tokenizers ByteLevel");
  if (post_processor.filter(({ type }) => type !== "ByteLevel").length > 1) throw unknown("two post-processors");
  for (const processor of post_processor) if (processor.type === "TemplateProcessing") checkTemplate(processor);
  if (model.type === "WordPiece" && !Object.hasOwn(model.vocab, model.unk_token)) {
    throw unknown("a vocabulary without its unknown token");
  }
  checkAdded(added_tokens, model.vocab);
  return found;
}

/** What is refused. */
export function unknown(what: string): PlanRefused {
  return new PlanRefused(`its tokenizer has ${what}, which devices do not know`);
}

/** A part, a sequence of some or none, as a list. */
function partsOf<S extends v.GenericSchema<unknown, object>>(name: string, one: S) {
  const several = v.strictObject({
    type: v.literal("Sequence"),
    [name]: v.pipe(v.array(one), v.maxLength(MOST_PARTS)),
  });
  const isSequence = (value: unknown) => (value as { type?: unknown } | null)?.type === "Sequence";
  return v.pipe(
    v.lazy((value) => (value === null ? v.null() : isSequence(value) ? several : one)),
    v.transform((value): v.InferOutput<S>[] => {
      if (value === null) return [];
      return isSequence(value) ? (value as Record<string, v.InferOutput<S>[]>)[name]! : [value as v.InferOutput<S>];
    }),
  );
}

function checkTemplate({ single, special_tokens }: Extract<PostProcessor, { type: "TemplateProcessing" }>): void {
  if (single.filter((piece) => "Sequence" in piece).length !== 1) throw unknown("a template without one $A");
  for (const piece of single) {
    if ("SpecialToken" in piece && !Object.hasOwn(special_tokens, piece.SpecialToken.id)) {
      throw unknown(`a template with an unknown ${JSON.stringify(piece.SpecialToken.id)}`);
    }
  }
}

/** Refuses ids that the library would not give: those of the vocabulary, then one after the other beyond it. */
function checkAdded(added_tokens: readonly Added[], vocab: Record<string, number>): void {
  if (new Set(added_tokens.map(({ content }) => content)).size < added_tokens.length)
    throw unknown("an added token twice");
  if (added_tokens.some(({ lstrip, rstrip }) => lstrip || rstrip)) {
    const beside = added_tokens.find(
      ({ content }) => isSpace(codesOf(content)[0]!) || isSpace(codesOf(content).at(-1)!),
    );
    if (beside) {
      throw unknown(`the added token ${JSON.stringify(beside.content)} beside one that takes the spaces around it`);
    }
  }
  let next = Object.keys(vocab).length;
  for (const { id, content } of added_tokens) {
    const expected = Object.hasOwn(vocab, content) ? vocab[content]! : next++;
    if (id !== expected) throw unknown(`the added token ${JSON.stringify(content)} as ${id} in place of ${expected}`);
  }
}
