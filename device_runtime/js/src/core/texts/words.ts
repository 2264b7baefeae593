/** Words as tokens: the longest pieces of a vocabulary as of BERT, and merged pairs as of GPT-2. Spec: plan §1.3. */

import { codesOf, type Work } from "./characters.ts";
import { type BytePairs, TOKENS, unknown, type WordPiece } from "./tokenizer-file.ts";

/** The tokens of a word. */
export type Words = (word: string, work: Work) => number[];

const CODES = 0x110000;

/** Words with a number each, to be found in texts letter by letter. */
export class Trie {
  readonly #edges = new Map<number, number>();
  readonly #ends = new Map<number, number>();
  #nodes = 1;

  /** Whether the word is new. */
  add(word: string, value: number): boolean {
    const end = this.walked(word);
    const isNew = !this.#ends.has(end);
    this.#ends.set(end, value);
    return isNew;
  }

  /** The node of a word, made where there is none. */
  walked(word: string): number {
    return codesOf(word).reduce((node, code) => {
      const edge = node * CODES + code;
      const next = this.#edges.get(edge) ?? this.#nodes++;
      this.#edges.set(edge, next);
      return next;
    }, 0);
  }

  /** The longest word that begins at a place, by its value and its end; undefined if none does. */
  longest(codes: readonly number[], start: number, work: Work, from = 0): { value: number; end: number } | undefined {
    let found: { value: number; end: number } | undefined;
    let node: number | undefined = from;
    for (let end = start; end < codes.length; ) {
      work.spend(1);
      node = this.#edges.get(node * CODES + codes[end]!);
      if (node === undefined) break;
      end += 1;
      const value = this.#ends.get(node);
      if (value !== undefined) found = { value, end };
    }
    return found;
  }
}

/** The words of WordPiece. */
export function wordPieces(model: WordPiece): Words {
  const trie = new Trie();
  for (const [word, id] of Object.entries(model.vocab)) trie.add(word, id);
  const unknownIds = [model.vocab[model.unk_token]!];
  const after = trie.walked(model.continuing_subword_prefix);
  return (word, work) => {
    const codes = codesOf(word);
    work.spend(codes.length);
    if (codes.length > model.max_input_chars_per_word) return unknownIds;
    const ids: number[] = [];
    for (let start = 0; start < codes.length; ) {
      const found = trie.longest(codes, start, work, start > 0 ? after : 0);
      if (found === undefined) return unknownIds;
      ids.push(found.value);
      start = found.end;
    }
    return ids;
  };
}

interface Merge {
  readonly rank: number;
  readonly id: number;
}

/** A pair that may be merged, the first of which is at a place. */
interface Candidate extends Merge {
  readonly place: number;
}

/** The words of byte pairs. */
export function bytePairs(model: BytePairs): Words {
  const ids = new Map(Object.entries(model.vocab));
  const merges = mergesOf(model, ids);
  return (word, work) => {
    work.spend(word.length);
    const whole = ids.get(word);
    if (model.ignore_merges && whole !== undefined) return [whole];
    return merged(lettersOf(word, model, ids), merges, work);
  };
}

function mergesOf(model: BytePairs, ids: ReadonlyMap<string, number>): Map<number, Merge> {
  const merges = new Map<number, Merge>();
  for (const [rank, [first, second]] of model.merges.entries()) {
    const [left, right, id] = [ids.get(first), ids.get(second), ids.get(first + second)];
    if (left === undefined || right === undefined || id === undefined) {
      throw unknown(`the merge of ${JSON.stringify([first, second])}, beyond its vocabulary`);
    }
    merges.set(left * TOKENS + right, { rank, id });
  }
  return merges;
}

/** The ids of a word's letters; one that the vocabulary lacks is unknown, or left out where there is no such token. */
function lettersOf(word: string, model: BytePairs, ids: ReadonlyMap<string, number>): number[] {
  const found: number[] = [];
  let wasUnknown = false;
  for (const letter of word) {
    const id = ids.get(letter);
    if (id !== undefined) found.push(id);
    else if (model.unk_token !== null) {
      const unknownId = ids.get(model.unk_token);
      if (unknownId === undefined) throw unknown("a vocabulary without its unknown token");
      if (!(wasUnknown && model.fuse_unk)) found.push(unknownId);
    }
    wasUnknown = id === undefined;
  }
  return found;
}

/** Letters with their pairs merged, the lowest rank first, and of equal ones the leftmost. */
function merged(letters: number[], merges: ReadonlyMap<number, Merge>, work: Work): number[] {
  const next = letters.map((_, place) => place + 1);
  const before = letters.map((_, place) => place - 1);
  const waiting = new Heap(work);
  const offer = (place: number) => {
    const following = next[place]!;
    const merge = following < letters.length ? merges.get(letters[place]! * TOKENS + letters[following]!) : undefined;
    if (merge !== undefined) waiting.push({ place, ...merge });
    return merge;
  };
  for (let place = 0; place < letters.length; place++) offer(place);
  for (let top = waiting.pop(); top !== undefined; top = waiting.pop()) {
    const { place, id } = top;
    const following = next[place]!;
    if (letters[place] === GONE || following >= letters.length) continue;
    if (merges.get(letters[place]! * TOKENS + letters[following]!)?.id !== id) continue;
    letters[place] = id;
    letters[following] = GONE;
    next[place] = next[following]!;
    if (next[place]! < letters.length) before[next[place]!] = place;
    if (before[place]! >= 0) offer(before[place]!);
    offer(place);
  }
  return letters.filter((id) => id !== GONE);
}

/** In place of a letter that was merged into the one before. */
const GONE = -1;

/** Candidates, the first of which comes out first. */
class Heap {
  readonly #all: Candidate[] = [];
  readonly #work: Work;

  constructor(work: Work) {
    this.#work = work;
  }

  push(one: Candidate): void {
    const all = this.#all;
    let at = all.push(one) - 1;
    for (let up = (at - 1) >> 1; at > 0 && isBefore(one, all[up]!); up = (at - 1) >> 1) {
      all[at] = all[up]!;
      at = up;
      this.#work.spend(1);
    }
    all[at] = one;
    this.#work.spend(1);
  }

  pop(): Candidate | undefined {
    const all = this.#all;
    const [first] = all;
    const last = all.pop();
    if (last === undefined || all.length === 0) return first;
    let at = 0;
    for (let down = 1; down < all.length; down = 2 * at + 1) {
      if (down + 1 < all.length && isBefore(all[down + 1]!, all[down]!)) down += 1;
      if (!isBefore(all[down]!, last)) break;
      all[at] = all[down]!;
      at = down;
      this.#work.spend(1);
    }
    all[at] = last;
    this.#work.spend(1);
    return first;
  }
}

function isBefore(one: Candidate, other: Candidate): boolean {
  return one.rank === other.rank ? one.place < other.place : one.rank < other.rank;
}
