/** The scheduler: it runs sessions as the coordinator's retry windows and the device's own rules allow. */
package dev.muster.device.sessions

import dev.muster.device.Ending
import dev.muster.device.Json
import dev.muster.device.Outcome
import dev.muster.device.Platform
import dev.muster.device.RetryWindow
import dev.muster.device.SessionConfig
import dev.muster.device.keeping
import dev.muster.device.keptJson
import kotlin.math.max
import kotlin.math.min
import kotlin.random.Random

// Faults that the owner repairs on this device. After a restart it need not wait.
private val MENDED_HERE = setOf("bad-configuration", "invalid-examples", "state-in-use")

// When to return if the coordinator did not say; after a report at once, as the next check-in has an answer.
private val AFTER_WORK = RetryWindow(0.0, 2.0)
private val MINUTES = RetryWindow(60.0, 300.0)
private val HOURS = RetryWindow(2 * 3600.0, 6 * 3600.0)

// How often to check the device's own rules. Nothing is sent, so the checks need no random spread.
private val OWN_RULES = RetryWindow(60.0, 60.0)

// A coordinator may name any window; a device neither returns in a busy loop nor stays away forever.
private const val SHORTEST_S = 1.0
private const val LONGEST_S = 86_400.0

// How often to read the clock, so as to notice that the machine slept or the clock was set.
private const val LONGEST_NAP_S = 60.0

/** A time to return, in seconds since 1970, and the delay that was drawn. */
private class Due(val at: Double, val withinS: Double) {
    fun members() = mapOf("at" to at, "within_s" to withinS)

    /** The same, never later than when it was drawn, since the clock may have been set back. */
    fun heldTo(now: Double) = Due(min(at, now + withinS), withinS)
}

/** What [dev.muster.device.Device.runForever] does, where `run` runs a session. */
internal fun sessionsForever(platform: Platform, config: SessionConfig, run: () -> Outcome, tell: (Outcome) -> Unit) {
    var due = keptDue(platform, config)
    var told = ""
    while (!config.stop.isSet) {
        due = due?.heldTo(platform.now())
        val leftS = due?.let { it.at - platform.now() } ?: 0.0
        if (leftS > 0) {
            platform.sleep(min(leftS, LONGEST_NAP_S), config.stop)
            continue
        }
        val outcome = run()
        due = drawn(platform, config, outcome)
        val ended = "${outcome.ending.text} ${outcome.reason} ${outcome.detail}"
        if (outcome.ending != Ending.NOT_NOW || ended != told) tell(outcome)
        told = ended
    }
}

/** Run one session by `run`, if the stored time to return has come; null if it has not. Throws as [sessionsForever]. */
internal fun sessionIfDue(platform: Platform, config: SessionConfig, run: () -> Outcome): Outcome? {
    val due = keptDue(platform, config)
    if (due != null && due.at > platform.now()) return null
    return run().also { drawn(platform, config, it) }
}

private fun rowOf(config: SessionConfig) = "due:${config.coordinator}:${config.population}"

/** Draw the time to return after an outcome, and store it so that it survives a restart. */
private fun drawn(platform: Platform, config: SessionConfig, outcome: Outcome): Due {
    val withinS = drawnS(outcome, Random.nextDouble())
    val due = Due(platform.now() + withinS, withinS)
    if (outcome.ending != Ending.NOT_NOW && outcome.reason !in MENDED_HERE) {
        platform.store.write(mapOf(rowOf(config) to Json.write(due.members())))
    }
    return due
}

/** Seconds to stay away after an outcome; `chance` is drawn uniformly below 1. */
internal fun drawnS(outcome: Outcome, chance: Double): Double {
    val window = outcome.retry ?: defaultWindow(outcome)
    val seconds = window.minS + chance * (window.maxS - window.minS)
    return if (outcome.retry == null) seconds else min(max(seconds, SHORTEST_S), LONGEST_S)
}

/** The window after an outcome for which the coordinator named none. */
private fun defaultWindow(outcome: Outcome): RetryWindow =
    when {
        outcome.ending == Ending.REPORTED || outcome.ending == Ending.NOT_NEEDED -> AFTER_WORK
        outcome.ending == Ending.NOT_NOW -> OWN_RULES
        outcome.retryable == Outcome.Retryable.PERMANENT -> HOURS
        else -> MINUTES
    }

/** The stored time to return, which is held to the clock of now: else it would stay ahead at every start. */
private fun keptDue(platform: Platform, config: SessionConfig): Due? {
    val row = rowOf(config)
    val kept = keptJson(platform.store, row)?.let { keeping(row) { Due(it["at"].number(), it["within_s"].number()) } } ?: return null
    val due = kept.heldTo(platform.now())
    if (due.at != kept.at) platform.store.write(mapOf(row to Json.write(due.members())))
    return due
}
