/** The phone that a device runs on: its state, its conditions and its keys. */
package dev.muster.device

import android.app.ActivityManager
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.database.sqlite.SQLiteDatabase
import android.net.ConnectivityManager
import android.net.NetworkCapabilities
import android.os.BatteryManager
import android.os.Build
import android.os.Debug
import android.os.Looper
import android.os.PowerManager
import android.os.StatFs
import dev.muster.device.kept.writeJournal
import dev.muster.device.plans.engineName
import okhttp3.OkHttpClient
import java.io.File
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.channels.FileChannel
import java.nio.channels.FileLock
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

private const val SEALING = "CREATE TABLE IF NOT EXISTS sealing (wrapped BLOB NOT NULL)"
private const val STATE_KEY = "dev.muster.device"
private const val DEVICE_KEY = "dev.muster.device.signing"

/**
 * The conditions under which the system's sessions run, beside the owner's policy. A session at will needs none of them.
 *
 * @property minBattery a fraction
 * @property minFreeStorageBytes bytes in the app's storage
 */
public data class Requirements @JvmOverloads constructor(
    val charging: Boolean = true,
    val idle: Boolean = true,
    val unmetered: Boolean = true,
    val minBattery: Double = 0.0,
    val minFreeStorageBytes: Long = 200_000_000,
) {
    /** A reason in words for each that does not hold. An unknown value does not meet a requirement. */
    internal fun unmet(now: Conditions): List<String> =
        listOfNotNull(
            "the phone does not charge".takeIf { charging && now.charging != true },
            "the phone is in use".takeIf { idle && now.idle != true },
            "the network is metered, or there is none".takeIf { unmetered && now.unmetered != true },
            "the battery is too low".takeIf { minBattery > 0 && (now.battery ?: 0.0) < minBattery },
            "too little storage is free".takeIf { (now.freeStorageBytes ?: 0) < minFreeStorageBytes },
        )
}

/** Everything that sessions need of this phone. The state opens at its first use, which must not be on the app's main thread. */
internal class Phone(
    private val context: Context,
    val folder: File,
    override val attester: Attester?,
    private val client: OkHttpClient,
    private val mayWait: () -> Unit = {},
) : Platform, AutoCloseable {
    private val file = File(folder, "state.db")
    private var notice: String? = null
    private var identity: Any? = null
    private val database =
        lazy { openDatabase(file, listOf(SEALING, SealedStore.TABLE)) { notice = it }.also { identity = identityOf(file) } }
    private val sealing = lazy { Sealer(secretOf(database.value)) }
    private val sealed = lazy {
        SealedStore(database.value, sealing.value).also { store ->
            notice?.let { writeJournal(store, now(), Entry.Kind.STATE_REPLACED, it) }
        }
    }
    override val store: Store get() = sealed.value
    override val blobs: BlobCache = FileBlobs(folder)
    private val kept = lazy { ExampleStore(File(folder, "examples.db"), { sealing.value }, mayWait, ::now) }
    override val examples: ExampleSource get() = kept.value
    override val engineName: String get() = engineName()
    override val memoryBytes: Long get() = memory().totalMem

    /** Whether another process of the app erased or replaced what is open here. */
    val isStale: Boolean
        get() = database.isInitialized() && identityOf(file) != identity || kept.isInitialized() && kept.value.isStale

    /** What changes whenever something is written; null before the first. */
    val stamp: Any? get() = identityOf(file)?.let { listOf(it, file.lastModified(), file.length()) }

    /** Throws [ConfigException] on the app's main thread. */
    override val http: OkHttpClient get() = client.also { mayWait() }

    override fun signingKey(name: String): SigningKey =
        if (name == "device") KeystoreSigningKey(DEVICE_KEY) else keptSigningKey(store, name)

    private fun memory() = ActivityManager.MemoryInfo().also { context.service<ActivityManager>().getMemoryInfo(it) }

    /** Throws [PolicyForbids] when the phone is warm, or short of memory. */
    override fun conditions(): Conditions {
        heat(context)?.let { throw PolicyForbids(it) }
        if (memory().lowMemory) throw PolicyForbids("the phone is short of memory")
        return conditionsOf(context, folder)
    }

    override fun random(size: Int): ByteArray = platformRandom(size)

    override fun now(): Double = System.currentTimeMillis() / 1000.0

    /** CPU time of this thread, which does all of a session's work. */
    override fun workSeconds(): Double = Debug.threadCpuTimeNanos() / 1e9

    /** The secret that seals the state. Where the key of this installation is gone, the device begins anew. */
    private fun secretOf(database: SQLiteDatabase): ByteArray {
        val key = InstallationKey(STATE_KEY)
        val wrapped = database.rows("SELECT wrapped FROM sealing") { it.getBlob(0) }.firstOrNull()
        wrapped?.let(key::open)?.let { return it }
        if (wrapped != null) {
            notice = "the key of this installation is gone, as after a restore: what it sealed cannot be read, and the device begins anew"
            removeKey(DEVICE_KEY)
        }
        val (secret, made) = key.newSecret()
        database.transact {
            for (table in listOf("sealing", "kept")) database.delete(table, null, null)
            database.execSQL("INSERT INTO sealing VALUES (?)", arrayOf(made))
        }
        return secret
    }

    override fun close() {
        if (kept.isInitialized()) kept.value.close()
        if (database.isInitialized()) database.value.close()
    }

    /** Remove all that the device keeps, its keys too. Nothing may use it any more. Throws [StateDamaged] when something stays. */
    fun erase() {
        close()
        try {
            removeKey(STATE_KEY)
            removeKey(DEVICE_KEY)
        } finally {
            if (!folder.deleteRecursively()) throw StateDamaged("not all files in $folder could be deleted: erase again")
        }
    }
}

