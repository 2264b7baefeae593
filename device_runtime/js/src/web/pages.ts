/** The pages of one origin with one target, which share a device: one works at a time, and all hear of changes.
 *
 * While none is open, a service worker of the device's own works, which a browser with Periodic Background Sync wakes.
 */

import { base64url, utf8 } from "../core/bytes.ts";
import { DeviceError, StateInUse } from "../core/errors.ts";
import { NOTHING_YET, type Outcome } from "../core/kept/sessions.ts";
import { nameOf, type Target } from "./storage.ts";

/** A worker that was just ended lets go of the lock a moment later. */
const PATIENCE_MS = 5000;

/** What a page tells the others: to stop their work, and then that settings changed, or that the device has left.
 *
 * `begun`, that it takes part, is for what works while no page is open: that ends at every notice.
 */
export type Notice = "stop" | "settings" | "left" | "begun";

/** What tells the other pages of a device. hear: what to do with their notices. */
export function channelTo(target: Target, hear: (notice: Notice) => void): (notice: Notice) => void {
  const channel = new BroadcastChannel(nameOf(target));
  channel.onmessage = ({ data }: MessageEvent<Notice>) => hear(data);
  return (notice) => channel.postMessage(notice);
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

/** The most that Chromium wakes a page: once in twelve hours. */
const EVERY_MS = 12 * 3600 * 1000;

/** Whether the browser wakes this page: never, or once the person has installed it as an app. */
export type Waking = "never" | "once-installed" | "now";

type Wakeable = ServiceWorkerRegistration & {
  readonly periodicSync: { register(tag: string, options: { readonly minInterval: number }): Promise<void> };
};

/** Whether the browser wakes this page. */
export async function waking(): Promise<Waking> {
  if (!("periodicSync" in ServiceWorkerRegistration.prototype)) return "never";
  const { state } = await navigator.permissions.query({ name: "periodic-background-sync" as PermissionName });
  return state === "granted" ? "now" : "once-installed";
}

/** The service worker of a device, by the address of its script. Its scope is below: it controls no page.
 *
 * Each target has a registration of its own, whose tag is the target in JSON.
 */
export class Background {
  readonly #script: URL;
  readonly #target: Target;

  constructor(script: URL, target: Target) {
    this.#script = script;
    this.#target = target;
  }

  /** Let the browser wake the service worker for this target. */
  async allow(): Promise<void> {
    const registration = await navigator.serviceWorker.register(this.#script, { type: "module", scope: this.#scope });
    await activated(registration);
    const { periodicSync } = registration as Wakeable;
    await periodicSync.register(JSON.stringify(this.#target), { minInterval: EVERY_MS });
  }

  /** Let it sleep for good. */
  async forbid(): Promise<void> {
    await (await this.#registration())?.unregister();
  }

  /** Whether the browser may wake it. */
  async isAllowed(): Promise<boolean> {
    return (await this.#registration()) !== undefined;
  }

  get #scope(): string {
    return `${this.#script.href}/${base64url(utf8(nameOf(this.#target)))}/`; // a scope may hold no escaped slash
  }

  /** That of the very scope: the browser answers with one of a wider scope, too. */
  async #registration(): Promise<ServiceWorkerRegistration | undefined> {
    const found = await navigator.serviceWorker.getRegistration(this.#scope);
    return found?.scope === this.#scope ? found : undefined;
  }
}

/** Aborted once a page does anything with the device, or the time is up. */
export function untilPages(target: Target, ms: number): AbortSignal {
  const stop = new AbortController();
  channelTo(target, () => stop.abort());
  return AbortSignal.any([stop.signal, AbortSignal.timeout(ms)]);
}

async function activated({ installing, waiting }: ServiceWorkerRegistration): Promise<void> {
  const coming = installing ?? waiting;
  if (coming === null) return;
  await new Promise<void>((resolve, reject) => {
    coming.onstatechange = () => {
      if (coming.state === "activated") resolve();
      if (coming.state === "redundant") reject(new Error("the browser dropped the service worker"));
    };
  });
}

/** The outcome of a session, or what stopped the device for good. */
export type Ending =
  | { readonly outcome: Outcome }
  | { readonly stopped: { readonly reason: string; readonly detail: string } };

const CRASHED = "runtime-failed";

/** The ending of a device that an error stopped. */
export function stoppedBy(error: unknown): Extract<Ending, { stopped: unknown }> {
  const reason = error instanceof DeviceError ? error.reason : CRASHED;
  return { stopped: { reason, detail: error instanceof Error ? error.message : String(error) } };
}

/** The ending of a session whose worker crashed. */
export function crashed(detail: string): Extract<Ending, { outcome: unknown }> {
  return { outcome: { ...NOTHING_YET, reason: CRASHED, detail, retryable: "transient" } };
}
