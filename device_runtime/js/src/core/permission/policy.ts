/** The owner's policy as data, which no coordinator can change. The meaning: docs/device.md. */

import * as v from "valibot";
import { type Bytes, utf8 } from "../bytes.ts";
import { ConfigError, DeviceError, FormatError, PlanRefused, PolicyForbids } from "../errors.ts";
import type { Target } from "../platform.ts";
import { publicKey } from "../wire/statements.ts";

const MOST_LABELS = 16;
/** The longest value of a label, in bytes of UTF-8. */
const LONGEST_VALUE = 64;

const amount = v.nullish(v.pipe(v.number(), v.minValue(0)), null);
const names = v.nullish(v.pipe(v.array(v.string()), v.minLength(1)), null);

const perDaySchema = v.strictObject({ compute_seconds: amount, bytes: amount, sessions: amount });
const planSchema = v.strictObject({
  parameters: amount,
  graph_bytes: amount,
  batch_examples: amount,
  memory_bytes: v.optional(v.pipe(v.number(), v.minValue(0)), 1_000_000_000),
  compute_seconds: v.optional(v.pipe(v.number(), v.minValue(0)), 600),
});
const questionsSchema = v.strictObject({
  allowed: v.optional(v.boolean(), true),
  per_week: v.nullish(v.pipe(v.number(), v.integer(), v.minValue(0)), null),
});
const policySchema = v.strictObject({
  populations: names,
  collections: names,
  labels: v.optional(v.array(v.string()), []),
  signers: v.optional(v.array(v.string()), []),
  min_cohort: v.optional(v.pipe(v.number(), v.integer(), v.minValue(1)), 1),
  min_noise_multiplier: v.optional(v.pipe(v.number(), v.finite(), v.minValue(0)), 0),
  require_secure_aggregation: v.optional(v.boolean(), false),
  require_release_log: v.optional(v.boolean(), false),
  unsigned_programs: v.optional(v.boolean(), false),
  require_https: v.optional(v.boolean(), false),
  authority: v.nullish(v.string(), null),
  authority_url: v.nullish(v.pipe(v.string(), v.url("it must be a URL, such as https://fl.example")), null),
  cache_bytes: v.optional(v.pipe(v.number(), v.minValue(0)), 200_000_000),
  state_bytes: v.optional(v.pipe(v.number(), v.minValue(0)), 200_000_000),
  per_day: v.optional(perDaySchema, {}),
  plan: v.optional(planSchema, {}),
  questions: v.optional(questionsSchema, {}),
});
const PARTS: Readonly<Record<string, { readonly entries: object }>> = {
  per_day: perDaySchema,
  plan: planSchema,
  questions: questionsSchema,
};

/** The limits of a device. null is no limit, or any name. The default allows everything but secure rounds.
 *
 * unsigned_programs and state_bytes forbid nothing here: this runtime has no ExecuTorch programs, and runs no plan that
 * keeps vectors.
 */
export type Policy = v.InferOutput<typeof policySchema>;

/** Where a device takes part, and under which policy. */
export interface Place extends Target {
  readonly policy: Policy;
}

/** A policy from its settings, with defaults for the rest. Throws ConfigError, naming the setting that is wrong. */
export function policyOf(settings: object): Policy {
  if (Array.isArray(settings)) throw new ConfigError("it must be an object, {…}");
  const found = v.safeParse(policySchema, settings, { abortEarly: true });
  if (!found.success) throw new ConfigError(inWords(found.issues[0]));
  const policy = found.output;
  named("labels", () => policy.labels.forEach(checkLabelName));
  checkKeys("signers", policy.signers);
  if (policy.authority !== null) checkKeys("authority", [policy.authority]);
  if (policy.authority_url !== null && policy.authority === null) {
    throw new ConfigError("authority_url needs authority, the public key that is to be found there");
  }
  return policy;
}

