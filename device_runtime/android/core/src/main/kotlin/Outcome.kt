/** How sessions end, and what the journal says of them. */
package dev.muster.device

import java.time.Instant
import java.util.Locale

/** How a session ended. [text] is its name in JSON. */
public enum class Ending {
    /** The report was counted. */
    REPORTED,

    /** There is no work now. */
    REJECTED,

    /** The round ended first. */
    NOT_NEEDED,

    /** A rule of this device does not hold, and nothing was sent. */
    NOT_NOW,

    /** The device gave its assignment up. */
    ABORTED,

    /** The rest. */
    FAILED,
    ;

    public val text: String = textOf(this)
}

private fun textOf(one: Enum<*>) = one.name.lowercase(Locale.ROOT).replace('_', '-')

/**
 * The end of a session.
 *
 * @property reason the name of the rule or error, as [DeviceException.reason] or the coordinator has it; empty after a report
 * @property detail the same in words
 * @property target the task's expression on labels, safe to show; empty where any device may take part
 * @property question what the plan asked, as one line that is safe to show; null where it asks nothing
 * @property numbers numbers in the report; 0 before it is made
 * @property told what became of a question, in words for the owner; empty where none was asked
 * @property cut texts that were longer than the plan's tokens, and cut
 * @property retry when the coordinator wants the device back
 * @property retryable where the report was not counted: whether a retry within minutes is useful
 */
public data class Outcome(
    val ending: Ending = Ending.FAILED,
    val reason: String = "",
    val detail: String = "",
    val device: String = "",
    val task: String = "",
    val round: Int = 0,
    val attempt: Long = 0,
    val target: String = "",
    val secure: Boolean = false,
    val question: String? = null,
    val numbers: Int = 0,
    val told: String = "",
    val examples: Int = 0,
    val steps: Int = 0,
    val cut: Int = 0,
    val bytesUp: Long = 0,
    val bytesDown: Long = 0,
    val retry: RetryWindow? = null,
    val retryable: Retryable? = null,
) {
    /** The outcome as JSON, with the members that every runtime of this project prints. */
    public fun toJson(): String = Json.write(members())

    internal fun members(): Map<String, Any?> =
        linkedMapOf(
            "outcome" to ending.text, "reason" to reason, "detail" to detail, "device" to device, "task" to task, "round" to round,
            "attempt" to attempt, "target" to target, "secure" to secure, "question" to question, "numbers" to numbers,
            "told" to told, "examples" to examples, "steps" to steps, "cut" to cut, "bytes_up" to bytesUp, "bytes_down" to bytesDown,
            "retry" to retry?.let { mapOf("min_s" to it.minS, "max_s" to it.maxS) }, "retryable" to retryable?.let(::textOf),
        )

    /** This outcome after an error. */
    internal fun failed(error: DeviceException): Outcome {
        val isOver = error is Refused && error.status == 410
        return copy(
            ending = if (isOver) Ending.NOT_NEEDED else Ending.FAILED,
            reason = error.reason,
            detail = error.message ?: "",
            retry = if (error is Refused) error.hints.retry else retry,
            retryable = if (error.isPermanent) Retryable.PERMANENT else Retryable.TRANSIENT,
        )
    }

    public enum class Retryable { TRANSIENT, PERMANENT }
}

/** An entry of the journal: what the device did, for its owner. */
public class Entry internal constructor(internal val members: Map<String, Any?>) {
    /** By this device's clock; null in an entry that was lost. */
    public val at: Instant? = (members["at"] as? Number)?.let { Instant.ofEpochMilli((1000 * it.toDouble()).toLong()) }

    /** How a session ended, or why a personal model was not made; null in other entries. */
    public val outcome: Outcome? = Ending.entries.find { it.text == text("outcome") }?.let(::outcome)
    public val kind: Kind = kind()

    /** What happened, in words; empty where [outcome] says it all. */
    public val detail: String get() = text("detail")

    /** The whole entry as JSON, as it is kept. */
    public fun toJson(): String = Json.write(members)

    override fun toString(): String = toJson()

    private fun kind(): Kind {
        if (outcome == null) return Kind.entries.find { it != Kind.SESSION && it.text == text("outcome") } ?: Kind.OTHER
        return if (outcome.device.isEmpty() && outcome.task.startsWith(MODEL)) Kind.PERSONALISED else Kind.SESSION
    }

    private fun outcome(ending: Ending) =
        Outcome(
            ending, text("reason"), text("detail"), text("device"), text("task"), whole("round").toInt(), whole("attempt"),
            text("target"), members["secure"] == true, members["question"] as? String, whole("numbers").toInt(), text("told"), whole("examples").toInt(),
            whole("steps").toInt(), whole("cut").toInt(), whole("bytes_up"), whole("bytes_down"), retry(),
            Outcome.Retryable.entries.find { textOf(it) == text("retryable") },
        )

    private fun retry(): RetryWindow? {
        val (least, most) = listOf("min_s", "max_s").map { (members["retry"] as? Map<*, *>)?.get(it) as? Number ?: return null }
        return RetryWindow(least.toDouble(), most.toDouble())
    }

    private fun text(name: String) = members[name] as? String ?: ""

    private fun whole(name: String) = (members[name] as? Number)?.toLong() ?: 0

    public enum class Kind {
        SESSION,

        /** A personal model was made, where [outcome] is null; [detail] says whether it is used. */
        PERSONALISED,

        /** Personal parameters were deleted. */
        PERSONAL_DROPPED,

        /** A version of a model was not taken. */
        MODEL_REFUSED,

        /** State that could not be read was replaced. */
        STATE_REPLACED,

        /** Entries could not be read. */
        JOURNAL_LOST,

        /** What another version of this library wrote; [toJson] has it. */
        OTHER,
        ;

        public val text: String = textOf(this)
    }

    internal companion object {
        /** How the task begins in entries of personal models. */
        const val MODEL = "model "
    }
}
