/**
 * The guard: it checks the owner's policy before anything runs. The rules: docs/device.md.
 *
 * The coordinator receives only the name of the reason. The value and the limit stay in the outcome.
 */
package dev.muster.device.permission

import dev.muster.device.BytesMoved
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.Platform
import dev.muster.device.Policy
import dev.muster.device.PolicyForbids
import dev.muster.device.Target
import dev.muster.device.keeping
import dev.muster.device.kept.KeptAssignment
import dev.muster.device.kept.Phase
import dev.muster.device.keptJson
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.MOST_PLAN_BYTES
import dev.muster.device.plans.Plan
import dev.muster.device.plans.batchBytes
import dev.muster.device.plans.keptRefs
import dev.muster.device.plans.stepCount
import dev.muster.device.plans.uploadBytes
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.verifyPlan
import okhttp3.HttpUrl

private const val DAY_S = 86_400.0
private const val WEEK_S = 7 * DAY_S
private const val FLOAT_BYTES = 4.0
private const val SPENT = "spent"
private const val ANSWERS = "answers"

/** Where a device takes part, and under which policy. */
internal class Place(override val coordinator: HttpUrl, override val population: String, val policy: Policy) : Target

/** Check a URL, described by `whose`, before the first byte. Throws [PolicyForbids] if required TLS is missing. */
internal fun checkHttps(policy: Policy, whose: String, url: HttpUrl) {
    if (policy.requireHttps && !url.isHttps) {
        throw PolicyForbids("against require_https of this device's policy: $whose is at ${url.scheme}://${url.host}:${url.port}")
    }
}

/** The error for a plan that a rule of the policy does not let run. */
internal fun refused(rule: String, why: String): PlanRefused = PlanRefused("against $rule of this device's policy: $why")

/** What `check` gives; what is not of the form that the specification wants breaks a rule of the policy. */
internal fun <T> breaking(rule: String, check: () -> T): T =
    try {
        check()
    } catch (error: FormatException) {
        throw refused(rule, error.message!!)
    }

/** The use at a time, in seconds since 1970. */
private class Spent(val at: Double, val seconds: Double, val bytes: Long, val sessions: Int) {
    fun members() = mapOf("at" to at, "seconds" to seconds, "bytes" to bytes, "sessions" to sessions)

    /** The same; one of the future counts from now on. */
    fun notAfter(now: Double) = Spent(minOf(at, now), seconds, bytes, sessions)

    companion object {
        fun of(json: Json) = Spent(json["at"].number(), json["seconds"].number(), json["bytes"].count(), json["sessions"].size())
    }
}

/** The checks of one session, in the order of their use. It knows the use of the last day, and counts that of this session. */
internal class Guard(private val platform: Platform, private val place: Place, private val moved: BytesMoved) {
    private val policy = place.policy
    private val spent: List<Spent>
    private val answers: Int = answersOf(platform).size
    private var started: Double? = null

    init {
        val now = platform.now()
        val kept = keptJson(platform.store, SPENT)?.let { all -> keeping(SPENT) { all.list(Spent::of) } } ?: emptyList()
        spent = kept.filter { now - it.at < DAY_S }.map { it.notAfter(now) }
        if (kept.any { it.at > now }) platform.store.write(mapOf(SPENT to Json.write(spent.map { it.members() })))
    }

    /** Seconds of work in this session. */
    val seconds: Double get() = started?.let { platform.workSeconds() - it } ?: 0.0

    /** What the store keeps once the use of this session so far is counted, replacing its earlier count. */
    fun spending(sessions: Int): Map<String, String?> {
        val all = spent + Spent(platform.now(), seconds, moved.total, sessions)
        return mapOf(SPENT to Json.write(all.map { it.members() }))
    }

    /** Check the population and the day's budget before the first request. Throws [PolicyForbids]. */
    fun checkIn() {
        checkPopulation()
        val day = policy.perDay
        notUsedUp("compute_seconds", spent.sumOf { it.seconds }, day.computeSeconds)
        notUsedUp("bytes", spent.sumOf { it.bytes }, day.bytes)
        notUsedUp("sessions", spent.sumOf { it.sessions }, day.sessions)
    }

