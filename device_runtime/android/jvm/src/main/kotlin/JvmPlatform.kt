/** The platform of a device on a desktop's Java: its state in a folder, and this machine's clock, network and engine. */
package dev.muster.device.jvm

import com.sun.management.OperatingSystemMXBean
import dev.muster.device.Attester
import dev.muster.device.Conditions
import dev.muster.device.ExampleSource
import dev.muster.device.FileBlobs
import dev.muster.device.Platform
import dev.muster.device.SigningKey
import dev.muster.device.keptSigningKey
import dev.muster.device.plans.engineName
import okhttp3.OkHttpClient
import java.io.File
import java.lang.management.ManagementFactory
import java.security.SecureRandom

private val SYSTEM = ManagementFactory.getOperatingSystemMXBean() as OperatingSystemMXBean
private val RANDOM = SecureRandom()

/** One client for all devices of a process, which share its connections. */
private val HTTP = OkHttpClient()

/**
 * A platform for sessions. Nobody else can use its folder until it is closed.
 *
 * isAlone: whether this process is one device. One among others cannot tell its part of the processor's time.
 */
internal class JvmPlatform(
    state: File,
    override val examples: ExampleSource,
    override val attester: Attester? = null,
    private val isAlone: Boolean = true,
) : Platform, AutoCloseable {
    override val store = SqliteStore(state)
    override val blobs = FileBlobs(state)
    override val engineName: String = engineName()
    override val http: OkHttpClient get() = HTTP
    override val memoryBytes: Long get() = SYSTEM.totalMemorySize

    override fun signingKey(name: String): SigningKey = keptSigningKey(store, name)

    override fun conditions(): Conditions = Conditions()

    override fun random(size: Int): ByteArray = ByteArray(size).also(RANDOM::nextBytes)

    override fun now(): Double = System.currentTimeMillis() / 1000.0

    override fun workSeconds(): Double = if (isAlone) SYSTEM.processCpuTime / 1e9 else 0.0

    /** Close the state, so that another process can use the folder. */
    override fun close() = store.close()
}
