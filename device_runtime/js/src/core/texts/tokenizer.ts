/** Tokenizers of Hugging Face's `tokenizer.json`: WordPiece as of BERT, and BPE as of GPT-2, and texts of examples as tokens.
 *
 * The ids are those of Python's library of that name, which tests hold. No engine's own idea of white space, case or class
 * is used. Spec: plan §1.3.
 */

import type { Bytes } from "../bytes.ts";
import { DeadlinePassed, PlanRefused } from "../errors.ts";
import { type Column, type Examples, invalid, lineOf, padded } from "../plans/examples.ts";
import type { BlobRef, Field, Plan } from "../plans/plan.ts";
import { codesOf, has, isSpace, lowered, normalised, Work } from "./characters.ts";
import { Expression } from "./expression.ts";
import * as files from "./tokenizer-file.ts";
import { bytePairs, Trie, type Words, wordPieces } from "./words.ts";

/** The ids of a text: its own, and those that the tokenizer puts before and after any text. */
interface Encoded {
  readonly before: readonly number[];
  readonly own: readonly number[];
  readonly after: readonly number[];
}

type Split = (text: string, work: Work) => string[];
type Change = (text: string) => string;

const GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const SHOWN = 60;
/** First and last characters of what BERT takes for Chinese. */
const HAN: readonly [number, number][] = [
  [0x4e00, 0x9fff],
  [0x3400, 0x4dbf],
  [0x20000, 0x2a6df],
  [0x2a700, 0x2b73f],
  [0x2b740, 0x2b81f],
  [0x2b920, 0x2ceaf],
  [0xf900, 0xfaff],
  [0x2f800, 0x2fa1f],
];

/** A loaded tokenizer. */
export class Tokenizer {
  readonly #raw: AddedTokens;
  readonly #normalized: AddedTokens;
  readonly #change: Change;
  readonly #split: Split;
  readonly #words: Words;
  readonly #around: readonly [readonly number[], readonly number[]];

  /** file: what `tokenizer.json` says, parsed. Throws FormatError or PlanRefused for what is not known here. */
  constructor(file: unknown) {
    const { added_tokens, normalizer, pre_tokenizer, post_processor, model } = files.checkedFile(file);
    const changes = normalizer.map(changeOf);
    this.#change = (text) => changes.reduce((changed, change) => change(changed), text);
    const normalized = added_tokens.filter((added) => added.normalized);
    this.#raw = new AddedTokens(added_tokens.filter((added) => !added.normalized));
    this.#normalized = new AddedTokens(normalized.map((added) => ({ ...added, content: this.#change(added.content) })));
    const splits = pre_tokenizer.map(splitOf);
    this.#split = (text, work) =>
      splits.reduce((pieces, split) => pieces.flatMap((piece) => split(piece, work)), [text]);
    this.#words = model.type === "WordPiece" ? wordPieces(model) : bytePairs(model);
    this.#around = around(post_processor);
  }

