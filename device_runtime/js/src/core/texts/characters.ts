/** Characters as the library of tokenizers has them, whatever version of Unicode an engine knows, and the steps that work on
 * them takes. Spec: plan §1.3.
 */

import { DeadlinePassed } from "../errors.ts";
import { KINDS, LOWER, RUNS, SIGNS } from "./unicode.ts";

/** What a character is beside its general category: BERT's punctuation, hidden or an accent; a number; of no normal form. */
type Mark = "p" | "h" | "a" | "n" | "x";
/** A form of Unicode's normalisation. */
type Form = "NFC" | "NFD" | "NFKC" | "NFKD";

const CATEGORIES = [...new Set(KINDS.split(" ").map((kind) => kind.slice(0, 2)))];
const MARKS = "phanx";
const CAPITAL_I = 0x130;
const MANY_MARKS = /\p{M}{50,}/gu;
/** Marks of the lowest and the highest class of all that move. */
const [FIRST_MARK, LAST_MARK] = ["\u0334", "\u0345"];
/** Unicode's white space beyond ASCII. */
const SPACES = new Set([..."\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"].map((one) => one.charCodeAt(0)));

interface Tables {
  /** By code, the place of its kind. */
  readonly kinds: Uint8Array;
  /** By kind, a bit for its category, and bits for its marks. */
  readonly categories: readonly number[];
  readonly marks: readonly number[];
  readonly lower: ReadonlyMap<number, number>;
}

let made: Tables | undefined;

function tables(): Tables {
  made ??= {
    kinds: kindsOf(RUNS),
    categories: KINDS.split(" ").map((kind) => bitsOf(kind.slice(0, 2))),
    marks: KINDS.split(" ").map((kind) => Array.from(kind.slice(2)).reduce((bits, mark) => bits | bitOf(mark), 0)),
    lower: lowerOf(LOWER),
  };
  return made;
}

function kindsOf(runs: string): Uint8Array {
  const kinds = new Uint8Array(0x110000);
  let from = 0;
  for (const [, sign = "", count] of runs.replace(/\s/g, "").matchAll(/(\D)(\d*)/g)) {
    const to = from + Number(count || 1);
    kinds.fill(SIGNS.indexOf(sign), from, to);
    from = to;
  }
  return kinds;
}

function lowerOf(runs: string): Map<number, number> {
  const lower = new Map<number, number>();
  let start = 0;
  for (const run of runs.trim().split(/\s+/)) {
    const [after = 0, count = 0, apart = 0, step = 0] = run.split(".").map((digits) => Number.parseInt(digits, 36));
    start += after;
    for (let one = 0; one < count; one++) lower.set(start + one * apart, start + one * apart + step);
  }
  return lower;
}

function bitOf(mark: string): number {
  return 1 << MARKS.indexOf(mark);
}

/** Bits for the general categories that a name means, such as Lu or L; 0 if there is none. */
export function bitsOf(name: string): number {
  return CATEGORIES.reduce((bits, category, place) => (category.startsWith(name) ? bits | (1 << place) : bits), 0);
}

/** Whether a character's category is among those of the bits. */
export function isOf(code: number, bits: number): boolean {
  const { kinds, categories } = tables();
  return (categories[kinds[code]!]! & bits) !== 0;
}

/** Whether a character has a mark. */
export function has(code: number, mark: Mark): boolean {
  const { kinds, marks } = tables();
  return (marks[kinds[code]!]! & bitOf(mark)) !== 0;
}

/** Whether a character is white space. */
export function isSpace(code: number): boolean {
  if (code < 0x80) return code === 0x20 || (code >= 0x9 && code <= 0xd);
  return SPACES.has(code) || (code >= 0x2000 && code <= 0x200a);
}

/** The characters of a text. */
export function codesOf(text: string): number[] {
  return Array.from(text, (one) => one.codePointAt(0)!);
}

/** Lower case letter by letter, so that a sigma at the end of a word is like any other. */
export function lowered(text: string): string {
  const { lower } = tables();
  return Array.from(text, (one) => {
    const code = one.codePointAt(0)!;
    return code === CAPITAL_I ? "i\u0307" : String.fromCodePoint(lower.get(code) ?? code);
  }).join("");
}

/** The normal form of a text: of Unicode 9.0, which has none for newer characters and lets none of them move. */
export function normalised(text: string, form: Form): string {
  const parts: string[] = [];
  let from = 0;
  for (let place = 0; place < text.length; ) {
    const code = text.codePointAt(place)!;
    const next = place + (code > 0xffff ? 2 : 1);
    if (has(code, "x")) {
      parts.push(ordered(text.slice(from, place)).normalize(form), text.slice(place, next));
      from = next;
    }
    place = next;
  }
  return [...parts, ordered(text.slice(from)).normalize(form)].join("");
}

/** A text with the marks of long runs in canonical order, for which engines take the square of a run's length. */
function ordered(text: string): string {
  return text.replace(MANY_MARKS, (run) => {
    const marks = Array.from(run, (one) => Array.from(one.normalize("NFD"))).flat();
    const ranks = ranksOf([...new Set(marks)]);
    let part = 0;
    const placed = marks.map((mark) => {
      const rank = ranks.get(mark);
      if (rank === undefined) part += 1;
      return { mark, part: rank === undefined ? part++ : part, rank: rank ?? 0 };
    });
    placed.sort((one, other) => one.part - other.part || one.rank - other.rank);
    return placed.map(({ mark }) => mark).join("");
  });
}

/** The places of marks in canonical order, of those that move at all. */
function ranksOf(marks: string[]): Map<string, number> {
  const goesAfter = (one: string, other: string) => one !== other && (one + other).normalize("NFD") === other + one;
  const moving = marks.filter((mark) => goesAfter(LAST_MARK, mark) || goesAfter(mark, FIRST_MARK));
  moving.sort((one, other) => (goesAfter(one, other) ? 1 : goesAfter(other, one) ? -1 : 0));
  let rank = 0;
  return new Map(
    moving.map((mark, place) => {
      if (place > 0 && goesAfter(mark, moving[place - 1]!)) rank += 1;
      return [mark, rank];
    }),
  );
}

/** Steps between two questions whether to go on. */
const STEPS = 1 << 14;

/** A count of steps. keepGoing: asked now and then; false ends the work with DeadlinePassed. */
export class Work {
  #steps = 0;
  #next = STEPS;
  readonly #keepGoing: () => boolean;

  constructor(keepGoing: () => boolean = () => true) {
    this.#keepGoing = keepGoing;
  }

  get steps(): number {
    return this.#steps;
  }

  /** Throws DeadlinePassed. */
  spend(steps: number): void {
    this.#steps += steps;
    if (this.#steps >= this.#next) {
      this.#next = this.#steps + STEPS;
      this.ask();
    }
  }

  /** Asks whether to go on. Throws DeadlinePassed. */
  ask(): void {
    if (!this.#keepGoing()) {
      throw new DeadlinePassed("stopped while texts became tokens: the report would come too late");
    }
  }
}
