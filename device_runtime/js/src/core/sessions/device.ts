/** A device inside an app: its sessions, and the models that it predicts with. */

import { DeviceError, ModelRefused, StateInUse } from "../errors.ts";
import type { Outcome } from "../kept/sessions.ts";
import { Model } from "../models/model.ts";
import { checkLabels } from "../permission/policy.ts";
import type { Platform } from "../platform.ts";
import { runForever } from "./scheduler.ts";
import { runSession, type SessionConfig } from "./session.ts";

/** One device. Nothing else may use its platform meanwhile. After each session that reached the coordinator it refreshes
 * the open models.
 *
 * warn: hears what is wrong without being an error, such as a kept version of a model that cannot be used any more.
 */
export class Device {
  readonly #platform: Platform;
  readonly #config: SessionConfig;
  readonly #warn: (words: string) => void;
  readonly #models = new Set<Model>();
  #last: Promise<unknown> = Promise.resolve();
  #inSession = false;

  /** Throws ConfigError for labels that a device may not have. */
  constructor(platform: Platform, config: SessionConfig, warn: (words: string) => void = console.warn) {
    checkLabels(config.labels ?? {});
    this.#platform = platform;
    this.#config = { ...config, inTurn: (session) => this.#session(session) };
    this.#warn = warn;
  }

  /** The model of this name, for predictions in this process: the last version that this device took, or none yet.
   *
   * It needs no network until `refresh`. Rejects with ConfigError for a name that no model may have.
   */
  async model(name: string): Promise<Model> {
    const model = await Model.open(this.#platform, this.#config, name, (work) => this.#visit(work), this.#warn);
    this.#models.add(model);
    return model;
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

  async #session(work: () => Promise<Outcome>): Promise<Outcome> {
    const outcome = await this.#inTurn(async () => {
      this.#inSession = true;
      try {
        return await work();
      } finally {
        this.#inSession = false;
      }
    });
    if (outcome.bytes_down > 0 && outcome.reason !== "conditions") await this.#refreshModels();
    return outcome;
  }

  /** Where a refresh fails, the version before stays, and the next session tries again. */
  async #refreshModels(): Promise<void> {
    for (const model of this.#models) {
      if (model.isClosed) this.#models.delete(model);
      else {
        await model.refresh().catch((error: unknown) => {
          if (!(error instanceof DeviceError)) throw error;
          if (error instanceof ModelRefused) return; // the journal has it
          this.#warn(`a model was not refreshed after a session: ${error.message}`);
        });
      }
    }
  }

  /** Do work after all that was begun before. */
  #inTurn<T>(work: () => Promise<T>): Promise<T> {
    const turn = this.#last.then(work);
    this.#last = turn.catch(() => {}); // whoever began it hears of it
    return turn;
  }
}
