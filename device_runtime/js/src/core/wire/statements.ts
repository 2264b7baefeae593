/** Signed statements: plans, releases, entries of a lineage, heads of the log of releases, successions of keys.
 *
 * A statement is JSON in exactly the bytes that were signed. The caller decides whether to trust its signer. Spec:
 * docs/spec/plan.md §8 to §10, docs/spec/wire.md §9.
 */

import * as v from "valibot";
import {
  type Bytes,
  bytes,
  checked,
  concat,
  count,
  digest,
  equal,
  fromBase64url,
  fromHex,
  hex,
  parseJson,
  utf8,
  wide,
} from "../bytes.ts";
import { sha256, verifies } from "../cryptography.ts";
import { FormatError } from "../errors.ts";
import { type BlobRef, blobSchema } from "../plans/plan.ts";

const KIND = "ed25519:";
const RELEASE_VERSION = 1;
const MODEL_RELEASE_VERSION = 1;
const positive = v.pipe(v.number(), v.gtValue(0));
const bits = v.pipe(v.number(), v.integer(), v.minValue(2), v.maxValue(20));
const noiseMultiplier = v.pipe(v.number(), v.minValue(0), v.maxValue(1e6));

export const signatureSchema = v.object({ signer: v.string(), value: v.string() });
export const signedSchema = v.object({ text: v.string(), ...signatureSchema.entries });
const boundsSchema = v.object({
  clip_norm: positive,
  bits,
  max_examples: count,
  min_sum: count,
  noise_multiplier: noiseMultiplier,
  honest: count,
});
const releaseSchema = v.object({
  version: count,
  population: v.string(),
  plan: digest,
  checkpoint: digest,
  bounds: boundsSchema,
  evaluation: v.optional(v.object({ plan: digest, bounds: boundsSchema, constants: v.record(v.string(), digest) })),
  seed: v.optional(wide),
  lineage: v.string(),
  counter: count,
  expires_at: count,
});
const entrySchema = v.object({
  release: digest,
  round: count,
  parent: digest,
  checkpoint: digest,
  params: v.optional(digest),
});
const headSchema = v.object({ size: count, root: digest });
export const proofSchema = v.object({ head: signedSchema, position: count, path: bytes() });

/** What a model may be called: it is a part of URLs. */
export const modelName = v.pipe(v.string(), v.regex(/^[a-z0-9][a-z0-9_-]{0,63}$/));
const modelSchema = v.object({
  version: count,
  population: v.string(),
  name: modelName,
  number: v.pipe(count, v.minValue(1), v.maxValue(2 ** 31 - 1)),
  plan: blobSchema,
  parameters: blobSchema,
  counter: count,
  expires_at: v.optional(count),
});

type PlanSignature = v.InferOutput<typeof signatureSchema>;
export type Signed = v.InferOutput<typeof signedSchema>;
export type Release = v.InferOutput<typeof releaseSchema>;
/** How devices may evaluate the models of a released training. */
type ReleasedEvaluation = NonNullable<Release["evaluation"]>;
/** The parameters of a secure round's sums, which only the release key can change. */
export type SumBounds = Release["bounds"];
/** The statement that the devices of a population may use a version of a model. */
export type ModelRelease = v.InferOutput<typeof modelSchema>;
export type LineageEntry = v.InferOutput<typeof entrySchema>;
export type TreeHead = v.InferOutput<typeof headSchema>;

/** A public key of Ed25519, 32 bytes, from its text. Throws FormatError. */
export function publicKey(signer: string): Bytes {
  try {
    const key = fromBase64url(signer.startsWith(KIND) ? signer.slice(KIND.length) : "");
    if (key.length === 32) return key;
  } catch {
    // named below, with its form
  }
  throw new FormatError(`${signer.slice(0, 100)} is not a public key: it must be ${KIND} and 32 bytes in base64url`);
}

/** Throws FormatError unless `signature` is its signer's, over the plan of this digest. */
export async function verifyPlan(plan: BlobRef, signature: PlanSignature): Promise<void> {
  await demand(signature, concat(utf8("muster.plan.v1\0"), fromHex(plan.sha256)), `plan ${plan.sha256.slice(0, 12)}…`);
}

/** The release, if its signer signed it. Throws FormatError. */
export async function verifiedRelease(signed: Signed): Promise<Release> {
  const release = await verified(signed, "release", releaseSchema);
  if (release.version !== RELEASE_VERSION) {
    throw new FormatError(`release of version ${release.version}, this side knows ${RELEASE_VERSION}`);
  }
  return release;
}

/** The release of a model, if its signer signed it. Throws FormatError. */
export async function verifiedModelRelease(signed: Signed): Promise<ModelRelease> {
  const release = await verified(signed, "model", modelSchema);
  if (release.version !== MODEL_RELEASE_VERSION) {
    throw new FormatError(`model release of version ${release.version}, this side knows ${MODEL_RELEASE_VERSION}`);
  }
  return release;
}

/** The entry of a lineage, if its signer signed it. Throws FormatError. */
export function verifiedEntry(signed: Signed): Promise<LineageEntry> {
  return verified(signed, "lineage", entrySchema);
}

/** The head of a log of releases, if its signer signed it. Throws FormatError. */
export function verifiedHead(signed: Signed): Promise<TreeHead> {
  return verified(signed, "log", headSchema);
}

/** The evaluation that a plan, by digest, is released for; null for the plan that trains and for any other. */
export function evaluationBy({ plan, evaluation }: Release, other: string): ReleasedEvaluation | null {
  return evaluation === undefined || other === plan || evaluation.plan !== other ? null : evaluation;
}

/** The bounds of the rounds of one of a release's plans, by digest. */
export function boundsOf(release: Release, plan: string): SumBounds {
  return (evaluationBy(release, plan) ?? release).bounds;
}

/** Whether two statements are one. */
export function same(one: Signed, other: Signed): boolean {
  return one.text === other.text && one.signer === other.signer && one.value === other.value;
}

/** SHA-256 of a statement, in hex. */
export async function digestOf(signed: Signed): Promise<string> {
  return hex(await sha256(utf8(signed.text)));
}

async function verified<S extends v.GenericSchema>(signed: Signed, what: string, schema: S): Promise<v.InferOutput<S>> {
  await demand(signed, utf8(`muster.${what}.v1\0${signed.text}`), `the statement of a ${what}`);
  return checked(schema, parseJson(signed.text, what), what);
}

async function demand({ signer, value }: PlanSignature, message: Bytes, noun: string): Promise<void> {
  const key = publicKey(signer);
  let signature: Bytes = new Uint8Array();
  try {
    signature = fromBase64url(value);
  } catch {
    // no signature verifies
  }
  if (!(await verifies(key, signature, message))) {
    throw new FormatError(`${noun} does not have the signature of ${signer}: it was altered, or signed for another`);
  }
}

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
