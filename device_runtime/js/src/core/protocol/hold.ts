/** The hold: a request that a device keeps open while it works on an assignment and sends nothing else about it.
 *
 * Spec: docs/spec/wire.md §6. It runs beside the work, between whose steps the platform lets it go on.
 */

import { DeviceError, Refused, TransportError } from "../errors.ts";
import type { Platform } from "../platform.ts";
import type { Assignment } from "../wire/messages.ts";
import type { Transport } from "./transport.ts";

const SHARE = 0.2;
const [SHORTEST_S, LONGEST_S, LONGEST_WAIT_S] = [0.05, 3600, 60];

/** The hold on an assignment that this device works on, until `end`. A no-op without `lost_after_s`. */
export class Hold {
  readonly #platform: Platform;
  readonly #transport: Transport;
  readonly #given: Assignment;
  readonly #over = new AbortController();
  readonly #began: number;
  #open = false;
  #refused: Refused | null = null;

  constructor(platform: Platform, transport: Transport, given: Assignment) {
    this.#platform = platform;
    this.#transport = transport;
    this.#given = given;
    this.#began = platform.now();
    if (given.lost_after_s !== null) {
      void this.#keep(Math.min(Math.max(SHORTEST_S, SHARE * given.lost_after_s), LONGEST_S));
    }
  }

  /** End the hold: the work is over. */
  end(): void {
    this.#over.abort();
  }

  /** Throws Refused once the coordinator has said that it no longer wants the report. */
  check(): void {
    if (this.#refused !== null) throw this.#refused;
  }

  /** Ask whether the report is still needed. Throws as `check`; without an answer, the report may be needed. */
  async ask(): Promise<void> {
    this.check();
    if (this.#open) return;
    try {
      await this.#transport.hold(this.#given.assignment, 0, this.#over.signal);
    } catch (error) {
      if (!(error instanceof TransportError) || (error instanceof Refused && error.notWanted)) throw error;
    }
  }

  async #keep(afterS: number): Promise<void> {
    const waitS = Math.min(Math.max(1, afterS / SHARE), LONGEST_WAIT_S);
    for (let restS = afterS; ; ) {
      await this.#platform.sleep(restS);
      if (this.#over.signal.aborted) return;
      const silentS = this.#platform.now() - Math.max(this.#began, this.#transport.spokeAt);
      // A clock that was set back says nothing about the silence.
      if (silentS < afterS && (silentS >= 0 || silentS === -Infinity)) {
        restS = Math.min(afterS, afterS - silentS);
        continue;
      }
      const began = this.#platform.now();
      try {
        this.#open = true;
        await this.#transport.hold(this.#given.assignment, waitS, this.#over.signal);
        restS = Math.min(afterS, Math.max(0, afterS - (this.#platform.now() - began)));
      } catch (error) {
        if (!(error instanceof DeviceError)) throw error;
        if (error instanceof Refused && error.final) {
          this.#refused = error.notWanted ? error : null;
          return;
        }
        restS = Math.max(afterS / 2, Math.min(error instanceof Refused ? error.hints.afterS : 0, 2 * afterS));
      } finally {
        this.#open = false;
      }
    }
  }
}
