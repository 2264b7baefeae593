/** What a device tells a coordinator when it checks in, and which offers it takes. Spec: docs/spec/wire.md §2. */
package dev.muster.device.sessions

import dev.muster.device.Conditions
import dev.muster.device.ExampleSource
import dev.muster.device.Platform
import dev.muster.device.kept.statedVersions
import dev.muster.device.permission.Guard
import dev.muster.device.permission.Place
import dev.muster.device.plans.FORMAT
import dev.muster.device.wire.Offer

internal const val VERSION = "0.1.0"
private const val MEBIBYTE = 1L shl 20
private const val MOST_COLLECTIONS = 64
private const val MOST_NAME = 200
private const val MOST_TASKS = 256

/** The message of a check-in. token: that of the last rejection, if any. labels: those that its owner lets it tell. */
internal fun checkInMessage(
    platform: Platform,
    place: Place,
    guard: Guard,
    now: Conditions,
    token: String?,
    labels: Map<String, String>,
): Map<String, Any?> {
    val capabilities =
        mapOf(
            "runtime" to "muster-kotlin",
            "version" to VERSION,
            "engine" to platform.engineName,
            "formats" to listOf(FORMAT),
            "secagg" to listOf("SA1"),
            "memory_mb" to platform.memoryBytes?.let(::roundedMb),
        )
    val optional = mapOf("token" to token, "labels" to labels.ifEmpty { null }).filterValues { it != null }
    return mapOf(
        "capabilities" to capabilities,
        "examples" to statedExamples(guard.visible(platform.examples.counts())),
        "conditions" to statedConditions(now),
    ) + statedVersions(platform.store, place) + optional
}

/** The conditions that a coordinator is told. Levels are rounded: exact ones would help to recognise a device. */
private fun statedConditions(now: Conditions): Map<String, Any?> =
    mapOf(
        "charging" to now.charging,
        "idle" to now.idle,
        "unmetered" to now.unmetered,
        "battery" to now.battery?.let { Math.round(10 * it) / 10.0 },
        "free_storage_mb" to now.freeStorageBytes?.let(::roundedMb),
    )

/** The numbers of examples that a device states, by collection: rounded down, and only of the largest collections. */
private fun statedExamples(counts: Map<String, Int>): Map<String, Long> =
    counts.filterKeys { it.length in 1..MOST_NAME }.entries.sortedByDescending { it.value }.take(MOST_COLLECTIONS)
        .associate { it.key to roundedDown(it.value.toLong()) }

/** MiB, rounded down to a power of two. */
private fun roundedMb(bytes: Long): Long = roundedDown(bytes / MEBIBYTE)

/** The greatest power of two that is not above a count; 0 for 0. */
private fun roundedDown(count: Long): Long = java.lang.Long.highestOneBit(count)

/**
 * The tasks whose rules all hold, in the order of the offers. A rule on an unknown value does not hold.
 *
 * shows: whether the owner lets a coordinator know of a collection. Any other is treated as missing.
 */
internal fun acceptableTasks(offers: List<Offer>, examples: ExampleSource, now: Conditions, shows: (String) -> Boolean): List<String> {
    val counts = examples.counts()
    val accepted =
        offers.filter { offer ->
            val isShown = shows(offer.collection)
            val held = if (isShown) counts[offer.collection] ?: 0 else 0
            val age = offer.maxExampleAgeS
            val recent = if (age == null || !isShown) held else examples.countRecent(offer.collection, age)
            rulesHold(offer, now) && held >= offer.minExamples && recent >= offer.minRecentExamples
        }
    return accepted.map { it.task }.take(MOST_TASKS)
}

private fun rulesHold(offer: Offer, now: Conditions): Boolean {
    val flags = listOf(offer.charging to now.charging, offer.idle to now.idle, offer.unmetered to now.unmetered)
    return flags.all { (rule, value) -> !rule || value == true } &&
        (offer.minBattery == null || (now.battery != null && now.battery >= offer.minBattery)) &&
        (offer.minFreeStorageBytes == null || (now.freeStorageBytes != null && now.freeStorageBytes >= offer.minFreeStorageBytes))
}
