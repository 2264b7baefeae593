/**
 * A model for the app: predictions in the app's own process, from the last version that was taken. docs/device.md.
 *
 * A version is pending before anything is fetched for it, a trial is counted before it begins, and the version in use is replaced by
 * one write. So a device that is stopped has the old version or the new one, and goes on where it was.
 */
package dev.muster.device

import dev.muster.device.kept.KeptVersion
import dev.muster.device.kept.ModelKeeper
import dev.muster.device.kept.Refusal
import dev.muster.device.kept.writeJournal
import dev.muster.device.models.Means
import dev.muster.device.models.Recipe
import dev.muster.device.models.Version
import dev.muster.device.models.recipeOf
import dev.muster.device.models.trained
import dev.muster.device.permission.AgainstLimits
import dev.muster.device.permission.Guard
import dev.muster.device.permission.checkModelRelease
import dev.muster.device.permission.signedRelease
import dev.muster.device.permission.withinLimits
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.encodeVector
import dev.muster.device.plans.isBlob
import dev.muster.device.plans.keptRefs
import dev.muster.device.protocol.Transport
import dev.muster.device.protocol.Visit
import dev.muster.device.wire.MODEL_NAME
import dev.muster.device.wire.ModelRelease
import dev.muster.device.wire.Signed
import java.util.Locale

/** A version whose trial ended this process so often is refused: it would end the app at every start. */
private const val MOST_TRIALS = 2
private val NUMBERS = Regex("[0-9]+")

/**
 * The values of a model's inputs, of n rows, one row after the other: by the name of its field a FloatArray, LongArray, IntArray or
 * ByteArray, as its type is, or n texts where the plan names a tokenizer.
 */
public typealias Inputs = Map<String, Any>

/** A model's outputs by name, for n rows, one row after the other. */
public class Outputs internal constructor(private val values: Map<String, Any>) {
    public val names: Set<String> get() = values.keys

    /** The values of an output in an array of its type. Throws IllegalArgumentException when there is none, as the next ones do. */
    public operator fun get(name: String): Any = requireNotNull(values[name]) { "the model has no output $name; it has $names" }

    /** The values of an output of float32. */
    public fun floats(name: String): FloatArray = of(name)

    public fun longs(name: String): LongArray = of(name)

    public fun ints(name: String): IntArray = of(name)

    public fun bytes(name: String): ByteArray = of(name)

    private inline fun <reified T> of(name: String): T =
        requireNotNull(get(name) as? T) { "output $name is ${get(name).javaClass.simpleName}, not ${T::class.java.simpleName}" }
}

/**
 * What became of a personal model.
 *
 * @property version the released one that it was made from
 * @property before the mean loss on the examples left out, at the released parameters
 * @property after the same at the personal ones
 * @property examples the number of examples trained on
 * @property leftOut the number of examples left out, to measure on
 * @property kept whether the personal parameters are used from now on; else the released ones are
 */
public data class Personalised(
    val version: Int,
    val before: Double,
    val after: Double,
    val examples: Int,
    val leftOut: Int,
    val kept: Boolean,
)

/** Does work that needs the platform for itself, until it is told to stop, or throws `StateInUse`. */
internal interface Alone {
    fun <T> alone(work: (Stop) -> T): T
}

/** A version that predicts, and whether with parameters of this device's own. */
private class Opened(val signed: Signed, val version: Version, val isPersonal: Boolean)

/**
 * A model by its name, which `Device.model` opens, with the version that this device took last. Any thread may call any method.
 *
 * All but [predict], [version], [personal] and [close] may use network and disk, and block.
 */