    /** Check the population, before anything is asked of the coordinator for it. Throws [PolicyForbids]. */
    fun checkPopulation() {
        if (policy.populations?.contains(place.population) == false) throw forbidden("populations", "it does not name ${place.population}")
    }

    /** Check the limits of a plan before fetching what predicts. missing: bytes that are still to come. Throws [PlanRefused]. */
    fun checkPredict(plan: Plan, sizes: Map<String, Long>, missing: Long) {
        val all = sizes.values.sum()
        atMost("plan.parameters", plan.parameters, policy.plan.parameters)
        atMost("plan.graph_bytes", all - (sizes["plan"] ?: 0) - (sizes["parameters"] ?: 0), policy.plan.graphBytes)
        atMost("plan.memory_bytes", all, policy.plan.memoryBytes)
        checkBytes(missing)
    }

    /** The counts of examples in collections that a coordinator may know. */
    fun visible(counts: Map<String, Int>): Map<String, Int> = counts.filterKeys(::shows)

    /** The labels that a coordinator may know. */
    fun told(labels: Map<String, String>): Map<String, String> = labels.filterKeys { it in policy.labels }

    /** Whether a plan may train on a collection, and a coordinator may know its number of examples. */
    fun shows(collection: String): Boolean = policy.collections?.contains(collection) ?: true

    /**
     * Check an earlier session's work before finishing it: the policy may have changed.
     *
     * A finished report is checked against all rules but the plan's limits, unfinished work only against the population. Throws
     * [PolicyForbids] or [PlanRefused].
     */
    fun checkKept(kept: KeptAssignment) {
        checkPopulation()
        if (kept.phase == Phase.ASSIGNED) return
        checkRound(kept.given, isAgain = true)
        checkCollection(kept.collection)
        checkBytes(kept.report.size)
        checkQuestion(kept.question, answers - 1) // this one is counted already
    }

    /** Check cohort, signature or release, and size before fetching the plan. Throws [PlanRefused]. */
    fun checkAssignment(given: Assignment) {
        checkRound(given, isAgain = false)
        checkSizes(given.plan, given.checkpoint)
    }

    /** Check sizes before fetching a plan and the model's parameters. Throws [PlanRefused]. */
    fun checkSizes(plan: BlobRef, parameters: BlobRef) {
        if (plan.size > MOST_PLAN_BYTES) {
            throw PlanRefused("the plan has ${plan.size} bytes, a device reads at most $MOST_PLAN_BYTES")
        }
        checkBytes(plan.size + parameters.size)
        atMost("plan.memory_bytes", plan.size + parameters.size, policy.plan.memoryBytes)
    }

    /** Check that the cache can hold the bytes that a plan needs between rounds. Throws [PlanRefused]. */
    fun checkCache(needed: Double) {
        // What does not stay would be fetched in every round. With 0 that is what the owner wants.
        atMost("cache_bytes", needed, policy.cacheBytes.takeIf { it > 0 })
    }

    /**
     * Check schema, limits and collection before reading examples and fetching graphs. This starts the timer.
     *
     * given, checkpoint: the plan and the parameters as they are fetched. examples: their number. others: bytes of vectors that are kept
     * for other tasks. Throws [PlanRefused].
     */
    fun checkPlan(given: BlobRef, checkpoint: BlobRef, plan: Plan, examples: Int, others: Long = 0) {
        val received = plan.broadcast.find { it.name == "params" }?.size
        if (received != plan.parameters) {
            throw PlanRefused("the plan's schema has ${plan.parameters} parameters, its broadcast $received")
        }
        val vectors = (plan.broadcast + plan.passes.flatMap { it.carry }).map { it.size } + plan.report.segments.map { it.size }
        // Of doubles, as sums of hostile numbers may be beyond every integer.
        val kept = keptRefs(plan).sumOf { it.size.toDouble() }
        val report = FLOAT_BYTES * plan.report.size
        val visited = plan.passes.sumOf { it.loop.batchSize.toDouble() * stepCount(it.loop, examples) }
        atMost("plan.parameters", vectors.max(), policy.plan.parameters)
        atMost("plan.graph_bytes", kept, policy.plan.graphBytes)
        atMost("plan.memory_bytes", given.size + checkpoint.size + kept + report + batchBytes(plan), policy.plan.memoryBytes)
        checkBytes(kept + checkpoint.size + uploadBytes(plan.report))
        atMost("plan.batch_examples", visited, policy.plan.batchExamples)
        if (plan.kept.isNotEmpty()) atMost("state_bytes", others + FLOAT_BYTES * plan.kept.sumOf { it.size.toDouble() }, policy.stateBytes)
        checkCollection(plan.examples.collection)
        started = platform.workSeconds()
    }