/** Throws [ConfigException] on the app's main thread, which must not wait for the disk or the network. */
internal fun offMainThread() {
    if (Looper.myLooper() != Looper.getMainLooper()) return
    throw ConfigException("this waits for the disk or the network: call it from another thread than the app's main one")
}

/** Lets sessions and what changes models take turns, in all processes of the app. */
internal class TurnsOfApp(private val folder: File, private val mayWait: () -> Unit = {}) : Turns {
    private val lock = LOCKS.getOrPut(folder.absolutePath) { ReentrantLock(true) }

    /** Throws [StateInUse] while another process is at work, [StateDamaged] when the folder cannot be used. */
    override fun <T> take(work: () -> T): T = taken(0, work)

    /** The same, after up to so long of waiting for another process. */
    fun <T> taken(patienceMs: Long, work: () -> T): T {
        mayWait()
        if (lock.isHeldByCurrentThread) throw StateInUse("a listener called this in the middle of a session: call it from another thread")
        return ofProcess { opened().use { channel -> held(channel, patienceMs).use { work() } } }
    }

    private fun held(channel: FileChannel, patienceMs: Long): FileLock {
        val end = System.nanoTime() + 1_000_000 * patienceMs
        while (true) {
            channel.tryLock()?.let { return it }
            if (System.nanoTime() >= end) throw StateInUse("another process of this app is in a session: call again when it is over")
            Thread.sleep(NAP_MS)
        }
    }

    /** Do work once nothing else in this process has a turn. */
    fun <T> ofProcess(work: () -> T): T = lock.withLock(work)

    private fun opened(): FileChannel =
        try {
            folder.mkdirs()
            RandomAccessFile(File(folder, "lock"), "rw").channel
        } catch (error: IOException) {
            throw StateDamaged("the folder of the state cannot be used: ${error.message}")
        }

    private companion object {
        const val NAP_MS = 20L

        /** By folder: a process that holds the lock of a file cannot ask for it again. */
        val LOCKS = ConcurrentHashMap<String, ReentrantLock>()
    }
}

/** A service of the system that every phone has. */
internal inline fun <reified T> Context.service(): T = checkNotNull(getSystemService(T::class.java))

/** The conditions now. A phone that saves power counts as one that does not charge. */
internal fun conditionsOf(context: Context, folder: File): Conditions {
    val power = context.service<PowerManager>()
    val battery = context.registerReceiver(null, IntentFilter(Intent.ACTION_BATTERY_CHANGED))
    val plugged = battery?.getIntExtra(BatteryManager.EXTRA_PLUGGED, -1) ?: -1
    val level = battery?.getIntExtra(BatteryManager.EXTRA_LEVEL, -1) ?: -1
    val scale = battery?.getIntExtra(BatteryManager.EXTRA_SCALE, -1) ?: -1
    return Conditions(
        charging = if (plugged < 0) null else plugged > 0 && !power.isPowerSaveMode,
        idle = !power.isInteractive,
        unmetered = isUnmetered(context),
        battery = if (level < 0 || scale <= 0) null else level.toDouble() / scale,
        freeStorageBytes = StatFs(existing(folder).path).availableBytes,
    )
}

private fun existing(folder: File): File = generateSequence(folder) { it.parentFile }.first { it.exists() }

/** Whether the network costs nothing by the byte; null without one. */
private fun isUnmetered(context: Context): Boolean? {
    val networks = context.service<ConnectivityManager>()
    val found = networks.activeNetwork?.let(networks::getNetworkCapabilities)
    return found?.hasCapability(NetworkCapabilities.NET_CAPABILITY_NOT_METERED)
}

/** What asks for the version of Android before it calls anything that the oldest does not have. */
internal annotation class AsksForVersion

/** Why the phone is too hot to work; null when it is not, or does not say. */
@AsksForVersion
private fun heat(context: Context): String? {
    if (Build.VERSION.SDK_INT < Build.VERSION_CODES.Q) return null
    val status = context.service<PowerManager>().currentThermalStatus
    return if (status >= PowerManager.THERMAL_STATUS_MODERATE) "the phone is warm, of thermal status $status" else null
}
