/** Messages of the device protocol, as JSON. Spec: docs/spec/wire.md.
 *
 * Members that are not known are ignored, so a newer peer may add some; an unknown `version` is refused.
 */

import * as v from "valibot";
import { type Bytes, bytes, checked, count, finite, parseJson, wide } from "../bytes.ts";
import { FormatError } from "../errors.ts";
import { blobSchema } from "../plans/plan.ts";
import { proofSchema, signatureSchema, signedSchema, successionSchema, targetText } from "./statements.ts";

export const WIRE_VERSION = 1;
const LONGEST_REPORTING_S = 7 * 86_400;
const MOST_TOKEN = 200;

/** The id of a session, an assignment or a task: it is named in paths, kept and printed. */
const id = v.pipe(v.string(), v.regex(/^\P{C}{1,200}$/u));
const seconds = v.pipe(finite, v.gtValue(0));
const retrySchema = v.pipe(
  v.object({ min_s: v.pipe(finite, v.minValue(0)), max_s: finite }),
  v.check(({ min_s, max_s }) => min_s <= max_s, "a retry window needs min_s <= max_s"),
);
const offerSchema = v.object({
  task: id,
  collection: v.string(),
  min_examples: v.optional(count, 0),
  min_recent_examples: v.optional(count, 0),
  max_example_age_s: v.nullish(finite, null),
  charging: v.optional(v.boolean(), false),
  idle: v.optional(v.boolean(), false),
  unmetered: v.optional(v.boolean(), false),
  min_battery: v.nullish(finite, null),
  min_free_storage_bytes: v.nullish(count, null),
});
const rejectedSchema = v.object({
  outcome: v.literal("rejected"),
  reason: v.picklist([
    "no-task",
    "not-eligible",
    "unsupported-format",
    "resting",
    "not-selected",
    "superseded",
    "too-early",
    "shutting-down",
  ]),
  retry: retrySchema,
  token: v.optional(v.pipe(v.string(), v.maxLength(MOST_TOKEN)), ""),
  formats: v.optional(v.array(v.string()), []),
});
const acceptedSchema = v.object({
  outcome: v.literal("accepted"),
  session: id,
  offers: v.optional(v.array(offerSchema), []),
  retry: v.nullish(retrySchema, null),
});
export const assignmentSchema = v.object({
  outcome: v.literal("assigned"),
  version: v.optional(count, WIRE_VERSION),
  assignment: id,
  task: id,
  round: v.pipe(count, v.maxValue(2 ** 31 - 1)),
  attempt: v.pipe(count, v.maxValue(2 ** 32 - 1)),
  slot: wide,
  seed: wide,
  plan: blobSchema,
  checkpoint: blobSchema,
  report_within_s: v.pipe(finite, v.maxValue(LONGEST_REPORTING_S)),
  plan_signature: v.nullish(signatureSchema, null),
  minimum: v.nullish(count, null),
  secagg: v.nullish(bytes(), null),
  release: v.nullish(signedSchema, null),
  lineage: v.nullish(signedSchema, null),
  log: v.nullish(proofSchema, null),
  server: v.nullish(successionSchema, null),
  over_selected: v.optional(v.boolean(), false),
  lost_after_s: v.nullish(seconds, null),
  purpose: v.optional(v.pipe(v.string(), v.regex(/^.{0,200}$/su)), ""),
  target: v.optional(targetText),
});
const partiesSchema = v.object({
  server: successionSchema,
  authority: bytes(32),
  authority_url: v.pipe(v.string(), v.url()),
});

/** The answers of a coordinator, and of an enrolment authority, by name. */
export const ANSWERS = {
  checkIn: v.variant("outcome", [acceptedSchema, rejectedSchema]),
  assignment: v.variant("outcome", [assignmentSchema, rejectedSchema]),
  receipt: v.object({ assignment: v.string(), task: v.string(), round: count, sha256: v.string() }),
  enrolled: v.object({
    device: v.pipe(v.string(), v.regex(/^[A-Za-z0-9_.:=+/-]{1,200}$/)),
    secagg: v.nullish(partiesSchema, null),
  }),
  credential: v.object({ credential: bytes(88), authority: successionSchema }),
  model: v.object({ release: signedSchema }),
  problem: v.object({
    type: v.string(),
    status: v.number(),
    detail: v.optional(v.string(), ""),
    retry: v.nullish(retrySchema, null),
  }),
} as const;

export type Offer = v.InferOutput<typeof offerSchema>;
export type Rejected = v.InferOutput<typeof rejectedSchema>;
export type Assignment = v.InferOutput<typeof assignmentSchema>;
export type RetryWindow = v.InferOutput<typeof retrySchema>;

/** An answer from JSON. Throws FormatError, which says which member is wrong. */
export function decodeAnswer<K extends keyof typeof ANSWERS>(kind: K, data: Bytes): v.InferOutput<(typeof ANSWERS)[K]> {
  const message = checked(ANSWERS[kind], parseJson(data, kind), kind);
  if ("version" in message && message.version !== WIRE_VERSION) {
    throw new FormatError(`message version ${message.version} is unknown here; this side speaks ${WIRE_VERSION}`);
  }
  return message;
}
