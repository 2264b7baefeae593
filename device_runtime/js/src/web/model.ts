/** A model on a page, in a worker of its own: the page is never held up by a graph. */

import { DeviceError, StateInUse } from "../core/errors.ts";
import type { Columns, Inputs } from "../core/models/version.ts";
import { crashed } from "./pages.ts";
import type { Owner, Target } from "./storage.ts";

/** A question about a model: its outputs for rows, or without rows, whether a refresh replaced its version. */
export interface Question extends Target {
  readonly id: number;
  readonly model: string;
  readonly owner: Owner;
  readonly rows: Inputs | null;
}

/** The answer to the question with this id: outputs, whether the version was replaced, or what went wrong. */
export type Answer = { readonly id: number } & (
  | { readonly outputs: Columns }
  | { readonly swapped: boolean }
  | { readonly reason: string; readonly detail: string }
);

/** An error in the worker of a model; the reason is that of the error there. */
class WorkerFailed extends DeviceError {
  override readonly reason: string;

  constructor(reason: string, detail: string) {
    super(detail);
    this.reason = reason;
  }
}

interface Waiting {
  readonly answer: (answer: Answer) => void;
  readonly fail: (error: DeviceError) => void;
}

/** A model by its name: `BrowserDevice.model` makes it. Its worker begins with the first call. */
export class BrowserModel {
  readonly #script: URL;
  readonly #about: () => Omit<Question, "id" | "rows">;
  readonly #waiting = new Map<number, Waiting>();
  #worker: Worker | null = null;
  #last = 0;

  /** about: which model, by the owner's settings of now. */
  constructor(script: URL, about: () => Omit<Question, "id" | "rows">) {
    this.#script = script;
    this.#about = about;
  }

  /** The model's outputs for rows, by the version that this device took last: see `Model.predict`.
   *
   * Rejects with a DeviceError, whose reason is `no-model` before the first version, and StateInUse if `rest` ended it.
   */
  async predict(rows: Inputs): Promise<Columns> {
    return ((await this.#ask(rows)) as Extract<Answer, { outputs: unknown }>).outputs;
  }

  /** Ask the coordinator for the version to use, now; whether it replaced the one before: see `Model.refresh`.
   *
   * While the device takes part it rejects with StateInUse: sessions refresh the model when they end.
   */
  async refresh(): Promise<boolean> {
    return ((await this.#ask(null)) as Extract<Answer, { swapped: unknown }>).swapped;
  }

  /** End the worker, which gives its memory back. The next call begins another. */
  rest(): void {
    this.#end(new StateInUse("the model was set to rest"));
  }

  #ask(rows: Inputs | null): Promise<Answer> {
    const [worker, id] = [this.#worker ?? this.#newWorker(), ++this.#last];
    return new Promise((answer, fail) => {
      this.#waiting.set(id, { answer, fail });
      worker.postMessage({ ...this.#about(), id, rows } satisfies Question);
    });
  }

  #newWorker(): Worker {
    const worker = new Worker(this.#script, { type: "module" });
    worker.onmessage = ({ data }: MessageEvent<Answer>) => {
      const waiting = this.#waiting.get(data.id);
      this.#waiting.delete(data.id);
      "reason" in data ? waiting?.fail(new WorkerFailed(data.reason, data.detail)) : waiting?.answer(data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      const { reason, detail } = crashed(event.message ?? "the worker did not start").outcome;
      this.#end(new WorkerFailed(reason, detail));
    };
    this.#worker = worker;
    return worker;
  }

  #end(error: DeviceError): void {
    this.#worker?.terminate();
    this.#worker = null;
    for (const { fail } of this.#waiting.values()) fail(error);
    this.#waiting.clear();
  }
}
