package dev.muster.device.sessions

import dev.muster.device.Attester
import dev.muster.device.StateDamaged
import dev.muster.device.damaged
import dev.muster.device.kept.journal
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.IOException

/** A session ends with an outcome, whatever its coordinator, its disk and its app do. */
class SessionTest {
    @Test
    fun `a session of good answers reports`() {
        val platform = RoundPlatform(Coordinator())
        assertEquals("reported", runSession(platform, config()).outcome)
        assertEquals(listOf("reported"), journal(platform.store).map { it["outcome"] })
    }

    @Test
    fun `a session ends with an outcome, whichever answer is damaged`() {
        val found = HashSet<String>()
        for (seed in 0 until SESSIONS) {
            val ended = runSession(RoundPlatform(Coordinator { place, good -> spoiled(place, good, seed) }), config())
            assertTrue(ended.reason != "" || ended.outcome == "reported", "seed $seed: $ended")
            found += "${ended.outcome} ${ended.reason}"
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
            listOf<(RoundPlatform) -> RoundPlatform>(
                { RoundPlatform(Coordinator { _, _ -> throw SecurityException("no permission") }) },
                { _ ->
                    object : RoundPlatform(Coordinator()) {
                        override val attester = object : Attester { override fun attest(key: String, created: Long) = TODO() }
                    }
                },
                { _ ->
                    object : RoundPlatform(Coordinator()) {
                        override val examples = object : RoundExamples() { override fun counts() = error("no such table") }
                    }
                },
                { _ ->
                    object : RoundPlatform(Coordinator()) {
                        override val examples = object : RoundExamples() { override fun load(collection: String) = throw OutOfMemoryError() }
                    }
                },
                { _ ->
                    object : RoundPlatform(Coordinator()) {
                        override fun conditions() = throw StackOverflowError()
                    }
                },
            )
        for (fault in faults) {
            val platform = fault(RoundPlatform(Coordinator()))
            val ended = runSession(platform, config())
            assertEquals("runtime-failed", ended.reason)
            assertTrue("the device's own code failed" in ended.detail, ended.detail)
            assertEquals(listOf(ended.outcome), journal(platform.store).map { it["outcome"] })
        }
    }

    @Test
    fun `a full disk is in the outcome`() {
        val store = object : MemoryStore() { override fun write(changes: Map<String, String?>) = throw StateDamaged("disk full") }
        val ended = runSession(RoundPlatform(Coordinator(), store), config())
        assertEquals(listOf("failed", "state-unusable", "disk full"), listOf(ended.outcome, ended.reason, ended.detail))
    }

    @Test
    fun `a damaged journal begins anew, and says so`() {
        val store = MemoryStore().apply { kept["journal"] = "[{]" }
        assertEquals("reported", runSession(RoundPlatform(Coordinator(), store), config()).outcome)
        assertEquals(listOf("journal-lost", "reported"), journal(store).map { it["outcome"] })
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
