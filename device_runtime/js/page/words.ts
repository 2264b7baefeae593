/** Words for the person: how a session ended, and what an entry of the journal says, in a sentence. */

import { type Columns, DeviceError, type Ending, type Entry, type Outcome } from "../src/web/device.ts";

const REASONS: Record<string, string> = {
  "already-revealed": "This device has done its part in this round",
  "bad-answer": "The coordinator gave no answer that this device reads",
  "bad-configuration": "Your rules are not valid",
  "device-revoked": "The operator of this coordinator has shut this device out",
  "key-unavailable": "This device cannot prove what it is now; it tries again later",
  "not-attested": "This coordinator wants proof of what a device is, which this page cannot give",
  "too-many-requests": "This device, or others at its address, asked too often",
  "unknown-population": "There is nothing to train under the name in this link",
  conditions: "It was stopped, by the browser's time for it or by you",
  "invalid-examples": "Your examples are not what this training wants",
  "no-task": "There is nothing to train now",
  "non-finite-report": "The training came to no finite numbers, so nothing was sent",
  "not-eligible": "There is training, but not for devices like this one",
  "not-selected": "This device was not chosen this time",
  "plan-refused": "Your rules, or this browser, do not allow this training",
  "runtime-failed": "The training stopped on this device",
  "shutting-down": "The coordinator is about to stop",
  "secagg-refused": "The secure sum was not safe, so nothing readable was sent",
  "stale-signature": "This device's clock is far from the coordinator's",
  "state-in-use": "Another page of this site takes part already",
  "state-unusable": "This browser cannot keep what this page needs",
  "too-early": "This device is back before its time",
  "too-few-examples": "There are too few examples on this device",
  "unsupported-format": "There is training, but not in a format that browsers run",
  "no-model": "There is no version of the model on this device yet",
  "model-closed": "The model is closed",
  "model-refused": "A version of a model was not good",
  "input-refused": "What a model was asked about does not fit its inputs",
  policy: "By your rules it does not take part now",
  resting: "This device took part a short time ago, and rests",
  superseded: "Another session of this device took its place",
  unavailable: "The coordinator has too much to do now",
  unreachable: "The coordinator cannot be reached",
  unwilling: "There are too few examples on this device, or it does not meet what the training asks of devices",
};

/** What an ending says to the person, and whether it is bad news. */
export function ending(ended: Ending): { text: string; kind: "good" | "bad" | "" } {
  if ("stopped" in ended) return { text: sentence(ended.stopped), kind: "bad" };
  const { outcome } = ended;
  if (outcome.outcome === "reported") {
    return { text: `Done: round ${outcome.round}, ${examples(outcome)}, ${way(outcome)}.`, kind: "good" };
  }
  if (outcome.outcome === "not-needed") return { text: "The round was over before this device was done.", kind: "" };
  const bad = outcome.outcome === "failed" || outcome.outcome === "aborted";
  return { text: `${sentence(outcome)} It tries again by itself.`, kind: bad ? "bad" : "" };
}

/** What the model reads, from a value for each digit (10): the digit with the largest, and its softmax. */
export function read(values: Columns[string] | undefined): string {
  const logits = Array.from(values ?? [], Number);
  const most = Math.max(...logits);
  const digit = logits.indexOf(most);
  const share = 1 / logits.reduce((sum, value) => sum + Math.exp(value - most), 0);
  return logits.length === 10 ? `I read: ${digit}, ${Math.round(100 * share)} %` : "The model here reads no digits.";
}

/** Why the model read nothing. */
export function unread(error: unknown): string {
  if (!(error instanceof DeviceError)) return error instanceof Error ? error.message : String(error);
  if (error.reason === "no-model")
    return "There is no model on this device yet. Once one is released, it says here what it reads.";
  return sentence({ reason: error.reason, detail: error.message });
}

/** The cells of an entry of the journal: when, what, how much was sent. */
export function entry(one: Entry): readonly [string, string, string] {
  const when = new Date(1000 * one.at).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
  const whom = one.target ? `, for devices with ${one.target}` : "";
  const task = one.task === "" ? "" : ` Round ${one.round} of task ${one.task.slice(0, 8)}${whom}.`;
  const what = one.told
    ? `${one.told[0]!.toUpperCase()}${one.told.slice(1)}.`
    : one.outcome === "reported"
      ? `A report on ${examples(one)}, ${way(one)}.`
      : sentence(one);
  return [when, what + task, size(one.bytes_up)];
}

/** A size in bytes, as people read it. */
export function size(bytes: number): string {
  return bytes < 1000
    ? `${bytes} bytes`
    : bytes < 1e6
      ? `${(bytes / 1e3).toFixed(1)} kB`
      : `${(bytes / 1e6).toFixed(1)} MB`;
}

function examples({ examples: count }: Outcome): string {
  return count === 1 ? "1 example" : `${count} examples`;
}

function way({ secure }: Outcome): string {
  return secure ? "masked: only the sum over many devices can be read" : "in the clear: the coordinator can read it";
}

function sentence({ reason, detail }: { readonly reason: string; readonly detail: string }): string {
  const known = Object.hasOwn(REASONS, reason) ? REASONS[reason] : `The coordinator refused it (${reason})`;
  return detail === "" ? `${known}.` : `${known}: ${detail}${/[.!?]$/.test(detail) ? "" : "."}`;
}
