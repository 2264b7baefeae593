package dev.muster.device

import android.app.Application
import android.app.job.JobParameters
import android.content.ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL
import android.content.ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW
import org.junit.After
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.shadow.api.Shadow
import java.io.File
import java.net.ServerSocket
import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit
import kotlin.concurrent.thread

private val AT_ANY_TIME = Requirements(charging = false, idle = false, unmetered = false, minFreeStorageBytes = 0)

/** An app whose callbacks all fail. */
class FailingApp : Application(), MusterProvider {
    lateinit var server: ServerSocket

    override val muster: Muster by lazy {
        Muster.builder(this)
            .coordinator("http://127.0.0.1:${server.localPort}", "phones")
            .requirements(AT_ANY_TIME)
            .policy(Policy())
            .allowMainThread()
            .warn { TODO("the app's own fault") }
            .build()
            .also { muster -> muster.listen { TODO("the app's own fault") } }
    }
}

/** The system's job runs a session, ends it within a second when told to, and never takes the app with it. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35], application = FailingApp::class)
class SessionJobTest {
    private val app = RuntimeEnvironment.getApplication() as FailingApp
    private val service = Robolectric.buildService(SessionJob::class.java).create().get()
    private val job = Shadow.newInstanceOf(JobParameters::class.java)
    private val asked = CountDownLatch(1)

    /** A coordinator that takes every request and answers none. */
    @Before
    fun listen() {
        FakeKeystore.install()
        app.server = ServerSocket(0)
        thread(isDaemon = true) {
            runCatching {
                val open = generateSequence { app.server.accept() }
                open.forEach { socket -> if (socket.getInputStream().read() >= 0) asked.countDown() }
            }
        }
    }

    @After
    fun close() = app.server.close()

    private fun within(seconds: Double, holds: () -> Boolean): Boolean {
        val end = System.nanoTime() + (1e9 * seconds).toLong()
        while (!holds() && System.nanoTime() < end) Thread.sleep(10)
        return holds()
    }

    @Test
    fun `told to stop, it ends within a second`() {
        assertTrue(service.onStartJob(job))
        assertTrue(asked.await(20, TimeUnit.SECONDS))
        assertTrue(service.onStopJob(job))
        assertTrue(within(1.0) { app.muster.journal().isNotEmpty() })
        val entry = app.muster.journal().single()
        assertEquals(listOf(Ending.FAILED, "conditions"), entry.outcome?.run { listOf(ending, reason) })
        assertFalse(shadowOf(service).isJobFinished)
    }

    @Suppress("DEPRECATION") // Android 14 and later send fewer of these levels
    @Test
    fun `when memory is critically short, it ends as for a condition that does not hold any more`() {
        assertTrue(service.onStartJob(job))
        assertTrue(asked.await(20, TimeUnit.SECONDS))
        app.onTrimMemory(TRIM_MEMORY_RUNNING_LOW)
        assertFalse(within(0.1) { app.muster.journal().isNotEmpty() })
        app.onTrimMemory(TRIM_MEMORY_RUNNING_CRITICAL)
        assertTrue(within(1.0) { shadowOf(service).isJobFinished })
        val entry = app.muster.journal().single()
        assertEquals("conditions", entry.outcome?.reason)
        assertEquals("a condition for work no longer holds: memory is short", entry.detail)
    }

    @Test
    fun `to close and to erase end the session that is under way, and nothing is left of it`() {
        assertTrue(service.onStartJob(job))
        assertTrue(asked.await(20, TimeUnit.SECONDS))
        val began = System.nanoTime()
        app.muster.eraseEverything()
        assertTrue(System.nanoTime() - began < 1_000_000_000)
        assertTrue(within(1.0) { shadowOf(service).isJobFinished })
        assertFalse(File(app.noBackupFilesDir, "muster").exists())
    }

    @Test
    fun `a closed device runs no session, and its job ends`() {
        app.muster.close()
        assertTrue(service.onStartJob(job))
        assertTrue(within(1.0) { shadowOf(service).isJobFinished })
        assertFalse(File(app.noBackupFilesDir, "muster").exists())
        assertEquals("bad-configuration", app.muster.sessionAsync().get().reason)
    }

    @Test
    fun `a coordinator that is not there ends the job, and the next one waits its turn`() {
        app.server.close()
        assertTrue(service.onStartJob(job))
        assertTrue(within(60.0) { shadowOf(service).isJobFinished })
        assertEquals("unreachable", app.muster.journal().single().outcome?.reason)
        assertTrue(service.onStartJob(job))
        Thread.sleep(500)
        assertEquals(1, app.muster.journal().size)
    }
}
