/** Tokenizers of Hugging Face's `tokenizer.json`: WordPiece as of BERT, and byte-level BPE as of GPT-2. The same ids as
 * Python's library of that name, which tests hold. No engine's own idea of white space or case is used. Spec: plan §1.3.
 */

import * as v from "valibot";
import { PlanRefused } from "./errors.ts";
import { Expression, SPACES } from "./expression.ts";
import { checked } from "./json.ts";

/** The ids of a text: its own, and those that the tokenizer puts before and after any text. */
interface Encoded {
  readonly before: readonly number[];
  readonly own: readonly number[];
  readonly after: readonly number[];
}

type Split = (text: string) => string[];
type Change = (text: string) => string;
const optional = v.nullish(v.string(), null);
const part = v.looseObject({ type: v.string() });
type Part = v.InferOutput<typeof part>;
const addedSchema = v.object({
  id: v.number(),
  content: v.string(),
  single_word: v.boolean(),
  lstrip: v.boolean(),
  rstrip: v.boolean(),
  normalized: v.boolean(),
});
type Added = v.InferOutput<typeof addedSchema>;
function isVocabulary(value: unknown): boolean {
  return typeof value === "object" && value !== null && Object.values(value).every((id) => typeof id === "number");
}

const modelSchema = v.object({
  type: v.picklist(["WordPiece", "BPE"]),
  vocab: v.custom<Record<string, number>>(isVocabulary), // a record would lose the words prototype and constructor
  unk_token: optional,
  continuing_subword_prefix: optional,
  end_of_word_suffix: optional,
  max_input_chars_per_word: v.optional(v.number(), 100),
  merges: v.optional(v.array(v.union([v.string(), v.tuple([v.string(), v.string()])])), []),
  ignore_merges: v.optional(v.boolean(), false),
  byte_fallback: v.optional(v.boolean(), false),
  dropout: v.nullish(v.number(), null),
});
type Model = v.InferOutput<typeof modelSchema>;
const fileSchema = v.object({
  added_tokens: v.array(addedSchema),
  normalizer: v.nullable(part),
  pre_tokenizer: v.nullable(part),
  post_processor: v.nullable(part),
  model: modelSchema,
});
const bertSchema = v.object({
  clean_text: v.boolean(),
  handle_chinese_chars: v.boolean(),
  strip_accents: v.nullable(v.boolean()),
  lowercase: v.boolean(),
});
const levelSchema = v.object({ add_prefix_space: v.boolean(), use_regex: v.optional(v.boolean(), true) });
const splitSchema = v.object({
  pattern: v.object({ Regex: v.string() }),
  behavior: v.literal("Isolated"),
  invert: v.literal(false),
});
const pairSchema = v.object({ cls: v.tuple([v.string(), v.number()]), sep: v.tuple([v.string(), v.number()]) });
const templateSchema = v.object({
  single: v.array(v.union([v.object({ SpecialToken: v.object({ id: v.string() }) }), v.object({ Sequence: v.any() })])),
  special_tokens: v.record(v.string(), v.object({ ids: v.array(v.number()) })),
});

const SPACE = new RegExp(`[${SPACES}]`, "u");
const HIDDEN = /(?![\t\n\r])[\ufffd\p{Cc}\p{Cf}\p{Co}\p{Cs}]/u;
const HAN =
  /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}]/u;
const GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const SHOWN = 60;
const FORMS = ["NFC", "NFD", "NFKC", "NFKD"];

/** A loaded tokenizer. */
export class Tokenizer {
  readonly #raw: readonly Added[];
  readonly #normalized: readonly Added[];
  readonly #change: Change;
  readonly #split: Split;
  readonly #word: (word: string) => number[];
  readonly #around: readonly [readonly number[], readonly number[]];

