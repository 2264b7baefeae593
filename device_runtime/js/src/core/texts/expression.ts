/** Expressions of tokenizers, which may come from a hostile signer: their matches in a time that is linear in the text.
 *
 * The leftmost match, and of several the one that backtracking would find first. Every pair of state and place is tried
 * once (as BitState of RE2 does: Cox, "Regular expression matching: the virtual machine approach", 2009). Nothing that a
 * match remembers can change whether a pair fails, as groups neither repeat nor capture. Spec: plan §1.3.
 */

import { bitsOf, isOf, isSpace, type Work } from "./characters.ts";

/** A token: an escape, a class, the start or end of a group, an alternative, a repetition, or a letter. */
const TOKEN = /\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:i?:|[=!]|.?))?|(?:[*+?]|\{\d+(?:,\d*)?\})[*+?]?|./gsu;
const REPEATS = /^(?:[*+?]|\{\d)/u;
const ESCAPE = String.raw`\\(?:[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfnos]?)\}|[sd])`;
const LETTER = String.raw`(?:\\[nrtfv]|\\[^A-Za-z0-9]|&(?!&)|[^\[\]\\&-])`;
const CLASS = String.raw`\[(?!\^?\])\^?-?(?:${ESCAPE}|${LETTER}(?:-${LETTER})?)*-?\]`;
/** One letter: itself, an escape or a class. */
const KNOWN = new RegExp(String.raw`^(?:[^$^{[\\]|\\[SDnrtfv]|\\[^A-Za-z0-9]|${ESCAPE}|${CLASS})$`, "su");
/** Members of a class. */
const MEMBER = new RegExp(`${ESCAPE}|${LETTER}-${LETTER}|${LETTER}|-`, "gsu");
/** What may be in a group that ignores the case, where no two letters are one in another case, such as ß. */
const OF_LETTERS = /^(?!.*(?:[sS][sStT]|[fF][fFiIlL]))[ !"#%&',/0-9:;<=>@A-Z_`a-z~|-]*$/u;
const CONTROLS: Record<string, string> = { n: "\n", r: "\r", t: "\t", f: "\f", v: "\v" };
/** Letters that differ in case only from two of ASCII: a long s, and the sign of kelvins. */
const SAME_LETTER = new Map([
  [0x17f, 0x73],
  [0x212a, 0x6b],
]);
const DIGITS = "Nd";
const GROUPS = ["(", "(?:", "(?i:"];
const [LONGEST, MOST_COUNTED, DEEPEST] = [2000, 200, 100];

type Test = (code: number) => boolean;
type Node =
  | { readonly kind: "one"; readonly test: Test }
  | { readonly kind: "look"; readonly test: Test; readonly ahead: boolean }
  | { readonly kind: "all"; readonly of: readonly Node[] }
  | { readonly kind: "any"; readonly of: readonly Node[] }
  | { readonly kind: "repeat"; readonly of: Node; readonly least: number; readonly most: number };
/** What to do at a place: take a letter and go on, try one state and then another, or look at the next letter. */
type State =
  | { readonly test: Test; readonly next: number }
  | { readonly first: number; readonly second: number }
  | { readonly look: Test; readonly ahead: boolean; readonly next: number };

/** A compiled expression. */
export class Expression {
  readonly #states: (State | null)[] = [null]; // the first is the end
  readonly #start: number;

  /** Throws SyntaxError, saying what is not known, and for one that is malformed. */
  constructor(source: string) {
    const counted = [...source.matchAll(/\{(\d+),?(\d*)\}/gu)].map(([, least, most]) => Number(most || least));
    if ([...source].length > LONGEST || counted.reduce((sum, each) => sum + each, 0) > MOST_COUNTED) {
      throw new SyntaxError("an expression that is too long");
    }
    this.#start = this.#compiled(new Parser(source).parsed(), 0);
  }

  /** Where matches begin and end, in letters (code points), one after the other; those that are empty only where no other
   * ends.
   */
  *matches(codes: readonly number[], work: Work): Generator<[start: number, end: number]> {
    const words = Math.ceil(this.#states.length / 32);
    const tried = new Uint32Array(words * (codes.length + 1));
    let last = -1;
    for (let start = 0; start < codes.length; ) {
      const end = this.#end(codes, start, tried, words, work);
      // What was tried beyond the end failed, and fails again; at the end the match itself may have been.
      if (end !== null) tried.fill(0, end * words, (end + 1) * words);
      if (end !== null && (end > start || start > last)) {
        yield [start, end];
        last = end;
      }
      start = Math.max(end ?? 0, start + 1);
    }
  }

  #end(codes: readonly number[], start: number, tried: Uint32Array, words: number, work: Work): number | null {
    const waiting: [state: number, place: number][] = [[this.#start, start]];
    for (let top = waiting.pop(); top !== undefined; top = waiting.pop()) {
      work.spend(1);
      const [number, place] = top;
      const state = this.#states[number];
      if (!state) return place;
      const [word, bit] = [place * words + (number >>> 5), 1 << (number & 31)];
      if (tried[word]! & bit) continue;
      tried[word]! |= bit;
      const code = codes[place];
      if ("first" in state) waiting.push([state.second, place], [state.first, place]);
      else if ("look" in state) {
        if ((code !== undefined && state.look(code)) === state.ahead) waiting.push([state.next, place]);
      } else if (code !== undefined && state.test(code)) waiting.push([state.next, place + 1]);
    }
    return null;
  }

  #added(state: State): number {
    return this.#states.push(state) - 1;
  }

  /** The state that matches a node and goes on with `next`. */
  #compiled(node: Node, next: number): number {
    if (node.kind === "one") return this.#added({ test: node.test, next });
    if (node.kind === "look") return this.#added({ look: node.test, ahead: node.ahead, next });
    if (node.kind === "all") return node.of.reduceRight((after, each) => this.#compiled(each, after), next);
    if (node.kind === "any") {
      const all = node.of.map((each) => this.#compiled(each, next));
      return all.reduceRight((second, first) => this.#added({ first, second }));
    }
    let start = next;
    if (node.most === Infinity) {
      start = this.#states.push(null) - 1;
      this.#states[start] = { first: this.#compiled(node.of, start), second: next };
    } else {
      for (let more = node.least; more < node.most; more++) {
        start = this.#added({ first: this.#compiled(node.of, start), second: next });
      }
    }
    for (let more = 0; more < node.least; more++) start = this.#compiled(node.of, start);
    return start;
  }
}

class Parser {
  readonly #tokens: readonly string[];
  #at = 0;
  #depth = 0;

  constructor(source: string) {
    this.#tokens = [...source.matchAll(TOKEN)].map(([token]) => token);
  }

  parsed(): Node {
    const whole = this.#any(false);
    if (this.#at < this.#tokens.length) throw new SyntaxError("a group that does not begin");
    return whole;
  }

  /** Alternatives, up to the end of their group. */
  #any(ignoresCase: boolean): Node {
    const of: Node[][] = [[]];
    for (; this.#at < this.#tokens.length && this.#tokens[this.#at] !== ")"; ) {
      if (this.#tokens[this.#at] !== "|") of.at(-1)!.push(this.#repeated(ignoresCase));
      else {
        this.#at += 1;
        of.push([]);
      }
    }
    if (of.some((each) => each.length === 1 && each[0]!.kind === "look")) throw new SyntaxError("a look alone");
    return { kind: "any", of: of.map((each) => ({ kind: "all", of: each })) };
  }

  #repeated(ignoresCase: boolean): Node {
    const of = this.#atom(ignoresCase);
    const token = this.#tokens[this.#at] ?? "";
    if (!REPEATS.test(token)) return of;
    this.#at += 1;
    const [, least = "", comma = "", most = ""] = /^\{(\d+)(,?)(\d*)\}$/u.exec(token) ?? [];
    if (token.length > 1 && least === "") throw new SyntaxError("a repetition that is lazy or possessive");
    if (of.kind === "look" || (of.kind !== "one" && token !== "?")) throw new SyntaxError("a group that repeats");
    if (token === "?") return { kind: "repeat", of, least: 0, most: 1 };
    if (least === "") return { kind: "repeat", of, least: token === "+" ? 1 : 0, most: Infinity };
    const last = comma === "" ? Number(least) : most === "" ? Infinity : Number(most);
    if (last < Number(least)) throw new SyntaxError("a repetition that ends before it begins");
    return { kind: "repeat", of, least: Number(least), most: last };
  }

  #atom(ignoresCase: boolean): Node {
    const token = this.#tokens[this.#at++]!;
    if (REPEATS.test(token)) throw new SyntaxError("a repetition of nothing");
    if (!token.startsWith("(")) return { kind: "one", test: testOf(token, ignoresCase) };
    if (token === "(?=" || token === "(?!") {
      const inside = this.#tokens[this.#at++] ?? "";
      if (/^(?:[()|*+?]|\{\d)/u.test(inside) || this.#tokens[this.#at++] !== ")") {
        throw new SyntaxError("a look at more than the next letter");
      }
      return { kind: "look", test: testOf(inside, ignoresCase), ahead: token === "(?=" };
    }
    if (!GROUPS.includes(token)) throw new SyntaxError(`a group that begins with ${token}`);
    if (++this.#depth > DEEPEST) throw new SyntaxError(`groups within more than ${DEEPEST} others`);
    const from = this.#at;
    const inside = this.#any(token === "(?i:");
    this.#depth -= 1;
    if (token === "(?i:" && !OF_LETTERS.test(this.#tokens.slice(from, this.#at).join(""))) {
      throw new SyntaxError("a group that ignores the case of more than letters");
    }
    if (this.#tokens[this.#at++] !== ")") throw new SyntaxError("a group that does not end");
    return inside;
  }
}

/** Whether a letter is meant by a token. */
function testOf(token: string, ignoresCase: boolean): Test {
  if (!KNOWN.test(token)) throw new SyntaxError(`the part ${token}`);
  if (token === ".") return (code) => code !== 0xa;
  if (token.startsWith("[")) return classOf(token);
  if (!ignoresCase) return memberOf(token);
  const wanted = folded(token.codePointAt(0)!);
  return (code) => folded(code) === wanted;
}

/** A letter of ASCII in any case. */
function folded(code: number): number {
  return code >= 0x41 && code <= 0x5a ? code + 0x20 : (SAME_LETTER.get(code) ?? code);
}

function classOf(token: string): Test {
  const isNegated = token.startsWith("[^");
  const tests = (token.slice(isNegated ? 2 : 1, -1).match(MEMBER) ?? []).map(memberOf);
  return (code) => tests.some((test) => test(code)) !== isNegated;
}

/** What an escape, a letter, or a range of letters means. */
function memberOf(member: string): Test {
  const [, sign = "", category = ""] = /^\\([sSdDpP])(?:\{(.*)\})?$/u.exec(member) ?? [];
  const isMeant = sign === sign.toLowerCase();
  if (sign.toLowerCase() === "s") return (code) => isSpace(code) === isMeant;
  if (sign !== "") {
    const bits = bitsOf(category || DIGITS);
    return (code) => isOf(code, bits) === isMeant;
  }
  const [first = 0, last = first] = (member.match(new RegExp(LETTER, "gsu")) ?? [member]).map(letterOf);
  if (last < first) throw new SyntaxError(`the part ${member}`);
  return (code) => code >= first && code <= last;
}

function letterOf(member: string): number {
  const letter = member.length > 1 && member.startsWith("\\") ? member.slice(1) : member;
  return (letter === member ? letter : (CONTROLS[letter] ?? letter)).codePointAt(0)!;
}
