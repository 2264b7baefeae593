/** The last assignment of a device, stored with its report until the report was counted. Spec: docs/spec/wire.md §6,
 * §8.
 *
 * A device that stopped while it trained gives the assignment up when it is back. A finished report is sent, and a
 * secure aggregation continues from the durable state.
 */

import { stringify } from "lossless-json";
import * as v from "valibot";
import { type Bytes, base64 } from "./bytes.ts";
import { FormatError, StateDamaged } from "./errors.ts";
import { bytes, checked, count, finite, parseJson } from "./json.ts";
import { IDENTITY, type Store } from "./platform.ts";
import { assignmentSchema } from "./wire/messages.ts";

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

  constructor(store: Store, coordinator: URL, population: string) {
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
