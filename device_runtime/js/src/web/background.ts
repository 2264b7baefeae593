/** Work while no page is open: a service worker of its own, which a browser with Periodic Background Sync wakes. */

import { base64url, utf8 } from "../core/bytes.ts";
import { Pages } from "./pages.ts";
import { nameOf, type Target } from "./target.ts";

/** The most that Chromium wakes a page: once in twelve hours. */
const EVERY_MS = 12 * 3600 * 1000;

/** Whether the browser wakes this page: never, or once the person has installed it as an app. */
export type Waking = "never" | "once-installed" | "now";

interface PeriodicSync {
  register(tag: string, options: { readonly minInterval: number }): Promise<void>;
}
type Wakeable = ServiceWorkerRegistration & { readonly periodicSync: PeriodicSync };

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
  new Pages(target, () => stop.abort());
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
