/** The device's part in a secure round: what it checks of an invitation, and the conversation. Spec: docs/spec/wire.md §8. */
package dev.muster.device.protocol

import dev.muster.device.AlreadyRevealed
import dev.muster.device.DeadlinePassed
import dev.muster.device.Refused
import dev.muster.device.SecaggRefused
import dev.muster.device.keeping
import dev.muster.device.kept.AssignmentKeeper
import dev.muster.device.kept.KeptAssignment
import dev.muster.device.kept.Phase
import dev.muster.device.keptNumber
import dev.muster.device.plans.ReportLayout
import dev.muster.device.plans.VectorSpec
import dev.muster.device.plans.decodeVectors
import dev.muster.device.plans.hasCodecs
import dev.muster.device.plans.weightOf
import dev.muster.device.secagg.AggregationPolicy
import dev.muster.device.secagg.Client
import dev.muster.device.secagg.HeldModel
import dev.muster.device.secagg.Invite
import dev.muster.device.secagg.LEAST_COHORT
import dev.muster.device.secagg.M
import dev.muster.device.secagg.SecaggException
import dev.muster.device.secagg.SessionInput
import dev.muster.device.secagg.SessionResult
import dev.muster.device.secagg.acceptInvitation
import dev.muster.device.secagg.leastHonest
import dev.muster.device.secagg.numberOf
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.Release
import dev.muster.device.wire.SumBounds
import dev.muster.device.wire.verifiedEntry
import dev.muster.device.wire.verifiedRelease

/** The seconds that a request waits for a message, and the seconds between two requests. */
private const val WAIT_S = 20.0
private const val PAUSE_S = 0.2

/** The unmasked vector of a report. */
internal const val UNWEIGHTED = "values"

/** The secure delivery of one assignment. keepGoing: whether there is time left; it may throw to end the session. */
internal class SecureDelivery(
    private val visit: Visit,
    private val keeper: AssignmentKeeper,
    private val keepGoing: () -> Boolean,
) {
    private val store = visit.platform.store

    /** Throws [SecaggRefused], before any work, for an invitation that this device would not accept. */
    fun check(given: Assignment, layout: ReportLayout) {
        explained { accept(policy(given), given, layout) }
    }

    /**
     * Take part to the end, continuing where an earlier session stopped.
     *
     * Throws [SecaggRefused] or [dev.muster.device.TransportException].
     */
    fun run(kept: KeptAssignment, layout: ReportLayout): SessionResult =
        explained {
            val last = if (boundsOf(kept.given).noiseMultiplier > 0) M.MASKED else M.UNMASK
            val (client, first) = if (kept.phase == Phase.MASKED) resume(kept) else begin(kept, layout)
            var received = first
            while (true) {
                val reply = client.receive(received)
                val message = reply.message ?: break
                if (reply.keep != null) {
                    // The sums of two attempts could differ by one device, whose report would be the difference. With noise, others
                    // can open a sum that this device is in, and every further one would tell more than one round may.
                    val isOver = numberOf(message) == last
                    val noted = if (isOver) answered(kept.given, lastSessionNumber(kept.given.round)) else emptyMap()
                    keeper.keep(kept.at(Phase.MASKED, reply.keep), noted)
                }
                received = say(kept.given.assignment, message)
            }
            client.result
        }

    /** The client of a new session, and M0. This notes the round, which must happen before M1 leaves. */
    private fun begin(kept: KeptAssignment, layout: ReportLayout): Pair<Client, ByteArray> {
        val given = kept.given
        val policy = policy(given)
        val invite = accept(policy, given, layout)
        val report = keeping("the report") { decodeVectors(kept.report, listOf(VectorSpec(UNWEIGHTED, layout.size - 1))) }
        val input =
            SessionInput(
                vector = summedValues(layout, boundsOf(given), report.getValue(UNWEIGHTED)),
                weight = minOf(weightOf(layout, kept.examples).toLong(), invite.wMax),
                held = held(given, layout),
                credential = visit.enrolments.credential().credential,
                lastRound = lastRound(given),
                now = visit.platform.now().toLong(),
            )
        store.write(answered(given, sessionNumber(given.round, given.attempt)))
        return Client(visit.enrolments.secagg, policy, input, visit.platform::random) to given.secagg!!
    }

    /** The client of a session in which the masked report may have left, and M8. */
    private fun resume(kept: KeptAssignment): Pair<Client, ByteArray> {
        val client = Client.restore(visit.enrolments.secagg, policy(kept.given), kept.report)
        return client to hear(kept.given.assignment, M.SURVIVORS)
    }

    /** The policy with the keys that this device pinned. The assignment must show the pinned key or a successor. */
    private fun policy(given: Assignment): AggregationPolicy {
        val authority = visit.enrolments.credential().authority
        val serverKey = visit.enrolments.server(given.server)
        return AggregationPolicy(serverKey, authority, maxOf(visit.place.policy.minCohort, LEAST_COHORT.toLong()))
    }

    /** The invitation of an assignment, if this device may accept it. */
    private fun accept(policy: AggregationPolicy, given: Assignment, layout: ReportLayout): Invite {
        val last = lastRound(given)
        if (last == lastSessionNumber(given.round)) {
            throw AlreadyRevealed("this device did its part in an earlier attempt at round ${given.round}")
        }
        val invite = acceptInvitation(policy, given.secagg!!, held(given, layout), last)
        checkInvitation(invite, given, layout, released(given))
        return invite
    }

    /**
     * The greatest session number of its task, or of its release, that this device answered; -1 when it answered none.
     *
     * A coordinator can choose a task's name freely, but cannot offer the model of a release again under another name. An
     * evaluation of a round's model counts apart.
     */
    private fun lastRound(given: Assignment): Long = answeredPlaces(given).maxOf { keptNumber(store, it) ?: -1 }

    /** What the store keeps once this device will not answer this or an earlier round of the task or release again. */
    private fun answered(given: Assignment, number: Long): Map<String, String> =
        answeredPlaces(given).associateWith { number.toString() }

    private fun answeredPlaces(given: Assignment): List<String> {
        val isEvaluation = released(given).evaluationBy(given.plan.sha256) != null
        val model = given.lineage?.takeIf { isEvaluation }?.let { "/${verifiedEntry(it).round}" } ?: ""
        return listOf("answered:${visit.place.coordinator}:${given.task}", "answered:${given.release!!.digest}$model")
    }

    /** Send a message. Returns the coordinator's next one. */
    private fun say(assignment: String, message: ByteArray): ByteArray {
        val number = numberOf(message)
        try {
            val answer = visit.transport.secagg(assignment, number, WAIT_S, message) ?: return hear(assignment, number + 1)
            return only(number + 1, answer)
        } catch (error: Refused) {
            if (error.reason == "unusable-message" && number == M.ADVERTISE) visit.enrolments.refused()
            throw error
        }
    }

    private fun hear(assignment: String, number: Int): ByteArray {
        while (keepGoing()) {
            visit.transport.secagg(assignment, number, WAIT_S)?.let { return only(number, it) }
            visit.platform.sleep(PAUSE_S, visit.transport.stopping)
        }
        throw DeadlinePassed("message M$number of the secure aggregation did not come in time")
    }
}

