/**
 * Vectors that a device keeps from one of its rounds of a task to the next: named, float32.
 *
 * Those that a round made are pending until the device knows whether that round was committed with its report in it.
 */
package dev.muster.device.kept

import dev.muster.device.BadAnswer
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.Platform
import dev.muster.device.Refused
import dev.muster.device.Target
import dev.muster.device.TransportException
import dev.muster.device.base64
import dev.muster.device.fromBase64
import dev.muster.device.keeping
import dev.muster.device.keptJson
import dev.muster.device.plans.Plan
import dev.muster.device.plans.decodeVectors
import dev.muster.device.plans.encodeVectors
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.Settled

/** Seconds after which a device forgets what it keeps for a task in which it has not taken part since. */
private const val KEPT_S = 90 * 86_400.0

/** How many unsettled rounds a session asks about, each with one request before its check-in. */
private const val MOST_ASKED = 16
private const val ROWS = "vectors"

/** What is kept for a task: the plan's digest, the round that made the last, and bytes. until: seconds since 1970. */
private data class Row(
    val plan: String,
    val assignment: String,
    val round: Int,
    val attempt: Long,
    val until: Double,
    val currentBytes: Long,
    val pendingBytes: Long,
) {
    fun members() =
        mapOf(
            "plan" to plan, "assignment" to assignment, "round" to round, "attempt" to attempt, "until" to until,
            "current" to currentBytes, "pending" to pendingBytes,
        )

    companion object {
        fun of(json: Json) =
            Row(
                json["plan"].text(), json["assignment"].text(), json["round"].size(), json["attempt"].count(), json["until"].number(),
                json["current"].count(), json["pending"].count(),
            )
    }
}

/** What is kept for the tasks of one population of one coordinator. Every method throws [dev.muster.device.StateDamaged]. */
internal class KeptVectors(private val platform: Platform, target: Target) {
    private val store = platform.store
    private val start = "${target.coordinator} ${target.population} "

    /**
     * Settle every round that can be settled, and forget tasks that are over or old. ask: is told an assignment.
     *
     * The tasks that have to wait, each with words that say for what. So does one about which the coordinator gives no answer:
     * other tasks go on. In one session [MOST_ASKED] are asked about, drawn at random.
     */
    fun settleAll(ask: (String) -> Settled): Map<String, String> {
        forgetOld()
        val open = rows().filter { (key, row) -> key.startsWith(start) && row.pendingBytes > 0 }
        val waits = LinkedHashMap<String, String>()
        for ((place, entry) in open.entries.shuffled().withIndex()) {
            val (key, row) = entry
            val task = key.substring(start.length)
            val what = "round ${row.round} of task $task, attempt ${row.attempt}"
            try {
                val answer = if (place < MOST_ASKED) ask(row.assignment) else Settled(counted = null, over = false)
                if (answer.over) forget(key) else answer.counted?.let { settle(key, row, it) }
                if (answer.over || answer.counted != null) continue
                waits[task] = "it is not known yet whether $what, counts with this device's report"
            } catch (error: TransportException) {
                if (error !is Refused && error !is BadAnswer) throw error
                waits[task] = "it is not known yet whether $what, counts with this device's report: ${error.message}"
            }
        }
        return waits
    }

    /**
     * What counts for an assignment's task; null before the first round of this device that counted.
     *
     * Throws [PlanRefused] when it cannot be used: a round is unsettled, the plan is another, or the bytes are damaged.
     */
    fun of(given: Assignment, plan: Plan): Map<String, FloatArray>? {
        val key = start + given.task
        val row = rows()[key] ?: return null
        if (row.pendingBytes > 0) throw PlanRefused("how the last round of task ${given.task} ended is not known here yet")
        if (row.currentBytes == 0L) return null
        if (row.plan != given.plan.sha256) {
            throw PlanRefused(
                "what is kept for task ${given.task} is of plan ${row.plan.take(12)}…, not of ${given.plan.sha256.take(12)}…; " +
                    "it stays as it is: a new plan needs a new task",
            )
        }
        try {
            return decodeVectors(fromBase64(store.get(current(key)) ?: ""), plan.kept)
        } catch (_: FormatException) {
            forget(key)
            throw PlanRefused("what was kept for task ${given.task} is damaged, and forgotten: the next round begins anew")
        }
    }

    /** What the store keeps of what an assignment's round made, until it is settled. Before a device sends its report. */
    fun put(given: Assignment, vectors: Map<String, FloatArray>): Map<String, String?> {
        val key = start + given.task
        val data = encodeVectors(vectors)
        val currentBytes = rows()[key]?.currentBytes ?: 0
        val until = platform.now() + KEPT_S
        val row = Row(given.plan.sha256, given.assignment, given.round, given.attempt, until, currentBytes, data.size.toLong())
        return mapOf(pending(key) to base64(data), written(rows() + (key to row)))
    }

    /** Bytes that are kept but for this task, also of other populations and coordinators. */
    fun bytesBesides(task: String): Long = rows().filterKeys { it != start + task }.values.sumOf { it.currentBytes + it.pendingBytes }

    /** Take over what the last round made, or drop it. */
    private fun settle(key: String, row: Row, isCounted: Boolean) {
        val bytes = if (isCounted) row.pendingBytes else row.currentBytes
        val taken = if (isCounted) mapOf(current(key) to store.get(pending(key))) else emptyMap()
        val rows = written(rows() + (key to row.copy(currentBytes = bytes, pendingBytes = 0)))
        store.write(taken + mapOf(pending(key) to null, rows))
    }

    private fun forget(key: String) = store.write(mapOf(current(key) to null, pending(key) to null, written(rows() - key)))

    /** A time of the future that is further than it can be counts from now on. */
    private fun forgetOld() {
        val now = platform.now()
        for ((key, row) in rows()) {
            if (row.until <= now) forget(key)
            if (row.until > now + KEPT_S) store.write(mapOf(written(rows() + (key to row.copy(until = now + KEPT_S)))))
        }
    }

    private fun rows(): Map<String, Row> = keptJson(store, ROWS)?.let { kept -> keeping(ROWS) { kept.map(Row::of) } } ?: emptyMap()

    private fun written(rows: Map<String, Row>): Pair<String, String> = ROWS to Json.write(rows.mapValues { it.value.members() })

    private fun current(key: String) = "vectors-current:$key"

    private fun pending(key: String) = "vectors-pending:$key"
}
