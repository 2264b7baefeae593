/** The platform of a device on a desktop's Java: its state in a folder, and this machine's clock, network and engine. */
package dev.muster.device.jvm

import com.sun.management.OperatingSystemMXBean
import dev.muster.device.Attester
import dev.muster.device.Conditions
import dev.muster.device.Entry
import dev.muster.device.ExampleSource
import dev.muster.device.FileBlobs
import dev.muster.device.Platform
import dev.muster.device.SigningKey
import dev.muster.device.kept.writeJournal
import dev.muster.device.keptSigningKey
import dev.muster.device.plans.LoadedGraphs
import dev.muster.device.plans.engineName
import okhttp3.OkHttpClient
import java.io.File
import java.lang.management.ManagementFactory
import java.security.SecureRandom

private val SYSTEM = ManagementFactory.getOperatingSystemMXBean() as OperatingSystemMXBean
private val THREADS = ManagementFactory.getThreadMXBean()
private val RANDOM = SecureRandom()

/** It is read from the control groups' files, which takes longer than a check-in's other members. */
private val MEMORY_BYTES: Long by lazy { SYSTEM.totalMemorySize }

/** One client for all devices of a process, which share its connections. */
private val HTTP = OkHttpClient()

/** Graphs that stay loaded: those of a few plans, for as many devices as train at the same time. */
internal val GRAPHS = LoadedGraphs(most = 32)

/** A platform for sessions. Nobody else can use its folder until it is closed. */
internal class JvmPlatform(
    state: File,
    override val examples: ExampleSource,
    override val attester: Attester? = null,
) : Platform, AutoCloseable {
    override val store =
        SqliteStore(state).also { store ->
            store.putAside?.let { writeJournal(store, now(), Entry.Kind.STATE_REPLACED, it) }
        }
    override val blobs = FileBlobs(state)
    override val engineName: String = engineName()
    override val http: OkHttpClient get() = HTTP
    override val memoryBytes: Long get() = MEMORY_BYTES

    override fun signingKey(name: String): SigningKey = keptSigningKey(store, name)

    override fun conditions(): Conditions = Conditions()

    override fun random(size: Int): ByteArray = ByteArray(size).also(RANDOM::nextBytes)

    override fun now(): Double = System.currentTimeMillis() / 1000.0

    /** CPU time of this thread, which does all of a session's work. The process may have other devices, and counts in hundredths. */
    override fun workSeconds(): Double = THREADS.currentThreadCpuTime / 1e9

    /** Close the state, so that another process can use the folder. */
    override fun close() = store.close()
}
