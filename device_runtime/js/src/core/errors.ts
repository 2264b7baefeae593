/** Errors of the device runtime. The names and the meaning are those of Python's (device_runtime/errors.py).
 *
 * `reason` is the name of an error in an outcome; `permanent` says that retrying within minutes is useless. The
 * coordinator receives only the reason of an AssignmentError.
 */

export type AbortReason =
  | "invalid-examples"
  | "too-few-examples"
  | "non-finite-report"
  | "plan-refused"
  | "runtime-failed"
  | "conditions"
  | "secagg-refused"
  | "already-revealed";

/** Base of every error that a session answers for. */
export abstract class DeviceError extends Error {
  abstract readonly reason: string;
  readonly permanent: boolean = false;
  /** The name of the class. */
  override get name(): string {
    return this.constructor.name;
  }
}

/** A message, a checkpoint or a plan is not one of the formats of the specification. */
export class FormatError extends DeviceError {
  override readonly reason = "bad-answer";
  override readonly permanent = true;
}

/** The configuration or the policy is not valid. */
export class ConfigError extends DeviceError {
  override readonly reason = "bad-configuration";
  override readonly permanent = true;
}

/** This device's policy does not let it take part now; the coordinator was not called. */
export class PolicyForbids extends DeviceError {
  override readonly reason = "policy";
  override readonly permanent = true;
}

/** A key of the platform, to attest with, is not available now. The device gives nothing up because of it. */
export class KeyUnavailable extends DeviceError {
  override readonly reason = "key-unavailable";
}

/** Stored data is gone or was changed: a finished report, an identity. */
export class StateDamaged extends DeviceError {
  override readonly reason = "state-unusable";
}

/** Another process runs a session with this state. */
export class StateInUse extends DeviceError {
  override readonly reason = "state-in-use";
}

/** This device cannot carry out the assignment; the coordinator is told `reason`. */
export abstract class AssignmentError extends DeviceError {
  abstract override readonly reason: AbortReason;
}

/** The plan or one of its graphs cannot be run here, now or later. */
export class PlanRefused extends AssignmentError {
  override readonly reason = "plan-refused";
  override readonly permanent = true;
}

/** A condition under which this device may work failed, or its owner stopped it. */
export class NotAllowedNow extends AssignmentError {
  override readonly reason = "conditions";
}

/** This device refused a step of a secure aggregation, or cannot continue it. It reveals no more shares. */
export class SecaggRefused extends AssignmentError {
  override readonly reason: AbortReason = "secagg-refused";
}

/** The aggregation ended without a sum: the round does not count. */
export class SumAbandoned extends SecaggRefused {}

/** This device revealed shares in another attempt at the round: the difference of two sums could be its report. */
export class AlreadyRevealed extends AssignmentError {
  override readonly reason = "already-revealed";
}

/** The report holds an infinity or NaN; the message says where that began. */
export class NonFiniteReport extends AssignmentError {
  override readonly reason = "non-finite-report";
}

/** A graph failed while it ran, or the device was stopped while it worked. */
export class RuntimeFailed extends AssignmentError {
  override readonly reason = "runtime-failed";
}

/** The coordinator stopped waiting before the work was done. */
export class DeadlinePassed extends RuntimeFailed {}

/** No version of a model is on this device yet, or the one that is cannot be used. */
export class NoModel extends DeviceError {
  override readonly reason = "no-model";
}

/** The app closed the model. */
export class ModelClosed extends DeviceError {
  override readonly reason = "model-closed";
  override readonly permanent = true;
}

/** What a model should predict from does not fit its inputs. */
export class InputRefused extends DeviceError {
  override readonly reason = "input-refused";
  override readonly permanent = true;
}

/** A version of a model is not taken; the one before stays. */
export class ModelRefused extends DeviceError {
  override readonly reason = "model-refused";
  override readonly permanent = true;
}

/** Talking to the coordinator failed. */
export abstract class TransportError extends DeviceError {}

/** No complete answer arrived in any attempt. */
export class Unreachable extends TransportError {
  override readonly reason = "unreachable";
}

/** The answer does not follow the protocol, or is not the requested bytes. */
export class BadAnswer extends TransportError {
  override readonly reason = "bad-answer";
}

const NOT_WANTED = ["no-longer-needed", "too-stale"];
// These name things that a coordinator keeps only for a while: it may have restarted, or the round may be over.
const PASSING = ["unknown-session", "unknown-assignment", "unknown-blob", "conflicting-report", ...NOT_WANTED];
// These are about a request's signer and time of signing, not about the request.
const ABOUT_SIGNATURES = ["stale-signature", "replayed-signature", "unknown-device"];

/** The rest of a refusal besides its problem: when to come back, and the coordinator's own time. */
export interface RefusalHints {
  readonly retry: { readonly min_s: number; readonly max_s: number } | null;
  readonly afterS: number;
  readonly theirTime: number | null;
}

/** The coordinator answered with a problem: its `status`, and its registered name as `reason`.
 *
 * Permanent: a fault of the request or of this installation, which time does not mend. Final: the same request would be
 * refused again, as after a round is over. Not wanted: the coordinator takes no report for the assignment any more.
 */
export class Refused extends TransportError {
  override readonly reason: string;
  override readonly permanent: boolean;
  readonly final: boolean;
  readonly notWanted: boolean;
  readonly status: number;
  readonly hints: RefusalHints;

  constructor(status: number, reason: string, detail: string, hints: RefusalHints) {
    super(detail);
    const fault = status >= 400 && status < 500 && status !== 408 && status !== 429;
    const aboutSignature = ABOUT_SIGNATURES.includes(reason);
    this.reason = reason;
    this.status = status;
    this.hints = hints;
    this.permanent = (fault && !aboutSignature && !PASSING.includes(reason)) || status === 501;
    this.final = fault && !aboutSignature;
    this.notWanted = NOT_WANTED.includes(reason);
  }
}