private fun released(given: Assignment): Release =
    verifiedRelease(given.release ?: throw SecaggRefused("the invitation comes without a release"))

/** The bounds of the sums of an assignment, which was checked. */
private fun boundsOf(given: Assignment): SumBounds = released(given).boundsOf(given.plan.sha256)

/** The hashes of the model and the layout that this device holds. */
private fun held(given: Assignment, layout: ReportLayout) =
    HeldModel(modelHash(given.plan, given.checkpoint), layoutHash(layout, given.seed))

/** The message, if it has that number; otherwise a coordinator could make a device repeat a step forever. */
private fun only(number: Int, message: ByteArray): ByteArray {
    if (numberOf(message) != number) {
        throw SecaggRefused("M${message[0]} of the secure aggregation came instead of M$number")
    }
    return message
}

/** Throws [SecaggRefused] for an invitation that is not for its assignment, or contradicts the release. */
internal fun checkInvitation(invite: Invite, given: Assignment, layout: ReportLayout, release: Release) {
    val bounds = release.boundsOf(given.plan.sha256)
    val number = sessionNumber(given.round, given.attempt)
    demand(invite.task.contentEquals(taskHash(given.task)) && invite.round == number.toULong()) {
        "the invitation is for another task or round than the assignment"
    }
    demand(!hasCodecs(layout) || release.seed == given.seed) { "the report's codecs have another seed than the released one" }
    demand(given.target == bounds.target) {
        "the assignment is for ${wanted(given.target)}, and the release is for ${wanted(bounds.target)}"
    }
    demand(invite.minSum >= bounds.minSum) {
        "the sum may be over ${invite.minSum} devices, the release demands ${bounds.minSum}"
    }
    demand(invite.wMax == greatestWeight(layout, bounds)) { "the greatest weight is ${invite.wMax}, not the one that is released" }
    if (bounds.noiseMultiplier > 0) checkNoise(invite, layout, bounds)
    demand(invite.segments.map { it.format } == fixedPoints(layout, bounds)) {
        "the invitation's segments are not those of the plan's report under the release's bounds"
    }
}

private fun wanted(target: String?) = if (target == null) "any device" else "devices with $target"

private fun checkNoise(invite: Invite, layout: ReportLayout, bounds: SumBounds) {
    val honest = leastHonest(invite.minSum, invite.nMax)
    demand(bounds.honest in 1..honest) {
        "noise is to come from ${bounds.honest} devices, and a sum over ${invite.minSum} of a roster of up to ${invite.nMax} " +
            "may have $honest honest ones"
    }
    demand(!layout.byExamples) { "noise would hide the values of the report, and not the number of examples" }
}

private inline fun demand(holds: Boolean, why: () -> String) {
    if (!holds) throw SecaggRefused(why())
}

private fun <T> explained(step: () -> T): T =
    try {
        step()
    } catch (error: SecaggException) {
        throw SecaggRefused("${error.name}: ${error.message}")
    }