  /** The ids of a text. Throws PlanRefused for one that the vocabulary has no token for, and as `work`. */
  encode(text: string, work: Work): Encoded {
    const own: number[] = [];
    for (const piece of this.#raw.parted(text, work)) {
      if (typeof piece === "number") {
        own.push(piece);
        continue;
      }
      work.spend(piece.length);
      for (const inner of this.#normalized.parted(this.#change(piece), work)) {
        if (typeof inner === "number") own.push(inner);
        else for (const word of this.#split(inner, work)) for (const id of this.#words(word, work)) own.push(id);
      }
    }
    return { before: this.#around[0], own, after: this.#around[1] };
  }
}

/** Tokens that are found in texts before anything else is. */
class AddedTokens {
  readonly #trie = new Trie();
  readonly #all: readonly files.Added[];

  /** Throws PlanRefused where two cannot be told apart. */
  constructor(all: readonly files.Added[]) {
    this.#all = all;
    for (const [place, { content }] of all.entries()) {
      if (content === "" || !this.#trie.add(content, place)) {
        throw files.unknown("an added token that normalises to nothing or to another one");
      }
    }
  }

  /** The text between added tokens, and their ids: leftmost first, and the longest of several. As in the library, one that
   * takes the spaces after it leaves them to be found again.
   */
  parted(text: string, work: Work): (string | number)[] {
    if (this.#all.length === 0) return text === "" ? [] : [text];
    const codes = codesOf(text);
    const parts: (string | number)[] = [];
    let from = 0;
    let spaces = 0;
    const take = (to: number) => {
      if (to > from) parts.push(textOf(codes, from, to));
    };
    for (let place = 0; place < codes.length; ) {
      const found = this.#trie.longest(codes, place, work);
      if (found === undefined) {
        place += 1;
        continue;
      }
      const { id, lstrip, rstrip } = this.#all[found.value]!;
      let start = place;
      while (lstrip && start > from && isSpace(codes[start - 1]!)) start -= 1;
      take(start);
      parts.push(id);
      from = place = found.end;
      if (rstrip) {
        spaces = Math.max(spaces, from);
        while (spaces < codes.length && isSpace(codes[spaces]!)) spaces += 1;
        from = spaces;
      }
    }
    take(codes.length);
    return parts;
  }
}

function textOf(codes: readonly number[], start: number, end: number): string {
  let text = "";
  for (let place = start; place < end; place++) text += String.fromCodePoint(codes[place]!);
  return text;
}

function changeOf(normalizer: files.Normalizer): Change {
  if (normalizer.type === "Lowercase") return lowered;
  if (normalizer.type !== "BertNormalizer") {
    const { type } = normalizer;
    return (text) => normalised(text, type);
  }
  const { clean_text, handle_chinese_chars, strip_accents, lowercase } = normalizer;
  return (text) => {
    let changed = text;
    if (clean_text) changed = each(changed, (one, code) => (has(code, "h") ? "" : isSpace(code) ? " " : one));
    if (handle_chinese_chars)
      changed = each(changed, (one, code) =>
        HAN.some(([first, last]) => code >= first && code <= last) ? ` ${one} ` : one,
      );
    if (strip_accents ?? lowercase) {
      changed = each(normalised(changed, "NFD"), (one, code) => (has(code, "a") ? "" : one));
    }
    return lowercase ? lowered(changed) : changed;
  };
}

function each(text: string, change: (one: string, code: number) => string): string {
  return Array.from(text, (one) => change(one, one.codePointAt(0)!)).join("");
}

function splitOf(pre: files.PreTokenizer): Split {
  if (pre.type === "Split") return isolated(pre.pattern.Regex);
  if (pre.type === "BertPreTokenizer") return bertWords;
  return pre.type === "Digits" ? digits(pre.individual_digits) : byteLevel(pre.add_prefix_space, pre.use_regex);
}

/** Words between white space, and punctuation. */
function bertWords(text: string, work: Work): string[] {
  work.spend(text.length);
  const words = [""];
  for (const one of text) {
    const code = one.codePointAt(0)!;
    if (isSpace(code)) words.push("");
    else if (has(code, "p")) words.push(one, "");
    else words[words.length - 1] += one;
  }
  return words.filter((word) => word !== "");
}

/** Numbers, each character of them alone or as long as they are, and what is between them. */
function digits(alone: boolean): Split {
  return (text, work) => {
    work.spend(text.length);
    const words: string[] = [];
    let wasNumber = true;
    for (const one of text) {
      const isNumber = has(one.codePointAt(0)!, "n");
      if (words.length === 0 || isNumber !== wasNumber || (isNumber && alone)) words.push(one);
      else words[words.length - 1] += one;
      wasNumber = isNumber;
    }
    return words;
  };
}

function byteLevel(addPrefixSpace: boolean, useRegex: boolean): Split {
  const cut: Split = useRegex ? isolated(GPT2) : (text) => [text];
  const letters = bytesAsLetters();
  return (text, work) => {
    work.spend(text.length);
    const prefixed = addPrefixSpace && !text.startsWith(" ") ? ` ${text}` : text;
    return cut(prefixed, work).map((piece) =>
      Array.from(new TextEncoder().encode(piece), (byte) => letters[byte]).join(""),
    );
  };
}

/** Matches of an expression and what is between them. Throws PlanRefused for one that is not known. */
export function isolated(source: string): Split {
  const expression = expressionOf(source);
  return (text, work) => {
    const codes = codesOf(text);
    const pieces: string[] = [];
    let from = 0;
    for (const [start, end] of [...expression.matches(codes, work), [codes.length, codes.length] as const]) {
      if (start > from) pieces.push(textOf(codes, from, start));
      if (end > start) pieces.push(textOf(codes, start, end));
      from = end;
    }
    return pieces;
  };
}

function expressionOf(source: string): Expression {
  try {
    return new Expression(source);
  } catch (error) {
    const what = error instanceof SyntaxError ? error.message : String(error);
    throw files.unknown(`${what} in the expression ${JSON.stringify(source.slice(0, SHOWN))}`);
  }
}

/** The ids before and after any text, of the one processor that adds some. */
function around(processors: readonly files.PostProcessor[]): [readonly number[], readonly number[]] {
  const adding = processors.find(({ type }) => type !== "ByteLevel");
  if (adding === undefined || adding.type === "ByteLevel") return [[], []];
  if (adding.type !== "TemplateProcessing") return [[adding.cls[1]], [adding.sep[1]]];
  const { single, special_tokens } = adding;
  const middle = single.findIndex((piece) => "Sequence" in piece);
  const ids = (pieces: typeof single) =>
    pieces.flatMap((piece) => ("SpecialToken" in piece ? special_tokens[piece.SpecialToken.id]!.ids : []));
  return [ids(single.slice(0, middle)), ids(single.slice(middle + 1))];
}

/** GPT-2's letter for every byte: printable bytes are themselves. */
function bytesAsLetters(): string[] {
  const isPrintable = (byte: number) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : next++));
}

/** A surrogate without its other half, which an app's text may have and UTF-8 has not. */
const HALF = /[\ud800-\udfff]/u;

/** The examples with texts, uint8 `[bytes]`, as tokens, other lines of bytes as long as their shape says, and the number
 * of texts that were cut. keepGoing: asked before every text and within long ones; false ends the work with
 * DeadlinePassed. Throws PlanRefused for a tokenizer that does not load or fit the field, ExamplesError for what is no
 * UTF-8.
 */
export async function tokenized(
  plan: Plan,
  examples: Examples,
  blob: (ref: BlobRef) => Promise<Bytes>,
  keepGoing: () => boolean,
): Promise<{ examples: Examples; cut: number }> {
  const columns = new Map(examples.columns);
  const work = new Work(keepGoing);
  let cut = 0;
  for (const field of plan.examples.fields) {
    const column = columns.get(field.name);
    if (column === undefined) continue;
    if (field.tokenizer === undefined || !(column.values instanceof Uint8Array) || column.shape.length !== 1) {
      columns.set(field.name, padded(field.name, column, examples.count));
      continue;
    }
    const tokenizer = loadedTokenizer(field, await blob(field.tokenizer.blob), work);
    const made = tokensOf(field, tokenizer, textsOf(field, column, examples.count), examples.count, work);
    columns.set(field.name, { shape: field.shape, values: made.ids });
    cut += made.cut;
  }
  return { examples: { ...examples, columns }, cut };
}

function* textsOf(field: Field, column: Column, count: number): Generator<string> {
  for (let place = 0; place < count; place++) {
    yield rowText(field, lineOf(column, place), place);
  }
}

/** The tokens of so many texts, one text after the other, and how many were cut. Throws PlanRefused, and as `work`, which
 * is asked before every text.
 */
export function tokensOf(field: Field, tokenizer: Tokenizer, texts: Iterable<string>, count: number, work: Work) {
  const [length = 0] = field.shape;
  const ids = new Int32Array(count * length).fill(field.tokenizer!.padding);
  let cut = 0;
  let place = 0;
  for (const text of texts) {
    work.ask();
    if (HALF.test(text)) {
      throw new PlanRefused(
        `the tokenizer of field ${field.name} fails at the text of example ${place}: half a character`,
      );
    }
    const { before, own, after } = tokenizer.encode(text, work);
    const room = length - before.length - after.length;
    if (own.length > room) {
      cut += 1;
      if (room <= 0) {
        const added = before.length + after.length;
        throw new PlanRefused(
          `field ${field.name} has room for ${length} tokens, and its tokenizer adds ${added} to every text: export it ` +
            "with more tokens",
        );
      }
    }
    const whole = [...before, ...own.slice(0, Math.max(room, 0)), ...after];
    if (whole.includes(field.tokenizer!.padding)) {
      throw new PlanRefused(
        `the tokenizer of field ${field.name} gives token ${field.tokenizer!.padding}, which is the field's padding: ` +
          "export it with one that no text has",
      );
    }
    const most = whole.reduce((highest, id) => Math.max(highest, id), -1);
    if (most >= Number(field.high)) {
      throw new PlanRefused(
        `the tokenizer of field ${field.name} gives token ${most}; the model knows those below ${field.high}: export it ` +
          "with the tokenizer that it was trained with",
      );
    }
    ids.set(whole, place * length);
    place += 1;
  }
  return { ids, cut };
}

function rowText(field: Field, row: Bytes, place: number): string {
  let end = row.length;
  while (end > 0 && row[end - 1] === 0) end -= 1;
  try {
    return decoded(row.subarray(0, end));
  } catch {
    throw invalid(`field ${field.name} of example ${place} is not text in UTF-8`);
  }
}

/** The text of UTF-8 bytes, with a mark of byte order that is there. Throws TypeError. */
function decoded(data: Bytes): string {
  return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
}

/** The tokenizer of a field, from its file. Throws PlanRefused, also where it has other tokens for the plan's trial of it;
 * and as `work`.
 */
export function loadedTokenizer(field: Field, data: Bytes, work: Work): Tokenizer {
  try {
    const tokenizer = new Tokenizer(JSON.parse(decoded(data)));
    for (const [text, expected] of field.tokenizer!.trial) {
      const { before, own, after } = tokenizer.encode(text, work);
      if ([...before, ...own, ...after].join() !== expected.join()) {
        throw new PlanRefused(`${JSON.stringify(text)} has other tokens here than where the plan was exported`);
      }
    }
    return tokenizer;
  } catch (error) {
    if (error instanceof DeadlinePassed) throw error;
    const why = error instanceof Error ? error.message : String(error);
    throw new PlanRefused(`the tokenizer of field ${field.name} does not load: ${why}`);
  }
}