  /** file: what `tokenizer.json` says, parsed. Throws PlanRefused for a kind that is not known here. */
  constructor(file: unknown) {
    const { added_tokens, normalizer, pre_tokenizer, post_processor, model } = checked(fileSchema, file, "tokenizer");
    const longest = added_tokens.toSorted((one, other) => other.content.length - one.content.length);
    if (longest.some(({ single_word }) => single_word)) throw unknown("an added token that is a single word");
    this.#raw = longest.filter(({ normalized }) => !normalized);
    this.#change = changes(normalizer);
    this.#normalized = longest
      .filter(({ normalized }) => normalized)
      .map((added) => ({ ...added, content: this.#change(added.content) }));
    this.#split = splits(pre_tokenizer);
    this.#word = model.type === "WordPiece" ? wordPiece(model) : bytePairs(model);
    this.#around = around(post_processor);
  }

  /** The ids of a text. */
  encode(text: string): Encoded {
    const own: number[] = [];
    for (const piece of parted(text, this.#raw)) {
      if (typeof piece === "number") own.push(piece);
      else {
        for (const inner of parted(this.#change(piece), this.#normalized)) {
          if (typeof inner === "number") own.push(inner);
          else for (const word of this.#split(inner)) for (const id of this.#word(word)) own.push(id);
        }
      }
    }
    return { before: this.#around[0], own, after: this.#around[1] };
  }
}

/** The text between added tokens, and their ids: leftmost first, and the longest of several. */
function parted(text: string, added: readonly Added[]): (string | number)[] {
  const found: (string | number)[] = [];
  let from = 0;
  for (let place = 0; place < text.length; ) {
    const token = added.find(({ content }) => content !== "" && text.startsWith(content, place));
    if (token === undefined) {
      place += 1;
      continue;
    }
    let start = place;
    let end = place + token.content.length;
    while (token.lstrip && start > from && SPACE.test(text[start - 1]!)) start -= 1;
    while (token.rstrip && end < text.length && SPACE.test(text[end]!)) end += 1;
    if (start > from) found.push(text.slice(from, start));
    found.push(token.id);
    from = place = end;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

function changes(normalizer: Part | null): Change {
  if (normalizer === null) return (text) => text;
  const { type } = normalizer;
  if (FORMS.includes(type)) return (text) => text.normalize(type);
  if (type === "Lowercase") return lower;
  if (type === "Sequence") {
    const all = checked(v.array(part), normalizer["normalizers"], "normalizers").map(changes);
    return (text) => all.reduce((changed, change) => change(changed), text);
  }
  if (type !== "BertNormalizer") throw unknown(`the normalizer ${type}`);
  const { clean_text, handle_chinese_chars, strip_accents, lowercase } = checked(bertSchema, normalizer, type);
  return (text) => {
    let changed = text;
    if (clean_text) changed = each(changed, (one) => (HIDDEN.test(one) ? "" : SPACE.test(one) ? " " : one));
    if (handle_chinese_chars) changed = each(changed, (one) => (HAN.test(one) ? ` ${one} ` : one));
    if (strip_accents ?? lowercase) changed = changed.normalize("NFD").replace(/\p{Mn}/gu, "");
    return lowercase ? lower(changed) : changed;
  };
}

/** Letter by letter, so that a sigma at the end of a word is like any other. */
function lower(text: string): string {
  return each(text, (one) => one.toLowerCase());
}

function each(text: string, change: Change): string {
  return Array.from(text, change).join("");
}

function splits(pre: Part | null): Split {
  if (pre?.type === "BertPreTokenizer") return bertWords;
  const parts = pre?.type === "Sequence" ? checked(v.array(part), pre["pretokenizers"], "pretokenizers") : [pre];
  const steps = parts.map(level);
  return (text) => steps.reduce((pieces, step) => pieces.flatMap(step), text === "" ? [] : [text]);
}

function level(pre: Part | null): Split {
  if (pre?.type === "Split") return isolated(checked(splitSchema, pre, pre.type).pattern.Regex);
  if (pre?.type === "Digits") return isolated(pre["individual_digits"] === true ? "\\p{N}" : "\\p{N}+");
  if (pre?.type !== "ByteLevel") throw unknown(`the pre-tokenizer ${pre?.type ?? "null"}`);
  const { add_prefix_space, use_regex } = checked(levelSchema, pre, pre.type);
  const cut = use_regex ? isolated(GPT2) : (text: string) => [text];
  return (text) => {
    const prefixed = add_prefix_space && !text.startsWith(" ") ? ` ${text}` : text;
    return cut(prefixed).map((piece) => Array.from(new TextEncoder().encode(piece), (byte) => LETTERS[byte]).join(""));
  };
}

function bertWords(text: string): string[] {
  const words = [""];
  for (const one of text) {
    if (SPACE.test(one)) words.push("");
    else if (PUNCTUATION.test(one)) words.push(one, "");
    else words[words.length - 1] += one;
  }
  return words.filter((word) => word !== "");
}

/** Matches of an expression and what is between them. */
function isolated(source: string): Split {
  const expression = expressionOf(source);
  return (text) => {
    const letters = Array.from(text);
    const pieces: string[] = [];
    let from = 0;
    for (const [start, end] of expression.matches(letters)) {
      if (start > from) pieces.push(letters.slice(from, start).join(""));
      pieces.push(letters.slice(start, end).join(""));
      from = end;
    }
    if (from < letters.length) pieces.push(letters.slice(from).join(""));
    return pieces;
  };
}

function expressionOf(source: string): Expression {
  try {
    return new Expression(source);
  } catch (error) {
    const what = error instanceof SyntaxError ? error.message : String(error);
    throw unknown(`${what} in the expression ${JSON.stringify(source.slice(0, SHOWN))}`);
  }
}

function wordPiece({ vocab, unk_token, continuing_subword_prefix, max_input_chars_per_word }: Model) {
  const ids = new Map(Object.entries(vocab));
  const unknownId = ids.get(unk_token ?? "");
  if (unknownId === undefined) throw unknown("a vocabulary without its unknown token");
  const prefix = continuing_subword_prefix ?? "";
  let longest = 0;
  for (const piece of ids.keys()) longest = Math.max(longest, piece.length);
  return (word: string): number[] => {
    const letters = Array.from(word);
    if (letters.length > max_input_chars_per_word) return [unknownId];
    const found: number[] = [];
    for (let start = 0; start < letters.length; ) {
      let end = Math.min(letters.length, start + longest);
      const lead = start > 0 ? prefix : "";
      while (end > start && !ids.has(lead + letters.slice(start, end).join(""))) end -= 1;
      if (end === start) return [unknownId];
      found.push(ids.get(lead + letters.slice(start, end).join(""))!);
      start = end;
    }
    return found;
  };
}

function bytePairs(model: Model) {
  if (model.byte_fallback || model.dropout || model.continuing_subword_prefix || model.end_of_word_suffix) {
    throw unknown("a BPE with bytes as a fallback, dropout, a prefix or a suffix");
  }
  const ids = new Map(Object.entries(model.vocab));
  const ranks = new Map(model.merges.map((pair, rank) => [typeof pair === "string" ? pair : pair.join(" "), rank]));
  return (word: string): number[] => {
    const whole = ids.get(word);
    if (model.ignore_merges && whole !== undefined) return [whole];
    const pieces = Array.from(word).filter((one) => ids.has(one));
    for (;;) {
      let best = Infinity;
      let at = -1;
      for (let place = 0; place + 1 < pieces.length; place++) {
        const rank = ranks.get(`${pieces[place]} ${pieces[place + 1]}`);
        if (rank !== undefined && rank < best) [best, at] = [rank, place];
      }
      if (at < 0) return pieces.map((piece) => ids.get(piece)!);
      pieces.splice(at, 2, pieces[at]! + pieces[at + 1]!);
    }
  };
}

/** The ids before and after any text. */
function around(post: Part | null): [readonly number[], readonly number[]] {
  if (post === null || post.type === "ByteLevel") return [[], []];
  if (post.type === "BertProcessing" || post.type === "RobertaProcessing") {
    const { cls, sep } = checked(pairSchema, post, post.type);
    return [[cls[1]], [sep[1]]];
  }
  if (post.type === "Sequence") {
    const all = checked(v.array(part), post["processors"], "processors").map(around);
    return [all.toReversed().flatMap(([before]) => before), all.flatMap(([, after]) => after)];
  }
  if (post.type !== "TemplateProcessing") throw unknown(`the post-processor ${post.type}`);
  const { single, special_tokens } = checked(templateSchema, post, post.type);
  const middle = single.findIndex((one) => "Sequence" in one);
  const ids = (items: typeof single) =>
    items.flatMap((one) => ("SpecialToken" in one ? (special_tokens[one.SpecialToken.id]?.ids ?? []) : []));
  return [ids(single.slice(0, middle)), ids(single.slice(middle + 1))];
}

/** GPT-2's letter for every byte: printable bytes are themselves. */
const LETTERS = (() => {
  const isPrintable = (byte: number) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : next++));
})();

function unknown(what: string): PlanRefused {
  return new PlanRefused(`its tokenizer has ${what}, which devices in TypeScript do not know`);
}
