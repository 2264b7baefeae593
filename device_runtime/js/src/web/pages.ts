/** The pages of one origin, which share a device: one of them works at a time, and all hear of changes. */

import { StateInUse } from "../core/errors.ts";

const LOCK = "muster-session";
const CHANNEL = "muster-pages";
/** A worker that was just ended lets go of the lock a moment later. */
const PATIENCE_MS = 5000;

/** What a page tells the others: to stop their work, and then that settings changed, or that the device has left.
 *
 * `begun`, that it takes part, is for what works while no page is open: that ends at every notice.
 */
export type Notice = "stop" | "settings" | "left" | "begun";

/** The channel between the pages of this origin. hear: what to do with the notices of others. */
export class Pages {
  readonly #channel = new BroadcastChannel(CHANNEL);

  constructor(hear: (notice: Notice) => void) {
    this.#channel.onmessage = ({ data }: MessageEvent<Notice>) => hear(data);
  }

  tell(notice: Notice): void {
    this.#channel.postMessage(notice);
  }
}

/** Do something that no other page or worker of this origin does at the same time.
 *
 * Throws StateInUse if one still does after a few seconds.
 */
export async function alone<T>(work: () => Promise<T>): Promise<T> {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  let begun = false;
  try {
    return await navigator.locks.request(LOCK, { signal }, () => {
      begun = true;
      return work();
    });
  } catch (error) {
    if (begun || !signal.aborted) throw error;
    throw new StateInUse("another page of this site takes part already");
  }
}
