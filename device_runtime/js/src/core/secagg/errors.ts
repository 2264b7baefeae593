/** Errors of secure aggregation at a device. Any of them ends the session. The names are SA1's (docs/spec/secagg.md §6). */

/** Base of every error of SA1. */
export class SecaggError extends Error {
  override get name(): string {
    return this.constructor.name;
  }
}

/** Bytes are not the one encoding of a message. */
export class Malformed extends SecaggError {}
/** A message belongs to another session. */
export class WrongSession extends SecaggError {}
/** A step is not due, or the session is over. */
export class OutOfOrder extends SecaggError {}
/** The host's own vector or weight cannot be summed. */
export class BadInput extends SecaggError {}
/** The version or suite is unknown. */
export class UnsupportedSuite extends SecaggError {}
/** The device has answered for this round or a later one. */
export class ReplayedRound extends SecaggError {}
/** Cohort, parameters or mode are weaker than the device's policy allows. */
export class PolicyViolation extends SecaggError {}
/** A field cannot hold the sum. */
export class HeadroomError extends SecaggError {}
/** The model or layout is not the one that the device holds. */
export class ModelMismatch extends SecaggError {}
/** A signature or credential is not its signer's. */
export class BadSignature extends SecaggError {}
/** A credential ends before the session does. */
export class ExpiredCredential extends SecaggError {}
/** A public key is not a good point of the curve. */
export class BadPoint extends SecaggError {}
/** One id or key occurs twice. */
export class DuplicateKey extends SecaggError {}
/** A box of shares does not open. */
export class BadCiphertext extends SecaggError {}
/** Neighbours are not those that the roster implies. */
export class GraphMismatch extends SecaggError {}
/** The roster does not hold this device as it is. */
export class SelfMismatch extends SecaggError {}
/** Fewer neighbours are left than shares are needed. */
export class TooFewNeighbours extends SecaggError {}
/** Fewer devices are left than a sum must have. */
export class BelowThreshold extends SecaggError {}
/** A device that takes part is listed as gone. */
export class SelfMarkedDead extends SecaggError {}
/** There are two sets of survivors. */
export class InconsistentSurvivors extends SecaggError {}
/** A share was revealed, and another is asked for. */
export class AlreadyRevealed extends SecaggError {}