/** The fault of a setting, in the words of Python's device where both say the same. */
function inWords(issue: v.InferIssue<typeof policySchema>): string {
  const at = issue.path?.at(-1);
  if (at === undefined) return "it must be an object, {…}";
  const name = v.getDotPath(issue) ?? String(at.key);
  const is = `${name} = ${JSON.stringify(at.value)}`;
  if (issue.expected === "never") {
    const { entries } = PARTS[name.split(".", 1)[0]!] ?? policySchema;
    return `${is}: there is no such key; there are ${Object.keys(entries).join(", ")}`;
  }
  if (issue.expected === "Object") return `${is}: it must be an object, {…}`;
  return `${is}: ${issue.expected === null ? issue.message : `Expected ${issue.expected}`}`;
}

function checkKeys(name: string, keys: readonly string[]): void {
  named(name, () => keys.forEach(publicKey));
}

function named(name: string, check: () => void): void {
  try {
    check();
  } catch (error) {
    throw error instanceof DeviceError ? new ConfigError(`${name}: ${error.message}`) : error;
  }
}

/** What an app says of its device, by name, such as `region`. A device tells those that its owner's policy lists. */
export type Labels = Readonly<Record<string, string>>;

/** Labels from texts such as `region=eu`. Throws ConfigError. */
export function labelsOf(texts: readonly string[]): Labels {
  const labels = new Map<string, string>();
  for (const text of texts) {
    const [name, value] = text.split(/=(.*)/s, 2) as [string, string?];
    if (value === undefined) throw new ConfigError(`label ${JSON.stringify(text)} is not like region=eu`);
    if (labels.has(name)) throw new ConfigError(`label ${name} is given twice`);
    labels.set(name, value);
  }
  return checkLabels(Object.fromEntries(labels));
}

/** The labels, if a device may have them. Throws ConfigError, which names the label and the limit. */
export function checkLabels(labels: Labels): Labels {
  const all = Object.entries(labels);
  if (all.length > MOST_LABELS) {
    throw new ConfigError(`${all.length} labels are too many: a device has at most ${MOST_LABELS}`);
  }
  for (const [name, value] of all) {
    checkLabelName(name);
    if (typeof value !== "string" || /[\p{Cc}\p{Cs}]/u.test(value)) {
      throw new ConfigError(`label ${name}: its value must be text without control characters`);
    }
    const size = utf8(value).length;
    if (size < 1 || size > LONGEST_VALUE) {
      throw new ConfigError(`label ${name}: its value must have 1 to ${LONGEST_VALUE} bytes, not ${size}`);
    }
  }
  return labels;
}

function checkLabelName(name: string): void {
  if (!/^[a-z][a-z0-9_]{0,31}$/.test(name)) {
    throw new ConfigError(
      `label ${JSON.stringify(name)}: a name has 1 to 32 of a-z, 0-9 and _, and begins with a letter`,
    );
  }
}

/** Check a URL, described by `whose`, before the first byte. Throws PolicyForbids if required TLS is missing. */
export function checkHttps({ require_https }: Policy, whose: string, url: URL): void {
  if (require_https && url.protocol !== "https:") {
    throw new PolicyForbids(`against require_https of this device's policy: ${whose} is at ${url.origin}`);
  }
}

/** The enrolment authority that a policy names, if any. url: empty if the coordinator provides it. */
export function namedAuthority({ authority, authority_url }: Policy): { key: Bytes; url: string } | null {
  return authority === null ? null : { key: publicKey(authority), url: authority_url ?? "" };
}

/** The error for a plan that a rule of the policy does not let run. */
export function refused(rule: string, why: string): PlanRefused {
  return new PlanRefused(`against ${rule} of this device's policy: ${why}`);
}

/** For a `catch`: what is not of the form that the specification wants breaks a rule of the policy. */
export function breaking(rule: string): (error: unknown) => never {
  return (error) => {
    throw error instanceof FormatError ? refused(rule, error.message) : error;
  };
}
