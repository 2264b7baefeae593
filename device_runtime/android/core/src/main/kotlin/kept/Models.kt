/** The models of apps in the store: for each the version in use, one that is being fetched, and one refused. */
package dev.muster.device.kept

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.StateDamaged
import dev.muster.device.Store
import dev.muster.device.Target
import dev.muster.device.base64
import dev.muster.device.keeping
import dev.muster.device.keptJson
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.VectorSpec
import dev.muster.device.plans.decodeVectors
import dev.muster.device.wire.Signed

private const val MODELS = "models"
private const val PERSONAL = "personal:"

/** Models that a check-in may state. */
private const val MOST_STATED = 16
private const val MOST_TRIED = 16

/** A version: its signed release, and its blobs, as far as known. */
internal class KeptVersion(val signed: Signed, val blobs: List<BlobRef>) {
    fun members() = mapOf("signed" to signed.members(), "blobs" to blobs.map { mapOf("sha256" to it.sha256, "size" to it.size) })

    companion object {
        fun of(json: Json) = KeptVersion(Signed.of(json["signed"]), json["blobs"].list(BlobRef::of))
    }
}

/** A release that was refused on an engine. final: because of what it names, so that nothing is fetched for it again. */
internal class Refusal(val signed: Signed, val engine: String, val why: String, val final: Boolean) {
    fun members() = mapOf("signed" to signed.members(), "engine" to engine, "why" to why, "final" to final)

    companion object {
        fun of(json: Json) =
            Refusal(Signed.of(json["signed"]), json["engine"].text(), json["why"].text(), json["final"].flag())
    }
}

/**
 * What is kept of one model. current: in use. pending: not yet wholly here, or not yet tried. tried: how often trials of a version
 * began that did not end, by what it consists of; the last one last.
 */
internal data class ModelRow(
    val current: KeptVersion? = null,
    val pending: KeptVersion? = null,
    val refused: Refusal? = null,
    val tried: Map<String, Int> = emptyMap(),
) {
    fun members() =
        mapOf(
            "current" to current?.members(), "pending" to pending?.members(), "refused" to refused?.members(), "tried" to tried,
        )

    companion object {
        fun of(json: Json) =
            ModelRow(
                json.nullable("current")?.let(KeptVersion::of),
                json.nullable("pending")?.let(KeptVersion::of),
                json.nullable("refused")?.let(Refusal::of),
                json["tried"].map { it.size() },
            )
    }
}

/** The row of one model: every write is whole, so that a stopped device has the version before or the next. */
internal class ModelKeeper(private val store: Store, target: Target, name: String) {
    private val key = "${target.coordinator} ${target.population} $name"
    private val place = "$PERSONAL$key"

    fun get(): ModelRow = rows(store)[key] ?: ModelRow()

    /** Note a version before it is fetched or tried. Its blobs are kept from now on. */
    fun fetch(pending: KeptVersion): KeptVersion {
        write(get().copy(pending = pending))
        return pending
    }

    /** How often trials of a version began that did not end: they may have ended the app. */
    fun trials(what: String): Int = get().tried[what] ?: 0

    /** Note how often they did; the oldest of many others are forgotten. */
    fun count(what: String, trials: Int) {
        val row = get()
        val others = row.tried - what
        val these = if (trials > 0) others + (what to trials) else others
        write(row.copy(tried = these.entries.toList().takeLast(MOST_TRIED).associate { it.key to it.value }))
    }

    /** Make the pending version the one in use. Personal parameters of another one are deleted; whether there were any. */
    fun take(): Boolean {
        val row = get()
        val isPersonal = row.pending != null && personal(row.pending.signed) != null
        val isDropped = !isPersonal && store.get(place) != null
        write(row.copy(current = row.pending, pending = null, refused = null), if (isDropped) mapOf(place to null) else emptyMap())
        return isDropped
    }

    /** Note that the version in use needs these blobs too, which are kept from now on. */
    fun add(blobs: List<BlobRef>) {
        val row = get()
        val current = row.current ?: return
        val more = blobs - current.blobs.toSet()
        if (more.isNotEmpty()) write(row.copy(current = KeptVersion(current.signed, current.blobs + more)))
    }

    /**
     * The personal parameters that were made from this release, as a checkpoint; null too if they cannot be read.
     *
     * size: their number, if it is known: others cannot be read either.
     */
    fun personal(signed: Signed, size: Int? = null): ByteArray? =
        try {
            val kept = keptJson(store, place)?.takeIf { Signed.of(it["signed"]) == signed }
            kept?.get("parameters")?.bytes()?.takeIf { size == null || isFinite(it, size) }
        } catch (_: FormatException) {
            null
        } catch (_: StateDamaged) {
            null
        }

    private fun isFinite(own: ByteArray, size: Int): Boolean =
        decodeVectors(own, listOf(VectorSpec("params", size))).getValue("params").all { it.isFinite() }

    /** Keep personal parameters, as a checkpoint, in the place of any. */
    fun keepPersonal(signed: Signed, parameters: ByteArray) =
        store.write(mapOf(place to Json.write(mapOf("signed" to signed.members(), "parameters" to base64(parameters)))))

    /** Delete personal parameters; whether there were any. */
    fun dropPersonal(): Boolean {
        val isDropped = store.get(place) != null
        store.write(mapOf(place to null))
        return isDropped
    }

    /** Give up the pending version, and note which was refused. The one in use stays. */
    fun refuse(refused: Refusal) = write(get().copy(pending = null, refused = refused))

    private fun write(row: ModelRow, changes: Map<String, String?> = emptyMap()) {
        val models = (rows(store) + (key to row)).mapValues { it.value.members() }
        store.write(changes + (MODELS to Json.write(models)))
    }
}

/** The digests of the blobs that models need. */
internal fun keptBlobs(store: Store): Set<String> =
    rows(store).values.flatMap { listOfNotNull(it.current, it.pending) }.flatMap { it.blobs }.mapTo(HashSet()) { it.sha256 }

/** The numbers of the versions of a population's models that this device has, and of those that it refused last, for a check-in. */
internal fun statedVersions(store: Store, target: Target): Map<String, Map<String, Int>> {
    val start = "${target.coordinator} ${target.population} "
    val mine = rows(store).filterKeys { it.startsWith(start) && ' ' !in it.substring(start.length) } // a model's name has no space
    val first = mine.toSortedMap().entries.take(MOST_STATED)
    val models = first.mapNotNull { (key, row) -> row.current?.let { key.substring(start.length) to numberOf(it.signed) } }
    val refused = first.mapNotNull { (key, row) -> row.refused?.let { key.substring(start.length) to numberOf(it.signed) } }
    return mapOf("models" to models.toMap(), "refused" to refused.toMap().filterValues { it > 0 }).filterValues { it.isNotEmpty() }
}

/** The number of the version that a release says it is, whoever signed it; 0 when it says none. */
private fun numberOf(signed: Signed): Int =
    try {
        Json.parse(signed.text, "release")["number"].size()
    } catch (_: FormatException) {
        0
    }

private fun rows(store: Store): Map<String, ModelRow> =
    keptJson(store, MODELS)?.let { kept -> keeping(MODELS) { kept.map(ModelRow::of) } } ?: emptyMap()
