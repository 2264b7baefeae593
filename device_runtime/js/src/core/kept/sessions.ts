/** What a device keeps of its sessions: the journal of their outcomes, and its last assignment with the report.
 *
 * The report stays until it was counted. A device that stopped while it trained gives the assignment up when it is back. A
 * finished report is sent, and a secure aggregation continues from the durable state. Spec: docs/spec/wire.md §6, §8.
 */

import { stringify } from "lossless-json";
import * as v from "valibot";
import { type Bytes, base64, bytes, checked, count, finite, parseJson } from "../bytes.ts";
import { type DeviceError, FormatError, Refused, StateDamaged } from "../errors.ts";
import { IDENTITY, keptJson, type Store, type Target } from "../platform.ts";
import { assignmentSchema, type RetryWindow } from "../wire/messages.ts";

const PLACE = "journal";
const MOST_ENTRIES = 1000;

/** The end of a session.
 *
 * reported: the report was counted. rejected: no work now. not-needed: the round ended first. not-now: a rule of this
 * device does not hold, and nothing was sent. aborted: the device gave its assignment up. failed: the rest.
 * `retryable`: if the report was not counted, whether a retry within minutes is useful.
 */
export interface Outcome {
  readonly outcome: "reported" | "rejected" | "not-needed" | "not-now" | "aborted" | "failed";
  readonly reason: string;
  readonly detail: string;
  readonly device: string;
  readonly task: string;
  readonly round: number;
  readonly attempt: number;
  /** The task's expression on labels, safe to show; empty where any device may take part. */
  readonly target: string;
  readonly secure: boolean;
  /** What the plan asked, as one line that is safe to show; null where it asks nothing. */
  readonly question: string | null;
  /** Numbers in the report; 0 before it is made. */
  readonly numbers: number;
  /** What became of a question, in words for the owner; empty where none was asked. */
  readonly told: string;
  readonly examples: number;
  readonly steps: number;
  /** Texts that were longer than the plan's tokens, and cut. */
  readonly cut: number;
  readonly bytes_up: number;
  readonly bytes_down: number;
  readonly retry: RetryWindow | null;
  readonly retryable: "transient" | "permanent" | null;
}

/** An entry of the journal: when a session ended, in seconds since 1970, and how. */
export type Entry = Outcome & { readonly at: number };

/** What the task of a training for this device alone begins with, before the model's name. */
export const FOR_MODEL = "model ";

/** The training of a model for this device alone; its task is `model NAME`. */
type Personal = Omit<Outcome, "outcome"> & { readonly outcome: "personalised" };

export const NOTHING_YET: Outcome = {
  outcome: "failed",
  reason: "",
  detail: "",
  device: "",
  task: "",
  round: 0,
  attempt: 0,
  target: "",
  secure: false,
  question: null,
  numbers: 0,
  told: "",
  examples: 0,
  steps: 0,
  cut: 0,
  bytes_up: 0,
  bytes_down: 0,
  retry: null,
  retryable: null,
};

/** The outcome after an error. */
export function failure(error: DeviceError): Partial<Outcome> {
  const facts = {
    reason: error.reason,
    detail: error.message,
    retryable: error.permanent ? "permanent" : "transient",
  } as const;
  if (!(error instanceof Refused)) return { outcome: "failed", ...facts };
  return { outcome: error.status === 410 ? "not-needed" : "failed", ...facts, retry: error.hints.retry };
}

/** An entry of the journal that belongs to no session: a version of a model was refused, or personal parameters deleted.
 */
interface Remark {
  readonly at: number;
  readonly outcome: "model-refused" | "personal-dropped";
  readonly detail: string;
}

/** Add an entry to the journal, for the device's owner: what was trained, when, for which task, and the outcome. */
export async function writeJournal(
  store: Store,
  entry: Remark | ((Outcome | Personal) & { at: number }),
): Promise<void> {
  const entries = (await keptJson<object[]>(store, PLACE)) ?? [];
  await store.write({ [PLACE]: JSON.stringify([...entries, entry].slice(-MOST_ENTRIES)) });
}

/** The sessions in the journal, the oldest first: without remarks, and without trainings for this device alone. */
export async function sessionsIn(store: Store): Promise<readonly Entry[]> {
  const entries = (await keptJson<(Entry | Remark)[]>(store, PLACE)) ?? [];
  return entries.filter((entry): entry is Entry => "task" in entry && !entry.task.startsWith(FOR_MODEL));
}

const keptSchema = v.object({
  given: assignmentSchema,
  due: finite,
  phase: v.picklist(["assigned", "trained", "masked", "reported"]),
  report: bytes(),
  collection: v.string(),
  examples: count,
  steps: count,
  question: v.nullish(v.string(), null),
});

/** An assignment and its progress. due: seconds since 1970, by this device's clock.
 *
 * report: once trained, the body of the upload, or in a secure round the unweighted values; once masked, the state of
 * SA1; once reported, empty. A reported assignment is remembered so that the device does not train for it again.
 * collection: the collection that was trained on; empty before. question: what the plan asked, as the owner sees it.
 */
export type KeptAssignment = v.InferOutput<typeof keptSchema>;

/** The kept assignment of a device in one population of one coordinator.
 *
 * It is a line of JSON, and the report in base64 on its own line, because an exact JSON parser reads megabytes slowly.
 */
export class AssignmentKeeper {
  readonly #store: Store;
  readonly #place: string;

  constructor(store: Store, { coordinator, population }: Target) {
    this.#store = store;
    this.#place = `${IDENTITY.assignment}${coordinator.href}:${population}`;
  }

  /** The kept assignment, if any. Throws StateDamaged, after which it is gone. */
  async get(): Promise<KeptAssignment | null> {
    const text = await this.#store.get(this.#place);
    if (text === null) return null;
    try {
      const [line, report] = text.split("\n");
      const members = parseJson(line!, "kept assignment") as object;
      return checked(keptSchema, { ...members, report }, "kept assignment");
    } catch (error) {
      if (!(error instanceof FormatError)) throw error;
      await this.drop();
      throw new StateDamaged(`the assignment of an earlier session is lost: ${error.message}`);
    }
  }

  /** Make an assignment and its phase durable, replacing the one before. */
  async keep({ report, ...members }: KeptAssignment): Promise<void> {
    const inBase64 = (_: string, value: unknown) => (value instanceof Uint8Array ? base64(value as Bytes) : value);
    await this.#store.write({ [this.#place]: `${stringify(members, inBase64)}\n${base64(report)}` });
  }

  /** Remove the kept assignment: nothing is left to do for it. */
  async drop(): Promise<void> {
    await this.#store.write({ [this.#place]: null });
  }
}
