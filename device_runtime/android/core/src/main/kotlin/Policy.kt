/** The owner's policy as data, which no coordinator can change. The meaning: docs/device.md. */
package dev.muster.device

import dev.muster.device.wire.publicKey
import okhttp3.HttpUrl.Companion.toHttpUrlOrNull

/** The most that a device uses within any 24 hours; null is no limit. bytes: down and up together. */
public data class PerDay(val computeSeconds: Double? = null, val bytes: Long? = null, val sessions: Long? = null)

/** The largest plan that a device runs, and the most that training uses; null is no limit. */
public data class PlanLimits(
    val parameters: Long? = null,
    val graphBytes: Long? = null,
    val batchExamples: Long? = null,
    val memoryBytes: Long = 1_000_000_000,
    val computeSeconds: Double = 600.0,
)

/** What a device does when a plan asks a question; perWeek: the most answers within seven days, null for no limit. */
public data class Questions(val allowed: Boolean = true, val perWeek: Long? = null)

/**
 * The limits of a device. Null is no limit, or any name. The default allows everything but secure rounds.
 *
 * Java has no named arguments: there [of] takes the same settings as JSON.
 *
 * `unsigned_programs` of other runtimes forbids nothing here: this runtime has no ExecuTorch programs.
 */
public data class Policy(
    val populations: Set<String>? = null,
    val collections: Set<String>? = null,
    val labels: Set<String> = emptySet(),
    val signers: Set<String> = emptySet(),
    val minCohort: Long = 1,
    val minNoiseMultiplier: Double = 0.0,
    val requireSecureAggregation: Boolean = false,
    val requireReleaseLog: Boolean = false,
    val requireHttps: Boolean = false,
    val authority: String? = null,
    val authorityUrl: String? = null,
    val cacheBytes: Long = 200_000_000,
    val stateBytes: Long = 200_000_000,
    val perDay: PerDay = PerDay(),
    val plan: PlanLimits = PlanLimits(),
    val questions: Questions = Questions(),
) {
    init {
        if (populations?.isEmpty() == true) bad("populations", "it must name one or more, or be null")
        if (collections?.isEmpty() == true) bad("collections", "it must name one or more, or be null")
        labels.forEach(::checkLabelName)
        if (minCohort < 1) bad("min_cohort", "it must be 1 or more")
        if (!(minNoiseMultiplier >= 0 && minNoiseMultiplier.isFinite())) bad("min_noise_multiplier", "it must be 0 or more")
        signers.forEach { checkKey("signers", it) }
        authority?.let { checkKey("authority", it) }
        if (authorityUrl != null) {
            if (authorityUrl.toHttpUrlOrNull() == null) bad("authority_url", "it must be a URL, such as https://fl.example")
            if (authority == null) bad("authority_url", "it needs authority, the public key that is to be found there")
        }
    }

    public companion object {
        private val KEYS =
            setOf(
                "populations", "collections", "labels", "signers", "min_cohort", "min_noise_multiplier", "require_secure_aggregation",
                "require_release_log", "unsigned_programs", "require_https", "authority", "authority_url", "cache_bytes",
                "state_bytes", "per_day", "plan", "questions",
            )
        private val DAY = setOf("compute_seconds", "bytes", "sessions")
        private val PLAN = setOf("parameters", "graph_bytes", "batch_examples", "memory_bytes", "compute_seconds")
        private val QUESTIONS = setOf("allowed", "per_week")

        /** A policy from its settings as JSON, with defaults for the rest. Throws [ConfigException], naming the wrong setting. */
        @JvmStatic
        public fun of(settings: String): Policy =
            try {
                read(Json.parse(settings, "policy"))
            } catch (error: FormatException) {
                throw ConfigException(error.message!!)
            }

        private fun read(json: Json): Policy {
            known("", json, KEYS)
            json.optional("unsigned_programs")?.flag()
            val default = Policy()
            return Policy(
                populations = json.nullable("populations")?.names(),
                collections = json.nullable("collections")?.names(),
                labels = json.optional("labels")?.names() ?: default.labels,
                signers = json.optional("signers")?.names() ?: default.signers,
                minCohort = json.optional("min_cohort")?.count() ?: default.minCohort,
                minNoiseMultiplier = json.optional("min_noise_multiplier")?.amount() ?: default.minNoiseMultiplier,
                requireSecureAggregation = json.optional("require_secure_aggregation")?.flag() ?: false,
                requireReleaseLog = json.optional("require_release_log")?.flag() ?: false,
                requireHttps = json.optional("require_https")?.flag() ?: false,
                authority = json.nullable("authority")?.text(),
                authorityUrl = json.nullable("authority_url")?.text(),
                cacheBytes = json.optional("cache_bytes")?.count() ?: default.cacheBytes,
                stateBytes = json.optional("state_bytes")?.count() ?: default.stateBytes,
                perDay = json.optional("per_day")?.let(::perDay) ?: default.perDay,
                plan = json.optional("plan")?.let(::planLimits) ?: default.plan,
                questions = json.optional("questions")?.let(::questions) ?: default.questions,
            )
        }

        private fun perDay(json: Json): PerDay {
            known("per_day.", json, DAY)
            return PerDay(
                json.nullable("compute_seconds")?.amount(),
                json.nullable("bytes")?.count(),
                json.nullable("sessions")?.count(),
            )
        }

        private fun planLimits(json: Json): PlanLimits {
            known("plan.", json, PLAN)
            val default = PlanLimits()
            return PlanLimits(
                json.nullable("parameters")?.count(),
                json.nullable("graph_bytes")?.count(),
                json.nullable("batch_examples")?.count(),
                json.optional("memory_bytes")?.count() ?: default.memoryBytes,
                json.optional("compute_seconds")?.amount() ?: default.computeSeconds,
            )
        }

        private fun questions(json: Json): Questions {
            known("questions.", json, QUESTIONS)
            return Questions(json.optional("allowed")?.flag() ?: true, json.nullable("per_week")?.count())
        }

        private fun Json.names(): Set<String> = list { it.text() }.toSet()

        private fun Json.amount(): Double = number().also { if (it < 0) wrong("0 or more") }

        private fun known(part: String, json: Json, keys: Set<String>) {
            val (name, value) = json.members().entries.find { it.key !in keys } ?: return
            throw ConfigException("$part$name = ${Json.write(value)}: there is no such key; there are ${keys.joinToString()}")
        }

        private fun checkKey(setting: String, key: String) {
            try {
                publicKey(key)
            } catch (error: FormatException) {
                bad(setting, error.message!!)
            }
        }

        private fun bad(setting: String, why: String): Nothing = throw ConfigException("$setting: $why")
    }
}
