package dev.muster.device.sessions

import dev.muster.device.Attester
import dev.muster.device.Ending
import dev.muster.device.Entry
import dev.muster.device.Outcome
import dev.muster.device.Progress
import dev.muster.device.Stage
import dev.muster.device.StateDamaged
import dev.muster.device.Stop
import dev.muster.device.damaged
import dev.muster.device.kept.journal
import dev.muster.device.utf8
import okhttp3.Interceptor
import okhttp3.OkHttpClient
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.IOException
import java.time.Instant
import java.util.concurrent.atomic.AtomicInteger
import kotlin.concurrent.thread
import kotlin.random.Random

/** A session ends with an outcome, whatever its coordinator, its disk and its app do. */
class SessionTest {
    @Test
    fun `a session of good answers reports`() {
        val platform = RoundPlatform(Coordinator())
        assertEquals(Ending.REPORTED, runSession(platform, config()).ending)
        assertEquals(listOf(Ending.REPORTED), journal(platform.store).map { it.outcome?.ending })
    }

    @Test
    fun `a session ends with an outcome, whichever answer is damaged`() {
        val found = HashSet<String>()
        for (seed in 0 until SESSIONS) {
            val ended = runSession(RoundPlatform(Coordinator { place, good -> spoiled(place, good, seed) }), config())
            assertTrue(ended.reason != "" || ended.ending == Ending.REPORTED, "seed $seed: $ended")
            found += "${ended.ending.text} ${ended.reason}"
        }
        assertTrue("failed bad-answer" in found, "$found")
    }

    private fun spoiled(place: Int, good: ByteArray, seed: Int): Answered {
        if (place != seed % REQUESTS) return Answered(good)
        if (seed % 13 == 0) throw IOException("reset")
        return Answered(damaged(good, seed), STATUSES[seed % STATUSES.size])
    }

    @Test
    fun `a session survives what an app's own parts throw, and says it`() {
        val faults =
            listOf(
                RoundPlatform(Coordinator { _, _ -> throw SecurityException("no permission") }),
                object : RoundPlatform(Coordinator()) {
                    override val attester = object : Attester { override fun attest(key: String, created: Long) = TODO() }
                },
                object : RoundPlatform(Coordinator()) {
                    override val examples = object : RoundExamples() { override fun counts() = error("no such table") }
                },
                object : RoundPlatform(Coordinator()) {
                    override fun conditions() = throw StackOverflowError()
                },
            )
        for (platform in faults) assertSaid(platform)
    }

    @Test
    fun `a coordinator hears of memory that ends at work`() {
        val coordinator = Coordinator()
        val platform =
            object : RoundPlatform(coordinator) {
                override val examples = object : RoundExamples() { override fun load(collection: String) = throw OutOfMemoryError() }
            }
        assertSaid(platform)
        assertEquals("/v1/assignments/a:abort", coordinator.paths.last())
        assertEquals(Ending.REPORTED, runSession(RoundPlatform(Coordinator("b"), platform.store), config()).ending)
    }

    private fun assertSaid(platform: RoundPlatform) {
        val ended = runSession(platform, config())
        assertEquals("runtime-failed", ended.reason)
        assertTrue("the device's own code failed" in ended.detail, ended.detail)
        assertEquals(listOf(ended), journal(platform.store).map { it.outcome })
    }

    @Test
    fun `a stopped session ends within a second, whichever answer does not come`() {
        for (place in 0 until REQUESTS) {
            val stop = Stop()
            val asked = AtomicInteger()
            val stalling =
                Interceptor { chain ->
                    if (asked.getAndIncrement() < place) chain.proceed(chain.request()) else stalled(chain, stop)
                }
            val good = Coordinator()
            val platform =
                object : RoundPlatform(good) {
                    override val http = OkHttpClient.Builder().addInterceptor(stalling).addInterceptor(good).build()
                }
            val ended = runSession(platform, config(stop))
            val passedS = (System.nanoTime() - stoppedAt) / 1e9
            assertEquals("conditions", ended.reason, "$place: $ended")
            assertTrue(passedS < 1, "$place: $passedS s")
        }
    }

    private var stoppedAt = 0L

    /** No answer, until the call is given up; the session is stopped meanwhile. */
    private fun stalled(chain: Interceptor.Chain, stop: Stop): Nothing {
        if (!stop.isSet) {
            stoppedAt = System.nanoTime()
            thread { stop.set() }
        }
        while (!chain.call().isCanceled()) Thread.sleep(1)
        throw IOException("Canceled")
    }

    @Test
    fun `a device that is killed at any write of its state works again`() {
        val writes = Snapshots().also { assertEquals(Ending.REPORTED, runSession(RoundPlatform(Coordinator(), it), config()).ending) }.all
        assertEquals(6, writes.size) { "two keys, the enrolment; an assignment, its report, the end: each waits for the disk" }
        for ((place, kept) in writes.withIndex()) {
            val store = MemoryStore().apply { this.kept += kept }
            val next = runSession(RoundPlatform(Coordinator(), store), config())
            assertTrue(next.ending in setOf(Ending.REPORTED, Ending.ABORTED) || "came again" in next.detail, "$place: $next")
            assertEquals(Ending.REPORTED, runSession(RoundPlatform(Coordinator("b"), store), config()).ending, "$place")
        }
    }

