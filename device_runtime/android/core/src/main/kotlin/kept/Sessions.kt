/**
 * What a device keeps of its sessions: the journal of their outcomes, and its last assignment with the report.
 *
 * The report stays until it was counted. A device that stopped while it trained gives the assignment up when it is back. A
 * finished report is sent, and a secure aggregation continues from the durable state. Spec: docs/spec/wire.md §6, §8.
 */
package dev.muster.device.kept

import dev.muster.device.DeviceException
import dev.muster.device.Entry
import dev.muster.device.FormatException
import dev.muster.device.Identity
import dev.muster.device.Json
import dev.muster.device.StateDamaged
import dev.muster.device.Store
import dev.muster.device.Target
import dev.muster.device.base64
import dev.muster.device.fromBase64
import dev.muster.device.keptJson
import dev.muster.device.keptNumber
import dev.muster.device.wire.Assignment

private const val JOURNAL = "journal"
private const val MOST_ENTRIES = 1000
private val LOST = mapOf("outcome" to Entry.Kind.JOURNAL_LOST.text)

/**
 * Add an entry to the journal, for the device's owner: what was trained, when, for which task, and the outcome. A damaged journal
 * begins anew, and says so.
 *
 * at: seconds since 1970. others: changes of the store that become durable with it.
 */
internal fun writeJournal(store: Store, at: Double, entry: Map<String, Any?>, others: Map<String, String?> = emptyMap()) {
    val changes = HashMap(others)
    val written =
        try {
            keptNumber(store, JOURNAL) ?: 0
        } catch (_: StateDamaged) {
            changes[place(0)] = Json.write(mapOf("at" to at) + LOST)
            1
        }
    changes[place(written)] = Json.write(mapOf("at" to at) + entry)
    store.write(changes + (JOURNAL to "${written + 1}"))
}

/** Add an entry that is of no session. */
internal fun writeJournal(store: Store, at: Double, kind: Entry.Kind, detail: String) =
    writeJournal(store, at, mapOf("outcome" to kind.text, "detail" to detail))

/** Where the entry of that number is kept: each on its own, so that a long journal costs no more to write. */
private fun place(number: Long) = "$JOURNAL:${number % MOST_ENTRIES}"

/** The journal's entries, the oldest first; one that cannot be read says so as its kind. Throws [StateDamaged]. */
internal fun journal(store: Store): List<Entry> {
    val written = keptNumber(store, JOURNAL) ?: 0
    return (maxOf(0, written - MOST_ENTRIES) until written).map { number ->
        try {
            keptJson(store, place(number))?.members()
        } catch (_: DeviceException) {
            null
        } catch (_: FormatException) {
            null
        }.let { Entry(it ?: LOST) }
    }
}

/** How far the work on an assignment is. */
internal enum class Phase { ASSIGNED, TRAINED, MASKED, REPORTED }

/**
 * An assignment and its progress. due: seconds since 1970, by this device's clock.
 *
 * report: once trained, the body of the upload, or in a secure round the unweighted values; once masked, the state of SA1; once
 * reported, empty. A reported assignment is remembered so that the device does not train for it again. collection: the collection
 * that was trained on; empty before. question: what the plan asked, as the owner sees it.
 */
internal class KeptAssignment(
    val given: Assignment,
    val due: Double,
    val phase: Phase = Phase.ASSIGNED,
    val report: ByteArray = ByteArray(0),
    val collection: String = "",
    val examples: Int = 0,
    val steps: Int = 0,
    val question: String? = null,
) {
    /** The same with another phase and report. */
    fun at(phase: Phase, report: ByteArray) = KeptAssignment(given, due, phase, report, collection, examples, steps, question)
}

/**
 * The kept assignment of a device in one population of one coordinator.
 *
 * It is a line of JSON, and the report in base64 on its own line.
 */
internal class AssignmentKeeper(private val store: Store, target: Target) {
    private val place = "${Identity.ASSIGNMENT}${target.coordinator}:${target.population}"

    /** The kept assignment, if any. Throws [StateDamaged], after which it is gone. */
    fun get(): KeptAssignment? {
        val text = store.get(place) ?: return null
        try {
            val end = text.indexOf('\n')
            val json = Json.parse(text.substring(0, maxOf(end, 0)), "kept assignment")
            return read(json, fromBase64(text.substring(end + 1)))
        } catch (error: FormatException) {
            drop()
            throw StateDamaged("the assignment of an earlier session is lost: ${error.message}")
        }
    }

    private fun read(json: Json, report: ByteArray) =
        KeptAssignment(
            given = Assignment.of(json["given"]),
            due = json["due"].number(),
            phase = Phase.entries.find { it.name == json["phase"].text() } ?: json["phase"].wrong("a phase"),
            report = report,
            collection = json["collection"].text(),
            examples = json["examples"].size(),
            steps = json["steps"].size(),
            question = json.nullable("question")?.text(),
        )

    /** Make an assignment and its phase durable, with other changes, replacing the one before. */
    fun keep(kept: KeptAssignment, others: Map<String, String?> = emptyMap()): KeptAssignment {
        store.write(others + changed(kept))
        return kept
    }

    /** What the store keeps of an assignment and its phase. */
    fun changed(kept: KeptAssignment): Map<String, String> {
        val members =
            mapOf(
                "given" to kept.given.source, "due" to kept.due, "phase" to kept.phase.name, "collection" to kept.collection,
                "examples" to kept.examples, "steps" to kept.steps, "question" to kept.question,
            )
        return mapOf(place to "${Json.write(members)}\n${base64(kept.report)}")
    }

    /** Remove the kept assignment: nothing is left to do for it. */
    fun drop() = store.write(mapOf(place to null))
}
