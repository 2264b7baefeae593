/** A device inside an app: its sessions, and the models that it predicts with. */
package dev.muster.device

import dev.muster.device.permission.Place
import dev.muster.device.plans.LoadedGraphs
import dev.muster.device.sessions.runSession
import dev.muster.device.sessions.sessionIfDue
import dev.muster.device.sessions.sessionsForever
import okhttp3.HttpUrl
import java.util.WeakHashMap
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

/**
 * Where and how a device takes part.
 *
 * @property waitS seconds to wait to be selected
 * @property stop once it is set, the session gives up at once
 * @property labels what the app says of the device, of which it tells those that its policy lists: up to 16
 * @throws ConfigException for labels that a device may not have
 */
public class SessionConfig @JvmOverloads constructor(
    public val coordinator: HttpUrl,
    public val population: String,
    public val policy: Policy = Policy(),
    public val waitS: Double = 30.0,
    public val stop: Stop = Stop(),
    public val labels: Map<String, String> = emptyMap(),
) {
    init {
        checkLabels(labels)
    }

    internal val place = Place(coordinator, population, policy)

    /** Hears how far a session is, on its thread. It must not throw. */
    internal var progress: (Progress) -> Unit = {}

    /** Where graphs of small models stay loaded between sessions. */
    internal var graphs = LoadedGraphs(most = 0)

    /** The same, which another request stops. */
    internal fun stoppedBy(stop: Stop) =
        SessionConfig(coordinator, population, policy, waitS, stop, labels).also {
            it.progress = progress
            it.graphs = graphs
        }
}

/** Gives a platform to one piece of work after the other. */
internal interface Turns {
    fun <T> take(work: () -> T): T
}

private class TurnsOfProcess : Turns {
    private val lock = ReentrantLock(true)

    override fun <T> take(work: () -> T): T = lock.withLock(work)

    companion object {
        private val all = WeakHashMap<Platform, Turns>()

        /** The turns of a platform, which all devices on it take. */
        fun of(platform: Platform): Turns = synchronized(all) { all.getOrPut(platform, ::TurnsOfProcess) }
    }
}

/**
 * One device, for any thread. Nothing else may use its platform meanwhile. After each session that reached the coordinator it
 * refreshes the open models.
 *
 * `warn` hears what is wrong without being an error, such as a kept version of a model that cannot be used any more.
 */
public class Device internal constructor(
    private val platform: Platform,
    private val config: SessionConfig,
    private val warn: (String) -> Unit,
    private val turns: Turns,
) {
    private val models = CopyOnWriteArrayList<Model>()

    @Volatile
    private var isInSession = false

    private val visits =
        object : Alone {
            override fun <T> alone(work: (Stop) -> T): T {
                if (isInSession) throw StateInUse("the device is in a session: call again when it is over")
                return turns.take { Stop().let { stop -> stoppable(stop) { work(stop) } } }
            }
        }

    /** What stops the work that is under way. */
    @Volatile
    private var working: Stop? = null

    private fun <T> stoppable(stop: Stop, work: () -> T): T {
        working = stop
        try {
            return config.stop.use(stop::set, work)
        } finally {
            working = null
        }
    }

    @JvmOverloads
    public constructor(platform: Platform, config: SessionConfig, warn: (String) -> Unit = {}) :
        this(platform, config, warn, TurnsOfProcess.of(platform))

    /**
     * The model of this name, for predictions in this process: the last version that this device took, or none yet.
     *
     * It needs no network until `refresh`. Throws [dev.muster.device.ConfigException] for a name that no model may have.
     */
    public fun model(name: String): Model =
        Model(platform, config, name, visits).also {
            it.reload(warn)
            models += it
        }

    /** Run one session now, after a refresh that is under way, until `stop` or `config.stop`. Errors are in the outcome. */
    @JvmOverloads
    public fun runOnce(stop: Stop = config.stop): Outcome {
        val outcome =
            turns.take {
                isInSession = true
                try {
                    stoppable(stop) { runSession(platform, config.stoppedBy(stop)) }
                } finally {
                    isInSession = false
                }
            }
        if (outcome.bytesDown > 0 && outcome.reason != "conditions") refreshModels()
        return outcome
    }

    /** The same if the stored time to return has come; null if it has not. */
    public fun runIfDue(stop: Stop): Outcome? = sessionIfDue(platform, config) { runOnce(stop) }

    /**
     * Run sessions until `config.stop`, each at a random time in the window that the last outcome names.
     *
     * That time is stored and honoured after a restart. While the device's own rules do not hold, they are checked every minute;
     * [tell] is called once for each reason. Throws [StateDamaged] if nothing can be stored.
     */
    public fun runForever(tell: (Outcome) -> Unit): Unit = sessionsForever(platform, config, ::runOnce, tell)

    /** Give back the memory of models, which the next prediction loads again. isCritical: end the work that is under way, too. */
    internal fun giveBackMemory(isCritical: Boolean) {
        for (model in models) model.rest()
        if (isCritical) working?.set("memory is short")
    }

    /** Close all models: what is kept for them is going away. */
    internal fun closeModels() {
        for (model in models) model.close()
        models.clear()
    }

    /** Where a refresh fails, the version before stays, and the next session tries again. */
    private fun refreshModels() {
        models.removeAll { it.isClosed }
        for (model in models) {
            try {
                model.refresh()
            } catch (_: ModelRefused) {
                // the journal has it
            } catch (error: DeviceException) {
                warn("a model was not refreshed after a session: ${error.message}")
            }
        }
    }
}
