/** Federated learning inside an app: the app's examples, its models, and sessions in the background. */
package dev.muster.device

import android.app.job.JobInfo
import android.app.job.JobScheduler
import android.content.ComponentCallbacks2
import android.content.ComponentCallbacks2.TRIM_MEMORY_COMPLETE
import android.content.ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL
import android.content.ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW
import android.content.ComponentCallbacks2.TRIM_MEMORY_UI_HIDDEN
import android.content.ComponentName
import android.content.Context
import android.content.res.Configuration
import android.util.Log
import dev.muster.device.kept.journal
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.channels.BufferOverflow
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.MutableSharedFlow
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.SharedFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.distinctUntilChanged
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.launch
import kotlinx.coroutines.suspendCancellableCoroutine
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

/** How long to wait for a session in another process, which the system's job ends within a second. */
private const val PATIENCE_MS = 5_000L

/** How often a journal is looked at for what another process wrote. */
private const val LOOK_MS = 1_000L

/**
 * An application that has a [Muster], which the system's jobs take their sessions from.
 *
 * Where the manifest gives jobs a process of their own, each process has its own application and its own [Muster].
 */
public interface MusterProvider {
    public val muster: Muster
}

/** Hears of something, on a thread of this library. What it throws is logged. */
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

/** What a device is until it is closed or erased. */
private class Life(val phone: Phone, val config: SessionConfig, warn: (String) -> Unit, mayWait: () -> Unit) {
    val turns = TurnsOfApp(phone.folder, mayWait)
    val device = Device(phone, config, warn, turns)
    private val models = HashMap<String, Model>()

    @Synchronized
    fun model(name: String): Model =
        models[name]?.takeUnless { it.isClosed } ?: device.model(name).also { models[name] = it }

    fun close() {
        config.stop.set()
        turns.ofProcess(::letGo)
    }

    /** Throws [dev.muster.device.StateInUse] when another process does not end its session in time. */
    fun erase() {
        config.stop.set()
        turns.taken(PATIENCE_MS) {
            letGo()
            phone.erase()
        }
    }

    private fun letGo() {
        device.closeModels()
        phone.close()
    }
}

/**
 * A device inside an app: [Muster.builder] makes it, once for a process. It opens what it keeps at the first use.
 *
 * Any thread may call any method. Those that read or write what is kept throw [ConfigException] on the app's main thread: [model],
 * [journal], [close], [eraseEverything], and those of [examples]. The rest does not wait, and suspending functions may be called
 * anywhere. Errors are of [dev.muster.device.DeviceException], unchecked, and say what to do. A session throws none: what it meets
 * is in its [Outcome].
 *
 * When Android asks for memory, models give theirs back until the next prediction. When memory is critically short, work that is
 * under way ends as for a condition that no longer holds.
 */