public class Model internal constructor(
    private val platform: Platform,
    private val config: SessionConfig,
    private val name: String,
    private val device: Alone,
) : AutoCloseable {
    private val place = config.place
    private val keeper: ModelKeeper

    @Volatile
    private var opened: Opened? = null

    init {
        if (!MODEL_NAME.matches(name)) {
            throw ConfigException("${plain(name)} is no name of a model: take 1 to 64 lower-case letters, digits, - and _")
        }
        keeper = ModelKeeper(platform.store, place, name)
    }

    /** Whether [close] was called. */
    @Volatile
    public var isClosed: Boolean = false
        private set

    /** The number of the version that predicts now; null before the first, and after [close]. */
    public val version: Int? get() = opened?.version?.number

    /** Whether the parameters that predict now are this device's own, by [personalise]. */
    public val personal: Boolean get() = opened?.isPersonal ?: false

    /** Use the version that is kept, if another part of this device took it since. warn: hears why it cannot be used. */
    internal fun reload(warn: (String) -> Unit) {
        try {
            val current = keeper.get().current
            if (current != null && current.signed != opened?.signed) swap(kept(current))
        } catch (error: DeviceException) {
            warn("the kept version of model $name cannot be used: ${error.message}")
        }
    }

    /**
     * The model's outputs for n rows, at least 1, by their names in the plan.
     *
     * A call that began before a swap ends on the version it began with. The first call after Android asked for memory reads the
     * disk. Throws [NoModel] before the first version,
     * [dev.muster.device.InputRefused], [ModelClosed], and [dev.muster.device.RuntimeFailed] when an operator fails.
     */
    public fun predict(inputs: Inputs): Outputs {
        while (true) {
            val now = opened
            checkOpen()
            if (now == null) throw noModel()
            now.version.predict(inputs)?.let { return it }
            wake(now) // its memory was given back, or another version took its place just now
        }
    }

    /**
     * Ask the coordinator for the version to use, now; whether it replaced the one before.
     *
     * Whatever goes wrong, the version before stays. Throws [ModelRefused] for one that cannot be used,
     * [dev.muster.device.StateInUse] during a session of the device, a `TransportException`, and any other [DeviceException] as a
     * session's outcome would name it.
     */
    public fun refresh(): Boolean =
        visiting { visit ->
            visit.guard.checkPopulation()
            val signed = visit.transport.model(place.population, name, visit.guard.told(config.labels))
            val isNew = signed != null && signed != opened?.signed
            if (isNew) swap(take(signed, visit))
            isNew
        }

    /**
     * Train the version that is here on this device's examples, and use the result if it is better; else do not.
     *
     * The plan of the version says the steps. A part of the examples is left out, and decides: docs/device.md. It runs under the
     * policy and the conditions of a session. The first call of a plan downloads its graphs. The result is kept until another
     * version comes; nothing of it leaves. Throws [NoModel], `ExamplesException` where there are too few, `PlanRefused` for a plan
     * whose devices make no model of their own, [dev.muster.device.StateInUse], and any other [DeviceException] as a session's
     * outcome would name it; then all stays as it was.
     */
    public fun personalise(): Personalised =
        visiting { visit ->
            val entry = Outcome(task = Entry.MODEL + name)
            try {
                val (outcome, steps) = made(visit)
                val made = entry.copy(detail = inWords(outcome), examples = outcome.examples, steps = steps)
                note(visit, made, Entry.Kind.PERSONALISED.text)
                outcome
            } catch (error: DeviceException) {
                val failed = entry.failed(error).copy(detail = plain(error.message ?: ""))
                note(visit, if (error is PolicyForbids || error is NotAllowedNow) failed.copy(ending = Ending.NOT_NOW) else failed)
                throw error
            }
        }

    /** Delete what [personalise] kept, and use the released version; whether anything was kept. */
    public fun forget(): Boolean =
        alone {
            val isDropped = keeper.dropPersonal()
            if (isDropped) noteDropped("the app asked for it")
            val current = keeper.get().current
            try {
                if (current != null) swap(kept(current))
            } catch (error: DeviceException) {
                letGo() // what was deleted predicts no more
                throw error
            }
            isDropped
        }

    /** Give the memory back for now, after the last call that is under way. */
    internal fun rest() {
        opened?.version?.retire()
    }

    @Synchronized
    private fun wake(resting: Opened) {
        if (opened === resting && !isClosed) opened = kept(keeper.get().current ?: throw noModel())
    }

    /** Give the memory back, after the last call that is under way. What is stored stays. */
    @Synchronized
    override fun close() {
        isClosed = true
        letGo()
    }

    @Synchronized
    private fun letGo() {
        opened?.version?.retire()
        opened = null
    }

    @Synchronized
    private fun swap(next: Opened) {
        val before = opened
        if (isClosed) return next.version.retire()
        opened = next
        before?.version?.retire()
    }

    private fun checkOpen() {
        if (isClosed) throw ModelClosed("model $name is closed")
    }

    private fun noModel() = NoModel("no version of model $name is here yet: refresh() fetches one")

    private fun <T> alone(work: (Stop) -> T): T {
        checkOpen()
        return device.alone { stop ->
            checkOpen()
            work(stop)
        }
    }

    /** Do work that visits the coordinator, once nothing else uses the platform. */
    private fun <T> visiting(work: (Visit) -> T): T =
        alone { stop ->
            val visit = Visit(platform, place, Transport(platform, place.coordinator, stop))
            try {
                work(visit)
            } catch (error: Exception) {
                throw known(error)
            } finally {
                platform.store.write(visit.guard.spending(0))
                visit.trim()
            }
        }

    private fun note(visit: Visit, outcome: Outcome, kind: String = outcome.ending.text) {
        val moved = visit.transport.moved
        val entry = outcome.copy(bytesUp = moved.up, bytesDown = moved.down).members() + ("outcome" to kind)
        writeJournal(platform.store, platform.now(), entry)
    }

    /** Tell the owner that personal parameters are deleted. */
    private fun noteDropped(why: String) =
        note(Entry.Kind.PERSONAL_DROPPED, "the personal parameters of model $name are deleted: $why")

    private fun note(kind: Entry.Kind, detail: String) = writeJournal(platform.store, platform.now(), kind, detail)

    /** Train the kept version, and use and keep the result if it is better. What came of it, and the steps. */
    private fun made(visit: Visit): Pair<Personalised, Int> {
        visit.guard.checkIn()
        platform.conditions()
        val signed = keeper.get().current?.signed ?: throw noModel()
        val release = signedRelease(place.policy, signed)
        val recipe = recipeOf(release, ::mine)
        val made = trained(release, recipe.plan, Means(visit, ::mine, { keeper.add(it.toList()) }) { keepGoing(visit) })
        val own = if (made.isBetter) encodeVector("params", made.params) else null
        val version = Version.load(release, recipe, parts(recipe, own))
        if (own == null) keeper.dropPersonal() else tryOut(version) { keeper.keepPersonal(signed, own) }
        swap(Opened(signed, version, own != null))
        return Personalised(release.number, made.before, made.after, made.examples, made.leftOut, made.isBetter) to made.steps
    }

    private fun keepGoing(visit: Visit): Boolean {
        val stop = visit.transport.stopping
        if (stop.isSet) throw NotAllowedNow(stop.why)
        visit.guard.checkWork()
        return true
    }

    /** Try a version, and then keep it. It is retired if either fails. */
    private fun <T> tryOut(version: Version, keep: () -> T): T =
        try {
            version.tryOut()
            keep()
        } catch (error: Throwable) {
            version.retire()
            throw error
        }

    /** Check a release, and what it names. A refusal is remembered, and told to the owner once. */
    private fun take(signed: Signed, visit: Visit): Opened {
        var isAdmitted = false
        try {
            val release = signedRelease(place.policy, signed)
            checkModelRelease(platform, release, signed.signer, place.population, name)
            val known = keeper.get().refused
            if (known != null && known.final && known.isOf(signed)) throw ModelRefused(known.why)
            isAdmitted = true
            return tried(signed, release, visit)
        } catch (error: DeviceException) {
            val refusal = if (error is AssignmentException) ModelRefused(plain(error.message ?: "")) else error
            if (refusal is ModelRefused) refuse(signed, refusal.message ?: "", isAdmitted && refusal !is AgainstLimits)
            throw refusal
        }
    }

    private fun Refusal.isOf(signed: Signed) = this.signed == signed && engine == platform.engineName

    /** Fetch what a release names, try it, and put it in the place of the version before. */
    private fun tried(signed: Signed, release: ModelRelease, visit: Visit): Opened {
        val current = keeper.get().current
        keeper.fetch(KeptVersion(signed, listOf(release.plan, release.parameters)))
        withinLimits { visit.guard.checkSizes(release.plan, release.parameters) }
        val recipe = recipeOf(release, visit::blob)
        checkLimits(release, recipe, visit.guard)
        val training = keptRefs(recipe.plan).filter { ref -> current?.blobs?.any { it.sha256 == ref.sha256 } == true }
        keeper.fetch(KeptVersion(signed, listOf(release.plan) + recipe.blobs.values + training))
        val fetched = recipe.blobs.values.associateWith(visit::blob)
        return counted(release) {
            val own = keeper.personal(signed, recipe.plan.parameters)
            val version = Version.load(release, recipe, parts(recipe, own, fetched::getValue))
            val isDropped = tryOut(version, keeper::take)
            if (isDropped) noteDropped("version ${release.number} was taken")
            Opened(signed, version, own != null)
        }
    }

    /** Make a trial, which counts while it goes on: what ends the process leaves it counted. */
    private fun <T> counted(release: ModelRelease, trial: () -> T): T {
        val what = "${platform.engineName} ${release.plan.sha256} ${release.parameters.sha256}"
        val trials = keeper.trials(what)
        if (trials >= MOST_TRIALS) throw ModelRefused("version ${release.number} ended this process on trial, $trials times")
        keeper.count(what, trials + 1)
        try {
            return trial().also { keeper.count(what, 0) }
        } catch (error: DeviceException) {
            keeper.count(what, trials)
            throw error
        }
    }

    private fun checkLimits(release: ModelRelease, recipe: Recipe, guard: Guard) {
        val sizes = recipe.blobs.mapValues { it.value.size } + ("plan" to release.plan.size)
        val missing = recipe.blobs.values.filter { held(it) == null }.sumOf { it.size }
        withinLimits { guard.checkPredict(recipe.plan, sizes, missing) }
    }

    /** The version that is kept as the one in use. The policy may have changed since, and blobs too. */
    private fun kept(current: KeptVersion): Opened {
        val release = signedRelease(place.policy, current.signed)
        val recipe = recipeOf(release, ::mine)
        val own = keeper.personal(current.signed, recipe.plan.parameters)
        return Opened(current.signed, Version.load(release, recipe, parts(recipe, own)), own != null)
    }

    /** A getter of the parts of a version, with this device's own parameters, if there are any, for the released ones. */
    private fun parts(recipe: Recipe, own: ByteArray?, get: (BlobRef) -> ByteArray = ::mine): (BlobRef) -> ByteArray {
        val replaced = recipe.blobs.getValue("parameters")
        return { ref -> if (own != null && ref === replaced) own else get(ref) }
    }

    private fun refuse(signed: Signed, why: String, final: Boolean) {
        val before = keeper.get().refused
        // Bytes of the day are more each time.
        val again = before?.takeIf { it.isOf(signed) && it.why.replace(NUMBERS, "") == why.replace(NUMBERS, "") }
        keeper.refuse(again ?: Refusal(signed, platform.engineName, why, final))
        if (again == null) note(Entry.Kind.MODEL_REFUSED, "model $name: $why")
    }

    /** A blob that must be here. Throws [ModelRefused]. */
    private fun mine(ref: BlobRef): ByteArray =
        held(ref) ?: throw ModelRefused("blob ${ref.sha256.take(12)}… is not in the cache any more")

    private fun held(ref: BlobRef): ByteArray? = platform.blobs.get(ref.sha256)?.takeIf { isBlob(ref, it) }
}

private fun inWords(outcome: Personalised): String {
    val losses = String.format(Locale.ROOT, "loss %.6g before and %.6g after", outcome.before, outcome.after)
    val used = if (outcome.kept) "kept" else "not kept"
    return "version ${outcome.version}, $losses, on ${outcome.leftOut} examples left out: $used"
}
