/** Texts of examples as tokens: what an app keeps as UTF-8 becomes the integers that a plan trains on. Spec: plan §1.3. */

import type { Bytes } from "./bytes.ts";
import { DeadlinePassed, PlanRefused } from "./errors.ts";
import { type Column, type Examples, ExamplesError, lineOf, padded } from "./examples.ts";
import type { BlobRef, Field, Plan } from "./plan.ts";
import { Tokenizer } from "./tokenizer.ts";
import { Work } from "./work.ts";

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
    yield textOf(field, lineOf(column, place), place);
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

function textOf(field: Field, row: Bytes, place: number): string {
  let end = row.length;
  while (end > 0 && row[end - 1] === 0) end -= 1;
  try {
    return decoded(row.subarray(0, end));
  } catch {
    throw new ExamplesError("invalid-examples", `field ${field.name} of example ${place} is not text in UTF-8`);
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
