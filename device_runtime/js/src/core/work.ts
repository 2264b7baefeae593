/** Work in small steps, which are counted, and which an owner can stop. */

import { DeadlinePassed } from "./errors.ts";

/** Steps between two questions whether to go on. */
const STEPS = 1 << 14;

/** A count of steps. keepGoing: asked now and then; false ends the work with DeadlinePassed. */
export class Work {
  #steps = 0;
  #next = STEPS;
  readonly #keepGoing: () => boolean;

  constructor(keepGoing: () => boolean = () => true) {
    this.#keepGoing = keepGoing;
  }

  get steps(): number {
    return this.#steps;
  }

  /** Throws DeadlinePassed. */
  spend(steps: number): void {
    this.#steps += steps;
    if (this.#steps >= this.#next) {
      this.#next = this.#steps + STEPS;
      this.ask();
    }
  }

  /** Asks whether to go on. Throws DeadlinePassed. */
  ask(): void {
    if (!this.#keepGoing()) {
      throw new DeadlinePassed("stopped while texts became tokens: the report would come too late");
    }
  }
}