public class Muster internal constructor(
    private val context: Context,
    private val requirements: Requirements,
    private val periodMinutes: Long,
    private val warn: (String) -> Unit,
    private val mayWait: () -> Unit,
    private val newPhone: () -> Phone,
    private val newConfig: () -> SessionConfig,
) : AutoCloseable {
    @Volatile
    private var isClosed = false
    private val heard = MutableSharedFlow<Outcome>(extraBufferCapacity = 16, onBufferOverflow = BufferOverflow.DROP_OLDEST)
    private val reached = MutableStateFlow<Progress?>(null)
    private val listeners = CopyOnWriteArrayList<Listener<Outcome>>()

    @Volatile
    private var current = begun()

    @Suppress("DEPRECATION") // Android 14 and later send fewer of these levels
    private val memory =
        object : ComponentCallbacks2 {
            override fun onTrimMemory(level: Int) {
                val isForModels = level >= TRIM_MEMORY_RUNNING_LOW && level != TRIM_MEMORY_UI_HIDDEN
                if (isForModels) current.device.giveBackMemory(level == TRIM_MEMORY_RUNNING_CRITICAL || level == TRIM_MEMORY_COMPLETE)
            }

            @Deprecated("Deprecated in Java")
            override fun onLowMemory() = current.device.giveBackMemory(isCritical = true)

            override fun onConfigurationChanged(now: Configuration) = Unit
        }

    init {
        context.registerComponentCallbacks(memory)
    }

    private fun begun(): Life = Life(newPhone(), newConfig().also { it.progress = { now -> reached.value = now } }, warn, mayWait)

    /** The device of now: another one once it was erased, here or by another process. Throws [ConfigException] when this is closed. */
    private fun life(): Life {
        if (isClosed) throw ConfigException("this Muster is closed: build another")
        val now = current
        return if (now.phone.isStale) beganAnew(now) else now
    }

    /** The device that takes the place of another, which is closed once its session is over. */
    private fun beganAnew(before: Life): Life {
        synchronized(this) { if (current === before) current = begun() }
        thread(name = "muster-close") { before.close() }
        return current
    }

    /** The app's examples. Take them from here at each use: those of before [eraseEverything] are closed. */
    public val examples: ExampleStore get() = life().phone.examples as ExampleStore

    /** How sessions of this process ended, from now on. */
    public val outcomes: SharedFlow<Outcome> get() = heard

    /** How far the session of this process is; null while there is none. */
    public val progress: StateFlow<Progress?> get() = reached

    /** Hear how sessions of this process end, until the result is closed. */
    public fun listen(listener: Listener<Outcome>): AutoCloseable {
        listeners += listener
        return AutoCloseable { listeners -= listener }
    }

    /** Hear of [progress], now and whenever it changes, until the result is closed. */
    public fun listenToProgress(listener: Listener<Progress?>): AutoCloseable = hearing(progress, listener)

    /** Hear of the [journalFlow], until the result is closed. */
    public fun listenToJournal(listener: Listener<List<Entry>>): AutoCloseable = hearing(journalFlow(), listener)

    private fun <T> hearing(flow: Flow<T>, listener: Listener<T>): AutoCloseable {
        val job = CoroutineScope(Dispatchers.IO).launch { flow.collect { telling(listener, it) } }
        return AutoCloseable { job.cancel() }
    }

    /**
     * The model of this name, for predictions in this process. It reads the disk, and needs no network until `refresh`.
     *
     * All callers have the same one, until one of them closes it. [close] and [eraseEverything] close it too.
     */
    public fun model(name: String): Model {
        mayWait()
        return life().model(name)
    }

    /** Run one session now, whatever the requirements. Cancelling stops it within a second, and what it owes is finished next time. */
    public suspend fun session(): Outcome = suspended(::run)

    /**
     * Run one session if the requirements hold and the coordinator's time to return has come; null if not. Cancelling as [session].
     *
     * It is what [schedule] has the system do: an app that prefers WorkManager calls it from its Worker.
     */
    public suspend fun sessionIfDue(): Outcome? = suspended(::runIfDue)

    /** The same as [session] for Java. Cancelling the future stops the session. */
    public fun sessionAsync(): CompletableFuture<Outcome> = future(::run)

    /** The same as [sessionIfDue] for Java. */
    public fun sessionIfDueAsync(): CompletableFuture<Outcome?> = future(::runIfDue)

    private suspend fun <T> suspended(work: (Stop) -> T): T =
        suspendCancellableCoroutine { waiting ->
            val stop = Stop()
            waiting.invokeOnCancellation { stop.set() }
            thread(name = "muster-session") { runCatching { work(stop) }.fold(waiting::resume, waiting::resumeWithException) }
        }

    private fun <T> future(work: (Stop) -> T): CompletableFuture<T> {
        val stop = Stop()
        val future = CompletableFuture<T>()
        future.whenComplete { _, _ -> if (future.isCancelled) stop.set() }
        thread(name = "muster-session") { runCatching { work(stop) }.fold(future::complete, future::completeExceptionally) }
        return future
    }

    internal fun runIfDue(stop: Stop): Outcome? =
        told { life ->
            val unmet = requirements.unmet(conditionsOf(context, life.phone.folder))
            if (unmet.isNotEmpty()) Log.i(TAG, "no session now: ${unmet.joinToString()}")
            if (unmet.isEmpty()) life.device.runIfDue(stop) else null
        }

    private fun run(stop: Stop): Outcome = told { it.device.runOnce(stop) }

    /** What a session gives, after all have heard of it. An error before it begins is an outcome too. */
    private fun <T : Outcome?> told(session: (Life) -> T): T {
        val outcome =
            try {
                session(life())
            } catch (error: Throwable) { // what nobody catches ends the app
                @Suppress("UNCHECKED_CAST")
                Outcome().failed(known(error)) as T
            } finally {
                reached.value = null
            }
        if (outcome != null) tell(outcome)
        return outcome
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

    /** What the device did, the oldest first. Throws [StateDamaged]. */
    public fun journal(): List<Entry> {
        mayWait()
        return journal(life().phone.store)
    }

    /**
     * The [journal] now and whenever it changes, from sessions in another process of the app too: the file is looked at each second
     * while this is collected. It ends when this is closed. A journal that cannot be read is left out, and the app's `warn` hears why.
     */
    public fun journalFlow(): Flow<List<Entry>> =
        flow {
            var seen: Any? = this // no stamp
            while (!isClosed) {
                journalUnless(seen)?.let { (stamp, entries) ->
                    seen = stamp
                    emit(entries)
                }
                delay(LOOK_MS)
            }
        }.distinctUntilChanged().flowOn(Dispatchers.IO)

    /** The journal with the stamp of its file, unless that was seen. Null for one that cannot be read, too. */
    private fun journalUnless(seen: Any?): Pair<Any?, List<Entry>>? =
        try {
            val phone = life().phone
            val stamp = phone.stamp
            // Where nothing is kept, as after all was erased, nothing is made.
            if (stamp == seen) null else stamp to if (stamp == null) emptyList() else journal(phone.store)
        } catch (error: DeviceException) {
            if (!isClosed) warn("the journal cannot be read: ${error.message}")
            null
        }

    /** Stop what is under way in this process, which takes a second at most, and close what is open, models too. */
    override fun close() {
        mayWait()
        isClosed = true
        context.unregisterComponentCallbacks(memory)
        current.close()
    }

    /**
     * Forget everything: examples, models, the journal, the device's identity and its keys. Sessions that are under way end, also in
     * other processes of the app, and the system runs no more of them. This stays open, and begins anew as another device when the
     * app uses it again, with [schedule] say.
     *
     * Throws [dev.muster.device.StateInUse] when another process does not end its session in five seconds: nothing is erased then.
     * Throws [dev.muster.device.StateDamaged] when something cannot be deleted.
     */
    public fun eraseEverything() {
        mayWait()
        unschedule()
        val before = current
        try {
            before.erase()
        } finally {
            beganAnew(before)
        }
    }

    /** Makes a [Muster]. */
    public class Builder internal constructor(context: Context) {
        private val context: Context = context.applicationContext
        private var coordinator = ""
        private var population = ""
        private var policy = Policy()
        private var labels = emptyMap<String, String>()
        private var requirements = Requirements()
        private var attester: Attester? = null
        private var periodMinutes = LEAST_MINUTES
        private var client: OkHttpClient? = null
        private var warn = Listener<String> { }
        private var mayWait: () -> Unit = ::offMainThread

        /** Where to take part: a coordinator's URL and a population's name. */
        public fun coordinator(url: String, population: String): Builder = apply {
            coordinator = url
            this.population = population
        }

        /** The owner's policy, which no coordinator can change. */
        public fun policy(policy: Policy): Builder = apply { this.policy = policy }

        /** What the app says of the device, such as its version, of which it tells those that its policy lists: up to 16. */
        public fun labels(labels: Map<String, String>): Builder = apply { this.labels = labels.toMap() }

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

        /** Let calls wait on the app's main thread: for tests, which Robolectric runs there. */
        public fun allowMainThread(): Builder = apply { mayWait = { } }

        /** Throws [ConfigException] for a coordinator or labels that are none. It opens nothing yet. */
        public fun build(): Muster {
            val url = coordinator.toHttpUrlOrNull() ?: throw ConfigException("coordinator: it must be a URL such as https://fl.example")
            if (population.isEmpty()) throw ConfigException("coordinator: a population is missing")
            val (listener, check) = warn to mayWait
            val http = client ?: OkHttpClient()
            val (evidence, folder) = attester to File(context.noBackupFilesDir, FOLDER)
            val (rules, stated) = policy to labels
            return Muster(
                context, requirements, periodMinutes, { telling(listener, it) }, check,
                newPhone = { Phone(context, folder, evidence, http, check) },
                newConfig = { SessionConfig(url, population, rules, labels = stated) },
            )
        }
    }

    public companion object {
        /** A builder of the device; it needs [Builder.coordinator] at least. */
        @JvmStatic
        public fun builder(context: Context): Builder = Builder(context)
    }
}
