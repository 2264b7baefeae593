/** JSON of the wire and of plans: decoded without rounding integers, and checked against a schema. */

import { isSafeNumber, parse } from "lossless-json";
import * as v from "valibot";
import { type Bytes, fromBase64, text } from "./bytes.ts";
import { FormatError } from "./errors.ts";

/** An integer of 0 or more that a number holds exactly: sizes, counts. */
export const count = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(Number.MAX_SAFE_INTEGER));
/** A number that is finite. JSON has no others. */
export const finite = v.pipe(v.number(), v.finite());
/** An integer from 0 to 2^63 − 1; a number is exact only up to 2^53. */
export const wide = v.pipe(
  v.union([count, v.bigint()]),
  v.transform((integer) => BigInt(integer)),
  v.minValue(0n),
  v.maxValue((1n << 63n) - 1n),
);
/** A SHA-256 in hex. */
export const digest = v.pipe(v.string(), v.regex(/^[0-9a-f]{64}$/));

/** Bytes in base64, of a fixed size where one is given. */
export function bytes(size?: number) {
  const spelled = v.pipe(
    v.string(),
    v.rawTransform<string, Bytes>(({ dataset, addIssue, NEVER }) => {
      try {
        return fromBase64(dataset.value);
      } catch (error) {
        addIssue({ message: String(error) });
        return NEVER;
      }
    }),
  );
  return v.pipe(
    spelled,
    v.check((data) => size === undefined || data.length === size, `not ${size} bytes`),
  );
}

/** The value of JSON text; an integer that a number would round is a bigint. Throws FormatError, calling it `noun`. */
export function parseJson(data: Bytes | string, noun: string): unknown {
  try {
    return parse(typeof data === "string" ? data : text(data), null, exact);
  } catch (error) {
    throw new FormatError(`malformed ${noun}: ${String(error)}`);
  }
}

/** A value checked against a schema. Throws FormatError naming the wrong member. */
export function checked<S extends v.GenericSchema>(schema: S, value: unknown, noun: string): v.InferOutput<S> {
  const found = v.safeParse(schema, value, { abortEarly: true });
  if (found.success) {
    return found.output;
  }
  const [issue] = found.issues;
  throw new FormatError(`malformed ${noun}: ${issue.message} at ${v.getDotPath(issue) ?? "the top"}`);
}

/** Integers of 64 bits at most stay exact: a message of megabytes of digits would take seconds to read as a bigint. */
function exact(digits: string): number | bigint {
  return /^-?[0-9]{1,20}$/.test(digits) && !isSafeNumber(digits) ? BigInt(digits) : Number(digits);
}
