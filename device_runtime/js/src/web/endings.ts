/** Endings: what a worker tells its page of a session that ended, or of why there will be no more. */

import { DeviceError } from "../core/errors.ts";
import { NOTHING_YET, type Outcome } from "../core/outcome.ts";

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