    /** Call this while training. Throws [PlanRefused] when the compute seconds of plan or day are used up. */
    fun checkWork() {
        atMost("plan.compute_seconds", seconds, policy.plan.computeSeconds)
        atMost("per_day.compute_seconds", spent.sumOf { it.seconds } + seconds, policy.perDay.computeSeconds)
    }

    /** Check what a plan asks, or null, before anything else of it. answers: those of the last week. Throws [PlanRefused]. */
    fun checkQuestion(question: String?, answers: Int = this.answers) {
        if (question == null) return
        if (!policy.questions.allowed) throw refused("questions.allowed", "the plan asks a question")
        val most = policy.questions.perWeek
        if (most != null && answers >= most) throw refused("questions.per_week", "$answers of $most are answered within a week")
    }

    private fun checkCollection(collection: String) {
        if (!shows(collection)) throw refused("collections", "the plan wants $collection")
    }

    /** more: bytes that this session still needs, as far as known. */
    private fun checkBytes(more: Number) =
        atMost("per_day.bytes", spent.sumOf { it.bytes } + moved.total + more.toDouble(), policy.perDay.bytes)

    /** Check cohort, and signature or release. isAgain: an earlier session accepted the assignment. */
    private fun checkRound(given: Assignment, isAgain: Boolean) {
        val isClear = given.secagg == null
        if (policy.requireSecureAggregation && isClear) {
            throw refused("require_secure_aggregation", "the round asks for the report in the clear")
        }
        val minimum = given.minimum ?: 1
        if (policy.minCohort > minimum) {
            throw refused("min_cohort", "the round may count with $minimum reports, the least allowed is ${policy.minCohort}")
        }
        if (policy.minNoiseMultiplier > 0 && isClear) {
            throw refused("min_noise_multiplier", "the round asks for the report in the clear, without noise")
        }
        if (isClear) checkSignature(given) else checkRelease(platform, place, given, isAgain)
    }

    private fun checkSignature(given: Assignment) {
        if (policy.signers.isEmpty()) return
        val signature = given.planSignature
        if (signature == null || signature.signer !in policy.signers) {
            val signer = signature?.signer ?: "nobody"
            throw refused("signers", "the plan is signed by $signer, which the policy does not name")
        }
        breaking("signers") { verifyPlan(given.plan, signature) }
    }

    private fun notUsedUp(rule: String, used: Number, most: Number?) {
        if (most != null && used.toDouble() >= most.toDouble()) {
            throw forbidden("per_day.$rule", "${shown(used)} of ${shown(most)} are used up in the last 24 hours")
        }
    }
}

private fun atMost(rule: String, found: Number, allowed: Number?) {
    if (allowed != null && found.toDouble() > allowed.toDouble()) throw refused(rule, "${shown(found)} found, ${shown(allowed)} allowed")
}

private fun shown(amount: Number): String = Json.write(amount.toDouble())

private fun forbidden(rule: String, why: String) = PolicyForbids("against $rule of this device's policy: $why")

/**
 * The times of the answers of the last seven days, in seconds since 1970. Throws [dev.muster.device.StateDamaged].
 *
 * A clock that goes back gives none of them back: an answer of the future counts for a week from now on.
 */
internal fun answersOf(platform: Platform): List<Double> {
    val at = platform.now()
    val kept = keptJson(platform.store, ANSWERS)?.let { all -> keeping(ANSWERS) { all.list { it.number() } } } ?: emptyList()
    val recent = kept.filter { at - it < WEEK_S }.map { minOf(it, at) }
    if (recent != kept) platform.store.write(mapOf(ANSWERS to Json.write(recent)))
    return recent
}

/** What the store keeps once one more answer is counted, which must be before anything of it is sent. */
internal fun oneMoreAnswer(platform: Platform): Map<String, String?> =
    mapOf(ANSWERS to Json.write(answersOf(platform) + platform.now()))
