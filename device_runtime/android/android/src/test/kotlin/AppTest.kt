package dev.muster.device

import android.app.Application
import android.app.job.JobScheduler
import com.example.JavaApp
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeout
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotEquals
import org.junit.Assert.assertNull
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.annotation.Config
import java.io.File

private const val PATIENCE_MS = 20_000L

/** What apps rely on: threads, flows, callbacks from Java, and a device that begins anew once it was erased. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class AppTest {
    private val context: Application = RuntimeEnvironment.getApplication()
    private val fields = listOf(ExampleField("x", DType.FLOAT32))
    private val anyTime = Requirements(charging = false, idle = false, unmetered = false, minFreeStorageBytes = 0)

    private fun builder() = Muster.builder(context).coordinator("http://127.0.0.1:9", "phones").requirements(anyTime)

    private inline fun <T> using(work: (Muster) -> T): T = builder().allowMainThread().build().use(work)

    private fun Muster.keepOne() {
        examples.declare("default", fields)
        examples.append("default", mapOf("x" to 0.5f))
    }

    private fun within(holds: () -> Boolean): Boolean {
        val end = System.nanoTime() + 1_000_000 * PATIENCE_MS
        while (!holds() && System.nanoTime() < end) Thread.sleep(10)
        return holds()
    }

    @Before
    fun install() = FakeKeystore.install()

    @Test
    fun `calls that wait are refused on the app's main thread, and open nothing`() {
        val muster = builder().build()
        val calls: List<() -> Any?> =
            listOf(
                muster::journal, muster::close, muster::eraseEverything, { muster.model("digits") }, { muster.examples.counts() },
                { muster.examples.append("default", emptyMap()) },
            )
        for (call in calls) assertThrows(ConfigException::class.java) { call() }
        assertFalse(File(context.noBackupFilesDir, "muster").exists())
        muster.schedule()
        assertEquals("unreachable", muster.sessionAsync().get().reason)
    }

    @Test
    fun `labels that a device may not have are refused when it is built`() {
        val error = assertThrows(ConfigException::class.java) { builder().labels(mapOf("Region" to "eu")).build() }
        assertTrue(error.message, "label \"Region\"" in error.message!!)
    }

    @Test
    fun `a Worker calls one function, which honours the time to return`() =
        using { muster ->
            runBlocking {
                assertEquals("unreachable", muster.sessionIfDue()!!.reason)
                assertNull(muster.sessionIfDue())
            }
            assertNull(muster.sessionIfDueAsync().get())
            assertEquals(1, muster.journal().size)
        }

    @Test
    fun `the journal is a flow, with what another process writes, and ends with the device`() =
        using { muster ->
            runBlocking {
                val seen = ArrayList<Int>()
                val collecting = launch(Dispatchers.IO) { muster.journalFlow().collect { seen += it.size } }
                assertTrue(within { seen == listOf(0) })
                assertFalse(File(context.noBackupFilesDir, "muster").exists())
                using { other -> other.session() }
                assertTrue(within { seen == listOf(0, 1) })
                muster.close()
                withTimeout(PATIENCE_MS) { collecting.join() }
            }
        }

    @Test
    fun `once erased it is another device, and what the app kept of the one before says so`() =
        using { muster ->
            muster.schedule()
            muster.keepOne()
            val (examples, model) = muster.examples to muster.model("digits")
            muster.sessionAsync().get()
            muster.eraseEverything()
            assertEquals(emptyList<Any>(), context.service<JobScheduler>().allPendingJobs)
            assertThrows(StateDamaged::class.java) { examples.counts() }
            assertThrows(ModelClosed::class.java) { model.predict(emptyMap()) }
            assertEquals(emptyMap<String, Int>(), muster.examples.counts())
            assertEquals(emptyList<Any>(), muster.journal())
            muster.keepOne()
            assertEquals("unreachable", muster.sessionAsync().get().reason)
        }

    @Test
    fun `what another process erased is not used any more`() =
        using { muster ->
            muster.keepOne()
            val examples = muster.examples
            using { it.eraseEverything() }
            assertThrows(StateDamaged::class.java) { examples.append("default", mapOf("x" to 0.5f)) }
            assertNotEquals(examples, muster.examples)
            assertEquals(emptyMap<String, Int>(), muster.examples.counts())
            muster.keepOne()
            assertEquals(1, muster.examples.counts()["default"])
        }

    @Test
    fun `what a listener calls in the middle of a session is refused by name`() {
        val turns = TurnsOfApp(File(context.noBackupFilesDir, "muster"))
        turns.take { assertThrows(StateInUse::class.java) { turns.take { } } }
    }

    @Test
    fun `progress is null again after a session`() =
        using { muster ->
            val seen = ArrayList<String>()
            muster.listenToProgress { seen += it?.stage.toString() }.use {
                muster.sessionAsync().get()
                assertTrue(within { seen.last() == "null" })
            }
            runBlocking { assertNull(muster.progress.first()) }
        }

    @Test
    fun `an app in Java does the same`() {
        val app = JavaApp(context)
        app.watch().use {
            assertEquals(1, app.keep(floatArrayOf(0.5f), 7))
            assertEquals(1, app.keep(floatArrayOf(0.5f), 70))
            assertEquals("invalid-examples", app.said)
            assertEquals("unreachable", app.train().reason)
            assertEquals("unreachable", app.said)
            assertEquals(0, app.read(floatArrayOf(0.5f)).size)
            assertTrue(within { app.entries == 1 })
        }
        app.muster.close()
    }
}