    /** A store that remembers what was in it after each write. */
    private class Snapshots : MemoryStore() {
        val all = ArrayList<Map<String, String>>()

        override fun write(changes: Map<String, String?>) {
            super.write(changes)
            all += HashMap(kept)
        }
    }

    @Test
    fun `a session ends with an outcome, whatever is damaged of what is kept`() {
        val kept = MemoryStore().also { runSession(RoundPlatform(Coordinator(), it), config()) }.kept
        for (key in kept.keys) {
            for (seed in 0 until 40) {
                val store = MemoryStore().apply { this.kept += kept + (key to String(damaged(utf8(kept.getValue(key)), seed))) }
                val ended = runSession(RoundPlatform(Coordinator("b"), store), config())
                assertTrue(ended.ending == Ending.REPORTED || ended.reason == "state-unusable", "$key $seed: $ended")
            }
        }
    }

    @Test
    fun `a clock that jumps by years ends no session without an outcome`() {
        for (seed in 0 until 100) {
            val random = Random(seed)
            val platform =
                object : RoundPlatform(Coordinator()) { override fun now() = 1e9 + random.nextInt(-20, 20) * 31e6 * random.nextInt(2) }
            val ended = runSession(platform, config())
            assertTrue(ended.ending == Ending.REPORTED || ended.reason == "runtime-failed" && "too late" in ended.detail, "$seed: $ended")
        }
    }

    @Test
    fun `an app hears how far a session is, step by step`() {
        val heard = ArrayList<Progress>()
        val ended = runSession(RoundPlatform(Coordinator()), config().also { it.progress = heard::add })
        assertEquals(Stage.entries, heard.map { it.stage }.distinct())
        val trained = heard.filter { it.stage == Stage.TRAINING }
        assertEquals(listOf(0, ended.steps, ended.steps), listOf(trained.first().step, trained.last().step, trained.last().steps))
        assertEquals(listOf("", "t"), heard.map { it.task }.distinct())
    }

    @Test
    fun `a full disk is in the outcome`() {
        val store = object : MemoryStore() { override fun write(changes: Map<String, String?>) = throw StateDamaged("disk full") }
        val ended = runSession(RoundPlatform(Coordinator(), store), config())
        assertEquals(listOf(Ending.FAILED, "state-unusable", "disk full"), listOf(ended.ending, ended.reason, ended.detail))
    }

    @Test
    fun `a damaged journal begins anew, and says so`() {
        val store = MemoryStore().apply { kept["journal"] = "[{]" }
        assertEquals(Ending.REPORTED, runSession(RoundPlatform(Coordinator(), store), config()).ending)
        assertEquals(listOf(Entry.Kind.JOURNAL_LOST, Entry.Kind.SESSION), journal(store).map { it.kind })
    }

    @Test
    fun `the journal tells what other versions of the library wrote, too`() {
        val later = """{"at":1.5,"outcome":"postponed","detail":"words","more":[1]}"""
        val early = """{"at":2,"outcome":"reported","examples":3,"retry":{"min_s":1},"retryable":"later"}"""
        val personal = """{"at":3,"outcome":"failed","reason":"no-model","task":"model digits"}"""
        val written = listOf(later, early, personal, """{"at":4,"outcome":"personalised"}""", """{"outcome":[]}""")
        val store = MemoryStore().apply { written.forEachIndexed { place, entry -> kept["journal:$place"] = entry } }
        store.kept["journal"] = "${written.size}"
        val found = journal(store)
        assertEquals(written, found.map { it.toJson() })
        assertEquals(listOf(Entry.Kind.OTHER, Entry.Kind.SESSION, Entry.Kind.PERSONALISED), found.map { it.kind }.take(3))
        assertEquals(listOf(Entry.Kind.PERSONALISED, Entry.Kind.OTHER), found.map { it.kind }.drop(3))
        assertEquals(listOf(null, Outcome(Ending.REPORTED, examples = 3)), found.map { it.outcome }.take(2))
        assertEquals(listOf(Instant.ofEpochMilli(1500), "words"), found[0].run { listOf(at, detail) })
        assertEquals(listOf(Ending.FAILED, null), found.drop(2).map { it.outcome?.ending }.take(2))
    }

    @Test
    fun `a question is on one line, whatever the spaces between its words are`() {
        assertEquals("how many of them", onOneLine("\u2028how\u00a0\u2003many\u0085of \u001c\tthem\n"))
    }

    private companion object {
        const val SESSIONS = 150
        const val REQUESTS = 11
        val STATUSES = listOf(200, 200, 200, 200, 401, 404, 410, 503)
    }
}
