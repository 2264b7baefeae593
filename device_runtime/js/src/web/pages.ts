/** The pages of one origin with one target, which share a device: one works at a time, and all hear of changes. */

import { StateInUse } from "../core/errors.ts";
import { nameOf, type Target } from "./target.ts";

/** A worker that was just ended lets go of the lock a moment later. */
const PATIENCE_MS = 5000;

/** What a page tells the others: to stop their work, and then that settings changed, or that the device has left.
 *
 * `begun`, that it takes part, is for what works while no page is open: that ends at every notice.
 */
export type Notice = "stop" | "settings" | "left" | "begun";

/** The channel between the pages of a device. hear: what to do with the notices of others. */
export class Pages {
  readonly #channel: BroadcastChannel;

  constructor(target: Target, hear: (notice: Notice) => void) {
    this.#channel = new BroadcastChannel(nameOf(target));
    this.#channel.onmessage = ({ data }: MessageEvent<Notice>) => hear(data);
  }

  tell(notice: Notice): void {
    this.#channel.postMessage(notice);
  }
}

/** Do something that no other page or worker of this device does at the same time.
 *
 * Throws StateInUse if one still does after a few seconds.
 */
export async function alone<T>(target: Target, work: () => Promise<T>): Promise<T> {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  let begun = false;
  try {
    return await navigator.locks.request(nameOf(target), { signal }, () => {
      begun = true;
      return work();
    });
  } catch (error) {
    if (begun || !signal.aborted) throw error;
    throw new StateInUse("another page of this site takes part already");
  }
}
