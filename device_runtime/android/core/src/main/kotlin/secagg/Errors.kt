/** Errors of secure aggregation at a device. Any of them ends the session. The names are SA1's (docs/spec/secagg.md §6). */
package dev.muster.device.secagg

/** Base of every error of SA1. [name] is the error's, also where classes have been renamed. */
internal sealed class SecaggException(val name: String, message: String) : Exception(message)

/** Bytes are not the one encoding of a message. */
internal class Malformed(message: String) : SecaggException("Malformed", message)

/** A message belongs to another session. */
internal class WrongSession(message: String) : SecaggException("WrongSession", message)

/** A step is not due, or the session is over. */
internal class OutOfOrder(message: String) : SecaggException("OutOfOrder", message)

/** The host's own vector or weight cannot be summed. */
internal class BadInput(message: String) : SecaggException("BadInput", message)

/** The version or suite is unknown. */
internal class UnsupportedSuite(message: String) : SecaggException("UnsupportedSuite", message)

/** The device has answered for this round or a later one. */
internal class ReplayedRound(message: String) : SecaggException("ReplayedRound", message)

/** Cohort, parameters or mode are weaker than the device's policy allows. */
internal class PolicyViolation(message: String) : SecaggException("PolicyViolation", message)

/** A field cannot hold the sum. */
internal class HeadroomError(message: String) : SecaggException("HeadroomError", message)

/** The model or layout is not the one that the device holds. */
internal class ModelMismatch(message: String) : SecaggException("ModelMismatch", message)

/** A signature or credential is not its signer's. */
internal class BadSignature(message: String) : SecaggException("BadSignature", message)

/** A credential ends before the session does. */
internal class ExpiredCredential(message: String) : SecaggException("ExpiredCredential", message)

/** A public key is not a good point of the curve. */
internal class BadPoint(message: String) : SecaggException("BadPoint", message)

/** One id or key occurs twice. */
internal class DuplicateKey(message: String) : SecaggException("DuplicateKey", message)

/** A box of shares does not open. */
internal class BadCiphertext(message: String) : SecaggException("BadCiphertext", message)

/** Neighbours are not those that the roster implies. */
internal class GraphMismatch(message: String) : SecaggException("GraphMismatch", message)

/** The roster does not hold this device as it is. */
internal class SelfMismatch(message: String) : SecaggException("SelfMismatch", message)

/** Fewer neighbours are left than shares are needed. */
internal class TooFewNeighbours(message: String) : SecaggException("TooFewNeighbours", message)

/** Fewer devices are left than a sum must have. */
internal class BelowThreshold(message: String) : SecaggException("BelowThreshold", message)

/** A device that takes part is listed as gone. */
internal class SelfMarkedDead(message: String) : SecaggException("SelfMarkedDead", message)

/** There are two sets of survivors. */
internal class InconsistentSurvivors(message: String) : SecaggException("InconsistentSurvivors", message)

/** A share was revealed, and another is asked for. */
internal class AlreadyRevealed(message: String) : SecaggException("AlreadyRevealed", message)
