/** Errors of the device runtime. The names and the meaning are those of Python's (device_runtime/errors.py).
 *
 * `reason` is the name of an error in an outcome; the coordinator hears it when the device gives an assignment up.
 * `permanent` says that coming back within minutes is of no use.
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
export class DeviceError extends Error {
  readonly reason: string = "failed";
  readonly permanent: boolean = false;
  override get name(): string {
    return this.constructor.name;
  }
}

/** A message, a checkpoint or a plan is not one of the formats of the specification. */
export class FormatError extends DeviceError {
  override readonly reason = "bad-format";
  override readonly permanent = true;
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

/** The report holds an infinity or NaN; the message says where that began. */
export class NonFiniteReport extends AssignmentError {
  override readonly reason = "non-finite-report";
}

/** A graph failed while it ran. */
export class RuntimeFailed extends AssignmentError {
  override readonly reason: AbortReason = "runtime-failed";
}

/** The coordinator stopped waiting before the work was done. */
export class DeadlinePassed extends RuntimeFailed {}
