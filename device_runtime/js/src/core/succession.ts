/** Succession of keys: statements by which one public key follows another. Spec: docs/spec/wire.md §9.
 *
 * Whoever pinned a key follows these statements to the one that holds now, and nothing else.
 */

import * as v from "valibot";
import { type Bytes, concat, equal, hex, utf8 } from "./bytes.ts";
import { FormatError } from "./errors.ts";
import { bytes } from "./json.ts";
import { verifies } from "./primitives.ts";

const MOST_SUCCESSORS = 16;

export const successionSchema = v.object({
  first: bytes(32),
  successors: v.optional(
    v.pipe(v.array(v.object({ key: bytes(32), signature: bytes(64) })), v.maxLength(MOST_SUCCESSORS)),
    [],
  ),
});

/** An Ed25519 public key and its successors in order; the last one is current. */
export type Succession = v.InferOutput<typeof successionSchema>;

/** The key that holds now. */
export function currentKey({ first, successors }: Succession): Bytes {
  return successors.at(-1)?.key ?? first;
}

/** The key that holds now, for whoever pinned an earlier one, or this one, in that role.
 *
 * Throws FormatError unless signatures lead from the pinned key to it.
 */
export async function follow(role: "server" | "authority", shown: Succession, pinned: Bytes): Promise<Bytes> {
  const keys = [shown.first, ...shown.successors.map((one) => one.key)];
  const start = keys.findIndex((key) => equal(key, pinned));
  if (start < 0) {
    throw new FormatError(
      `the ${role} shows the key ${short(keys.at(-1)!)}, and nothing leads to it from ${short(pinned)}`,
    );
  }
  for (const [place, { key, signature }] of shown.successors.entries()) {
    const statement = concat(utf8(`muster.succession.v1\0${role}\0`), keys[place]!, key);
    if (place >= start && !(await verifies(keys[place]!, signature, statement))) {
      throw new FormatError(
        `the ${role} shows ${short(key)} as the successor of ${short(keys[place]!)}, which did not sign it`,
      );
    }
  }
  return currentKey(shown);
}

function short(key: Bytes): string {
  return `${hex(key).slice(0, 16)}…`;
}
