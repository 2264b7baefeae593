/**
 * Messages of the device protocol, as JSON. Spec: docs/spec/wire.md.
 *
 * Members that are not known are ignored, so a newer peer may add some; an unknown `version` is refused. Every reader throws
 * [FormatException], which says which member is wrong.
 */
package dev.muster.device.wire

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.RetryWindow
import dev.muster.device.plans.BlobRef
import okhttp3.HttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrlOrNull

internal const val WIRE_VERSION = 1
private const val LONGEST_REPORTING_S = 7 * 86_400.0
private const val MOST_TOKEN = 200
private const val MOST_PURPOSE = 200
private const val MOST_ID = 200
private val DEVICE = Regex("[A-Za-z0-9_.:=+/-]{1,200}")
private val UNWRITTEN =
    setOf(Character.CONTROL, Character.FORMAT, Character.SURROGATE, Character.PRIVATE_USE, Character.UNASSIGNED).map { it.toInt() }

/** A task for which the coordinator would select this device, and its rules. */
internal class Offer(
    val task: String,
    val collection: String,
    val minExamples: Long,
    val minRecentExamples: Long,
    val maxExampleAgeS: Double?,
    val charging: Boolean,
    val idle: Boolean,
    val unmetered: Boolean,
    val minBattery: Double?,
    val minFreeStorageBytes: Long?,
) {
    companion object {
        fun of(json: Json) =
            Offer(
                task = id(json["task"]),
                collection = json["collection"].text(),
                minExamples = json.optional("min_examples")?.count() ?: 0,
                minRecentExamples = json.optional("min_recent_examples")?.count() ?: 0,
                maxExampleAgeS = json.nullable("max_example_age_s")?.number(),
                charging = json.optional("charging")?.flag() ?: false,
                idle = json.optional("idle")?.flag() ?: false,
                unmetered = json.optional("unmetered")?.flag() ?: false,
                minBattery = json.nullable("min_battery")?.number(),
                minFreeStorageBytes = json.nullable("min_free_storage_bytes")?.count(),
            )
    }
}

/** The answer to a check-in. */
internal sealed class CheckInAnswer {
    companion object {
        fun of(json: Json): CheckInAnswer =
            when (json["outcome"].text()) {
                "accepted" -> Accepted.of(json)
                "rejected" -> Rejected.of(json)
                else -> json["outcome"].wrong("accepted or rejected")
            }
    }
}

/** The device may wait to be selected for one of the offers. */
internal class Accepted(val session: String, val offers: List<Offer>, val retry: RetryWindow?) : CheckInAnswer() {
    companion object {
        fun of(json: Json) =
            Accepted(
                session = id(json["session"]),
                offers = json.optional("offers")?.list(Offer::of) ?: emptyList(),
                retry = json.nullable("retry")?.let(::retryOf),
            )
    }
}

/** There is no work now. */
internal class Rejected(val reason: String, val retry: RetryWindow, val token: String, val formats: List<String>) :
    CheckInAnswer() {
    companion object {
        private val REASONS =
            Regex("no-task|not-eligible|unsupported-format|resting|not-selected|superseded|too-early|shutting-down")

        fun of(json: Json) =
            Rejected(
                reason = json["reason"].text(REASONS),
                retry = retryOf(json["retry"]),
                token = json.optional("token")?.let { if (it.text().length > MOST_TOKEN) it.wrong("a token") else it.text() } ?: "",
                formats = json.optional("formats")?.list { it.text() } ?: emptyList(),
            )
    }
}

