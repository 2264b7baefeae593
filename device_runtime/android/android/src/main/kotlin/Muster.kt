/** Federated learning inside an app: the app's examples, its models, and sessions in the background. */
package dev.muster.device.android

import android.app.job.JobInfo
import android.app.job.JobScheduler
import android.content.ComponentName
import android.content.Context
import android.util.Log
import dev.muster.device.Attester
import dev.muster.device.ConfigException
import dev.muster.device.Stop
import dev.muster.device.kept.Outcome
import dev.muster.device.kept.journal
import dev.muster.device.models.Model
import dev.muster.device.permission.Policy
import dev.muster.device.sessions.Device
import dev.muster.device.sessions.SessionConfig
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.channels.BufferOverflow
import kotlinx.coroutines.flow.MutableSharedFlow
import kotlinx.coroutines.flow.SharedFlow
import kotlinx.coroutines.suspendCancellableCoroutine
import kotlinx.coroutines.withContext
import okhttp3.HttpUrl.Companion.toHttpUrlOrNull
import okhttp3.OkHttpClient
import java.io.File
import java.util.concurrent.CompletableFuture
import java.util.concurrent.CopyOnWriteArrayList
import kotlin.concurrent.thread
import kotlin.coroutines.resume
import kotlin.coroutines.resumeWithException

internal const val TAG = "Muster"
private const val FOLDER = "muster"
private const val JOB = 0x4d734b74
private const val LEAST_MINUTES = 15L

/** An application that has a [Muster], which the system's jobs take their sessions from. */
public interface MusterProvider {
    public val muster: Muster
}

/** Hears of something, on a thread of this library. */
public fun interface Listener<T> {
    public fun heard(what: T)
}

/** Tell a listener, whose own fault ends no session. */
internal fun <T> telling(listener: Listener<T>, what: T) {
    try {
        listener.heard(what)
    } catch (error: Throwable) { // TODO() is an Error
        Log.w(TAG, "a listener of the app failed", error)
    }
}

/**
 * A device inside an app: [Muster.builder] makes it, once for a process. It opens what it keeps at the first use.
 *
 * Errors are of [dev.muster.device.DeviceException], and say what to do. What a session meets is in its [Outcome].
 */
