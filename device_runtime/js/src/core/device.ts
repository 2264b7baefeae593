/** A device inside an app: its sessions, and the models that it predicts with. */

import { StateInUse } from "./errors.ts";
import { Model } from "./model.ts";
import type { Outcome } from "./outcome.ts";
import type { Platform } from "./platform.ts";
import { runForever } from "./scheduler.ts";
import { runSession, type SessionConfig } from "./session.ts";

/** One device. Nothing else may use its platform meanwhile.
 *
 * warn: hears what is wrong without being an error, such as a kept version of a model that cannot be used any more.
 */
export class Device {
  readonly #platform: Platform;
  readonly #config: SessionConfig;
  readonly #warn: (words: string) => void;
  #last: Promise<unknown> = Promise.resolve();
  #inSession = false;

  constructor(platform: Platform, config: SessionConfig, warn: (words: string) => void = console.warn) {
    this.#platform = platform;
    this.#config = { ...config, inTurn: (session) => this.#session(session) };
    this.#warn = warn;
  }

  /** The model of this name, for predictions in this process: the last version that this device took, or none yet.
   *
   * It needs no network until `refresh`. Rejects with ConfigError for a name that no model may have.
   */
  model(name: string): Promise<Model> {
    return Model.open(this.#platform, this.#config, name, (work) => this.#visit(work), this.#warn);
  }

  /** Run one session now, after a refresh that is under way. Errors are in the outcome. */
  runOnce(): Promise<Outcome> {
    return runSession(this.#platform, this.#config);
  }

  /** Run sessions at the times that the coordinator names, until `stop`: see runForever. */
  runForever(tell: (outcome: Outcome) => void, stop: AbortSignal): Promise<void> {
    return runForever(this.#platform, this.#config, tell, stop);
  }

  async #visit<T>(work: () => Promise<T>): Promise<T> {
    if (this.#inSession) throw new StateInUse("the device is in a session: call again when it is over");
    return this.#inTurn(work);
  }

  #session<T>(work: () => Promise<T>): Promise<T> {
    return this.#inTurn(async () => {
      this.#inSession = true;
      try {
        return await work();
      } finally {
        this.#inSession = false;
      }
    });
  }

  /** Do work after all that was begun before. */
  #inTurn<T>(work: () => Promise<T>): Promise<T> {
    const turn = this.#last.then(work);
    this.#last = turn.catch(() => {}); // whoever began it hears of it
    return turn;
  }
}
