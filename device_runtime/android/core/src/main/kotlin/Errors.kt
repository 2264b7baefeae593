/** Errors of the device runtime. Their reasons and meaning are Python's (device_runtime/errors.py). */
package dev.muster.device

/**
 * Base of every error that this library throws for a cause outside its own code.
 *
 * [reason] is its name in an [Outcome]; [isPermanent] says that a retry within minutes is useless. The
 * coordinator receives only the reason of an [AssignmentException]. It is unchecked, so that apps in Java can catch it where they like.
 */
public sealed class DeviceException(
    message: String,
    public val reason: String,
    public val isPermanent: Boolean = false,
) : RuntimeException(message)

/** A message, a checkpoint or a plan does not follow the specification. */
public class FormatException(message: String) : DeviceException(message, "bad-answer", true)

/** The configuration or the policy is not valid. */
public class ConfigException(message: String) : DeviceException(message, "bad-configuration", true)

/** This device's policy does not let it take part now; the coordinator was not called. */
public class PolicyForbids(message: String) : DeviceException(message, "policy", true)

/** Stored data is gone or was changed: a finished report, an identity. */
public class StateDamaged(message: String) : DeviceException(message, "state-unusable")

/** Another process runs a session with this state. */
public class StateInUse(message: String) : DeviceException(message, "state-in-use")

/** This device cannot carry out the assignment; the coordinator is told [reason]. */
public sealed class AssignmentException(message: String, reason: String, isPermanent: Boolean = false) :
    DeviceException(message, reason, isPermanent)

/** Local examples are missing, too few, or do not fit the plan. */
public class ExamplesException internal constructor(reason: String, message: String) :
    AssignmentException(message, reason) {
    public companion object {
        /** The error for examples that do not fit, or cannot be read. */
        @JvmStatic
        public fun invalid(why: String): ExamplesException = ExamplesException("invalid-examples", why)

        /** The error for fewer examples than the plan needs. */
        @JvmStatic
        public fun tooFew(why: String): ExamplesException = ExamplesException("too-few-examples", why)
    }
}

/** The plan or one of its graphs cannot be run here, now or later. */
public class PlanRefused(message: String) : AssignmentException(message, "plan-refused", true)

/** A condition under which this device may work failed, or its owner stopped it. */
public class NotAllowedNow(message: String) : AssignmentException(message, "conditions")

/** This device refused a step of a secure aggregation, or cannot continue it. It reveals no more shares. */
public open class SecaggRefused(message: String) : AssignmentException(message, "secagg-refused")

/** The aggregation ended without a sum: the round does not count. */
public class SumAbandoned(message: String) : SecaggRefused(message)

/** This device revealed shares in another attempt at the round: the difference of two sums could be its report. */
public class AlreadyRevealed(message: String) : AssignmentException(message, "already-revealed")

/** The report holds an infinity or NaN; the message says where that began. */
public class NonFiniteReport(message: String) : AssignmentException(message, "non-finite-report")

/** A graph failed while it ran, or the device was stopped while it worked. */
public open class RuntimeFailed(message: String) : AssignmentException(message, "runtime-failed")

/** Any failure as an error of this library: its own code may fail, an app's that it calls, and memory may end. */
internal fun known(error: Throwable): DeviceException =
    error as? DeviceException ?: RuntimeFailed("the device's own code failed: $error")

/** The coordinator stopped waiting before the work was done. */
public class DeadlinePassed(message: String) : RuntimeFailed(message)

/** No version of a model is on this device yet, or the one that is cannot be used. */
public class NoModel(message: String) : DeviceException(message, "no-model")

/** The app closed the model. */
public class ModelClosed(message: String) : DeviceException(message, "model-closed", true)

/** What a model should predict from does not fit its inputs. */
public class InputRefused(message: String) : DeviceException(message, "input-refused", true)

/** A version of a model is not taken; the one before stays. */
public open class ModelRefused(message: String) : DeviceException(message, "model-refused", true)

/** Talking to the coordinator failed. */
public sealed class TransportException(message: String, reason: String, isPermanent: Boolean = false) :
    DeviceException(message, reason, isPermanent)

/** No complete answer arrived in any attempt. */
public class Unreachable(message: String) : TransportException(message, "unreachable")

/** The answer does not follow the protocol, or is not the requested bytes. */
public class BadAnswer(message: String) : TransportException(message, "bad-answer")

/** When to check in again, in seconds from now. */
public data class RetryWindow(val minS: Double, val maxS: Double)

/** What else a refusal said: when to come back, and the coordinator's own time, in seconds since 1970. */
internal class RefusalHints(val retry: RetryWindow?, val afterS: Double, val theirTime: Double?)

/**
 * The coordinator answered with a problem: its [status], and its registered name as [reason].
 *
 * Permanent: a fault of the request or of this installation, which time does not mend.
 */
public class Refused internal constructor(
    public val status: Int,
    reason: String,
    detail: String,
    internal val hints: RefusalHints,
) : TransportException(detail, reason, isFault(status) && reason !in PASSING + ABOUT_SIGNATURES || status == 501) {
    /** The same request would be refused again, as after a round is over. */
    internal val isFinal: Boolean = isFault(status) && reason !in ABOUT_SIGNATURES

    /** The coordinator takes no report for the assignment any more. */
    internal val isNotWanted: Boolean = reason in NOT_WANTED

    private companion object {
        val NOT_WANTED = setOf("no-longer-needed", "too-stale")

        // These name things that a coordinator keeps only for a while: it may have restarted, or the round may be over.
        val PASSING = setOf("unknown-session", "unknown-assignment", "unknown-blob", "conflicting-report") + NOT_WANTED

        // These are about a request's signer and time of signing, not about the request.
        val ABOUT_SIGNATURES = setOf("stale-signature", "replayed-signature", "unknown-device")

        fun isFault(status: Int) = status in 400..499 && status != 408 && status != 429
    }
}