public class Muster internal constructor(
    private val context: Context,
    private val phone: Phone,
    private val config: SessionConfig,
    private val requirements: Requirements,
    private val periodMinutes: Long,
    warn: (String) -> Unit,
) : AutoCloseable {
    private val turns = TurnsOfApp(phone.folder)
    private val device = Device(phone, config, warn, turns)
    private val heard = MutableSharedFlow<Outcome>(extraBufferCapacity = 16, onBufferOverflow = BufferOverflow.DROP_OLDEST)
    private val listeners = CopyOnWriteArrayList<Listener<Outcome>>()

    /** The app's examples. */
    public val examples: ExampleStore get() = phone.examples as ExampleStore

    /** How sessions of this process ended, from now on. */
    public val outcomes: SharedFlow<Outcome> get() = heard

    /** Hear how sessions of this process end, until the result is closed. */
    public fun listen(listener: Listener<Outcome>): AutoCloseable {
        listeners += listener
        return AutoCloseable { listeners -= listener }
    }

    /** The model of this name, for predictions in this process. It reads the disk, and needs no network until `refresh`. */
    public fun model(name: String): Model = device.model(name)

    /** Run one session now, whatever the requirements. Cancelling stops it within a second, and what it owes is finished next time. */
    public suspend fun session(): Outcome =
        withContext(Dispatchers.IO) {
            val stop = Stop()
            suspendCancellableCoroutine { waiting ->
                waiting.invokeOnCancellation { stop.set() }
                thread(name = "muster-session") {
                    runCatching { run(stop) }.fold(waiting::resume, waiting::resumeWithException)
                }
            }
        }

    /** The same for Java. Cancelling the future stops the session. */
    public fun sessionAsync(): CompletableFuture<Outcome> {
        val stop = Stop()
        val future = CompletableFuture<Outcome>()
        future.whenComplete { _, _ -> if (future.isCancelled) stop.set() }
        thread(name = "muster-session") { runCatching { run(stop) }.fold(future::complete, future::completeExceptionally) }
        return future
    }

    /** Run a session if the requirements hold and the coordinator's time to return has come; null if not. */
    internal fun runIfDue(stop: Stop): Outcome? {
        checkOpen()
        val unmet = requirements.unmet(conditionsOf(context, phone.folder))
        if (unmet.isNotEmpty()) Log.i(TAG, "no session now: ${unmet.joinToString()}")
        return if (unmet.isEmpty()) device.runIfDue(stop)?.also(::tell) else null
    }

    private fun run(stop: Stop): Outcome {
        checkOpen()
        return device.runOnce(stop).also(::tell)
    }

    private fun checkOpen() {
        if (config.stop.isSet) throw ConfigException("this Muster is closed: build another")
    }

    private fun tell(outcome: Outcome) {
        heard.tryEmit(outcome)
        for (listener in listeners) telling(listener, outcome)
    }

    /** Have the system run sessions, under the requirements, until [unschedule]; also after the phone starts again. */
    public fun schedule() {
        val job =
            JobInfo.Builder(JOB, ComponentName(context, SessionJob::class.java))
                .setPeriodic(periodMinutes * 60_000)
                .setRequiresCharging(requirements.charging)
                .setRequiresDeviceIdle(requirements.idle)
                .setRequiredNetworkType(if (requirements.unmetered) JobInfo.NETWORK_TYPE_UNMETERED else JobInfo.NETWORK_TYPE_ANY)
                .setRequiresBatteryNotLow(true)
                .setRequiresStorageNotLow(true)
                .setPersisted(true)
                .build()
        if (scheduler().getPendingJob(JOB) != job) scheduler().schedule(job) // to schedule the same again puts it off
    }

    /** Have the system run no more sessions. */
    public fun unschedule(): Unit = scheduler().cancel(JOB)

    private fun scheduler() = context.service<JobScheduler>()

    /** What the device did, the oldest first: each entry as JSON has it. */
    public fun journal(): List<Map<String, Any?>> = journal(phone.store)

    /** Stop what is under way in this process, which takes a second at most, and close what is open. */
    override fun close() {
        config.stop.set()
        turns.ofProcess(phone::close)
    }

    /** Forget everything: examples, models, the device's identity and its keys. It is closed from then on. */
    public fun eraseEverything() {
        unschedule()
        config.stop.set()
        turns.ofProcess(phone::erase)
    }

    /** Makes a [Muster]. */
    public class Builder internal constructor(context: Context) {
        private val context: Context = context.applicationContext
        private var coordinator = ""
        private var population = ""
        private var policy = Policy()
        private var requirements = Requirements()
        private var attester: Attester? = null
        private var periodMinutes = LEAST_MINUTES
        private var client: OkHttpClient? = null
        private var warn = Listener<String> { }

        /** Where to take part: a coordinator's URL and a population's name. */
        public fun coordinator(url: String, population: String): Builder = apply {
            coordinator = url
            this.population = population
        }

        /** The owner's policy, which no coordinator can change. */
        public fun policy(policy: Policy): Builder = apply { this.policy = policy }

        /** When the system's sessions run: by default while the phone charges, is not in use and has a network that costs nothing. */
        public fun requirements(requirements: Requirements): Builder = apply { this.requirements = requirements }

        /** The evidence for coordinator and authority, such as [KeyAttestation]. */
        public fun attester(attester: Attester): Builder = apply { this.attester = attester }

        /** How often the system asks for work at most, 15 minutes or more. */
        public fun every(minutes: Long): Builder = apply { periodMinutes = maxOf(minutes, LEAST_MINUTES) }

        /** The app's own client of HTTP, whose connections are shared. */
        public fun client(client: OkHttpClient): Builder = apply { this.client = client }

        /** Hears what is wrong without being an error. */
        public fun warn(listener: Listener<String>): Builder = apply { warn = listener }

        /** Throws [ConfigException] for a coordinator that is none. */
        public fun build(): Muster {
            val url = coordinator.toHttpUrlOrNull() ?: throw ConfigException("coordinator: it must be a URL such as https://fl.example")
            if (population.isEmpty()) throw ConfigException("coordinator: a population is missing")
            val phone = Phone(context, File(context.noBackupFilesDir, FOLDER), attester, client ?: OkHttpClient())
            return Muster(context, phone, SessionConfig(url, population, policy), requirements, periodMinutes) { telling(warn, it) }
        }
    }

    public companion object {
        @JvmStatic
        public fun builder(context: Context): Builder = Builder(context)
    }
}
