package dev.muster.device.sessions

import dev.muster.device.Device
import dev.muster.device.Stop
import okhttp3.Interceptor
import okhttp3.OkHttpClient
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test
import java.util.concurrent.CopyOnWriteArrayList
import kotlin.concurrent.thread

/** Devices of a process do not disturb one another. */
class DeviceTest {
    @Test
    fun `two devices on one platform take turns`() {
        val askers = CopyOnWriteArrayList<Thread>()
        val noting =
            Interceptor { chain ->
                askers += Thread.currentThread()
                Thread.sleep(5)
                chain.proceed(chain.request())
            }
        val good = Coordinator()
        val platform =
            object : RoundPlatform(good) {
                override val http = OkHttpClient.Builder().addInterceptor(noting).addInterceptor(good).build()
            }
        List(2) { Device(platform, config()) }.map { thread { it.runOnce() } }.forEach(Thread::join)
        assertEquals(1, askers.zipWithNext().count { (one, next) -> one != next })
    }

    @Test
    fun `a device stops with its configuration, too`() {
        val config = config()
        val coordinator = Coordinator { place, good -> Answered(good).also { if (place == 3) config.stop.set() } }
        assertEquals("conditions", Device(RoundPlatform(coordinator), config).runOnce(Stop()).reason)
    }
}
