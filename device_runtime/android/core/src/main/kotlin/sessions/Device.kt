/** A device inside an app: its sessions, and the models that it predicts with. */
package dev.muster.device.sessions

import dev.muster.device.DeviceException
import dev.muster.device.ModelRefused
import dev.muster.device.Platform
import dev.muster.device.StateInUse
import dev.muster.device.Stop
import dev.muster.device.kept.Outcome
import dev.muster.device.models.Alone
import dev.muster.device.models.Model
import java.util.WeakHashMap
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

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
            override fun <T> alone(work: () -> T): T {
                if (isInSession) throw StateInUse("the device is in a session: call again when it is over")
                return turns.take(work)
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
                    config.stop.use(stop::set) { runSession(platform, config.stoppedBy(stop)) }
                } finally {
                    isInSession = false
                }
            }
        if (outcome.bytesDown > 0 && outcome.reason != "conditions") refreshModels()
        return outcome
    }

    /** The same if the stored time to return has come; null if it has not. */
    public fun runIfDue(stop: Stop): Outcome? = sessionIfDue(platform, config) { runOnce(stop) }

    /** Run sessions at the times that the coordinator names, until `config.stop`: see [dev.muster.device.sessions.runForever]. */
    public fun runForever(tell: (Outcome) -> Unit): Unit = sessionsForever(platform, config, ::runOnce, tell)

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