/** An assignment: a round of a task that this device works on. slot, seed: from 0 to 2⁶³ − 1. */
internal class Assignment(
    /** The message that it was read from: an assignment is kept as it came. */
    val source: Map<String, Any?>,
    val assignment: String,
    val task: String,
    val round: Int,
    val attempt: Long,
    val slot: Long,
    val seed: Long,
    val plan: BlobRef,
    val checkpoint: BlobRef,
    val reportWithinS: Double,
    val planSignature: Signature?,
    val minimum: Long?,
    val secagg: ByteArray?,
    val release: Signed?,
    val lineage: Signed?,
    val log: Proof?,
    val server: Succession?,
    val overSelected: Boolean,
    val lostAfterS: Double?,
    val purpose: String,
    val target: String?,
) {
    companion object {
        fun of(json: Json): Assignment {
            val version = json.optional("version")?.count() ?: WIRE_VERSION.toLong()
            if (version != WIRE_VERSION.toLong()) {
                throw FormatException("message version $version is unknown here; this side speaks $WIRE_VERSION")
            }
            return Assignment(
                source = json.members(),
                assignment = id(json["assignment"]),
                task = id(json["task"]),
                round = json["round"].size(),
                attempt = json["attempt"].whole(0..0xffff_ffff),
                slot = json["slot"].wide(),
                seed = json["seed"].wide(),
                plan = BlobRef.of(json["plan"]),
                checkpoint = BlobRef.of(json["checkpoint"]),
                reportWithinS = json["report_within_s"].run { number().also { if (it > LONGEST_REPORTING_S) wrong("a week at most") } },
                planSignature = json.nullable("plan_signature")?.let(Signature::of),
                minimum = json.nullable("minimum")?.count(),
                secagg = json.nullable("secagg")?.bytes(),
                release = json.nullable("release")?.let(Signed::of),
                lineage = json.nullable("lineage")?.let(Signed::of),
                log = json.nullable("log")?.let(Proof::of),
                server = json.nullable("server")?.let(Succession::of),
                overSelected = json.optional("over_selected")?.flag() ?: false,
                lostAfterS = json.nullable("lost_after_s")?.let { if (it.number() > 0) it.number() else it.wrong("a time above 0") },
                purpose = json.optional("purpose")?.let(::purposeOf) ?: "",
                target = json.optional("target")?.let(::targetOf),
            )
        }

        private fun purposeOf(json: Json): String {
            val text = json.text()
            return if (text.codePointCount(0, text.length) <= MOST_PURPOSE) text else json.wrong("$MOST_PURPOSE letters at most")
        }
    }
}

/** The parties of a coordinator's secure rounds. */
internal class Parties(val server: Succession, val authority: ByteArray, val authorityUrl: HttpUrl)

/** A device's id at a coordinator, and the parties of its secure rounds, if it has any. */
internal class Enrolled(val device: String, val secagg: Parties?) {
    companion object {
        fun of(json: Json) =
            Enrolled(
                device = json["device"].text(DEVICE),
                secagg =
                    json.nullable("secagg")?.let {
                        Parties(
                            server = Succession.of(it["server"]),
                            authority = it["authority"].bytes(32),
                            authorityUrl = it["authority_url"].run { text().toHttpUrlOrNull() ?: wrong("a URL") },
                        )
                    },
            )
    }
}

/** What an authority issued: a credential of 88 bytes, and the authority's key as a succession. */
internal class Issued(val credential: ByteArray, val authority: Succession) {
    companion object {
        fun of(json: Json) = Issued(json["credential"].bytes(88), Succession.of(json["authority"]))
    }
}

/** The receipt of a report. */
internal class Receipt(val sha256: String) {
    companion object {
        fun of(json: Json): Receipt {
            json["assignment"].text()
            json["task"].text()
            json["round"].count()
            return Receipt(json["sha256"].text())
        }
    }
}

/** Whether a round counts with this device's report; null while nobody knows. over: the task has ended. */
internal class Settled(val counted: Boolean?, val over: Boolean) {
    companion object {
        fun of(json: Json) = Settled(json["counted"].run { if (value == null) null else flag() }, json["over"].flag())
    }
}

/** A problem that a request met. */
internal class Problem(val type: String, val detail: String, val retry: RetryWindow?) {
    companion object {
        fun of(json: Json): Problem {
            json["status"].number()
            return Problem(
                type = json["type"].text(),
                detail = json.optional("detail")?.text() ?: "",
                retry = json.nullable("retry")?.let(::retryOf),
            )
        }
    }
}

/** An assignment, or a rejection. */
internal fun assignmentOrRejected(json: Json): Any =
    when (json["outcome"].text()) {
        "assigned" -> Assignment.of(json)
        "rejected" -> Rejected.of(json)
        else -> json["outcome"].wrong("assigned or rejected")
    }

/** The id of a session, an assignment or a task: it is named in paths, kept and printed. */
private fun id(json: Json): String {
    val text = json.text()
    val points = text.codePoints().toArray()
    val isId = points.size in 1..MOST_ID && points.none { Character.getType(it) in UNWRITTEN }
    return if (isId) text else json.wrong("an id of 1 to $MOST_ID letters that can be written")
}

/** A window that begins at 0 or later, and does not end before it begins. */
internal fun retryOf(json: Json): RetryWindow {
    val window = RetryWindow(json["min_s"].number(), json["max_s"].number())
    return if (window.minS in 0.0..window.maxS) window else json.wrong("a retry window with 0 <= min_s <= max_s")
}
