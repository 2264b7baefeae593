package dev.muster.device.wire

import dev.muster.device.ConfigException
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.Policy
import dev.muster.device.checkLabels
import dev.muster.device.items
import dev.muster.device.plans.decodePlan
import dev.muster.device.utf8
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.MethodSource

/** Messages are read as in Python, in every form that a coordinator may write. */
class MessagesTest {
    @Test
    fun `an assignment keeps integers that a float64 would round`() {
        val given = read(messages["good"]["assignment"].items()[0].text())
        assertEquals(messages["seed"].text().toLong(), given.seed)
        assertEquals(messages["slot"].text().toLong(), given.slot)
        assertEquals(listOf(3, 8L, true, 5.25), listOf(given.round, given.minimum, given.overSelected, given.lostAfterS))
        assertArrayEquals(byteArrayOf(0, 1), given.secagg)
        assertEquals(1L shl 40, given.plan.size)
        assertNull(given.release)
    }

    @Test
    fun `every answer that Python writes is read`() {
        for (text in messages["good"]["assignment"].items()) assignmentOrRejected(Json.parse(text.text(), "assignment"))
        for (text in messages["good"]["checkIn"].items()) CheckInAnswer.of(Json.parse(text.text(), "answer"))
        for (text in messages["good"]["enrolled"].items()) Enrolled.of(Json.parse(text.text(), "enrolled"))
    }

    @ParameterizedTest
    @MethodSource("alike")
    fun `the form of a message does not matter`(text: String) {
        assertEquals(facts(read(messages["good"]["assignment"].items()[0].text())), facts(read(text)))
    }

    @ParameterizedTest
    @MethodSource("bad")
    fun `a text that is no assignment is refused`(text: String) {
        assertThrows(FormatException::class.java) { assignmentOrRejected(Json.parse(utf8(text), "assignment")) }
    }

    @Test
    fun `an assignment is kept in a form that reads as the same`() {
        val given = read(messages["good"]["assignment"].items()[0].text())
        val again = Assignment.of(Json.parse(Json.write(given.source), "kept"))
        assertEquals(facts(given), facts(again))
        assertEquals(Json.write(given.source), Json.write(again.source))
    }

    @Test
    fun `a plan's two trips take turns`() {
        val plan = vectors("device.json")["plan"]["text"].text()
        assertTrue(decodePlan(utf8(plan), 1).passes.size != decodePlan(utf8(plan), 2).passes.size)
    }

    @Test
    fun `the target of an assignment is a text of 1 to 1,000 characters`() {
        assertEquals("𝟛".repeat(1000), read(messages["targeted_assignment"].text()).target)
        assertNull(read(messages["good"]["assignment"].items()[0].text()).target)
        for (bad in messages["bad_targets"].items()) assertThrows(FormatException::class.java) { read(bad.text()) }
    }

    @Test
    fun `labels are taken up to their limits, and named beyond them`() {
        val labels = vectors("device.json")["labels"]
        for (good in labels["good"].items()) checkLabels(good.map { it.text() })
        for (bad in labels["bad"].items()) {
            val error = assertThrows(ConfigException::class.java) { checkLabels(bad.map { it.text() }) }
            assertTrue("label" in error.message!!)
        }
        assertThrows(ConfigException::class.java) { checkLabels(mapOf("region" to "\ud800")) }
        assertThrows(ConfigException::class.java) { Policy.of("""{"labels": ["Region"]}""") }
        assertEquals(setOf("region"), Policy.of("""{"labels": ["region"]}""").labels)
    }

    private fun facts(one: Assignment) =
        listOf(
            one.assignment, one.task, one.round, one.attempt, one.slot, one.seed, one.plan, one.checkpoint, one.reportWithinS, one.minimum,
            one.secagg?.toList(), one.release, one.lineage, one.overSelected, one.lostAfterS, one.purpose, one.target,
        )

    private fun read(text: String) = assignmentOrRejected(Json.parse(text, "assignment")) as Assignment

    companion object {
        private val messages = vectors("device.json")["messages"]

        @JvmStatic
        fun alike() = messages["alike_assignments"].items().map { it.text() }

        @JvmStatic
        fun bad() = messages["bad_assignments"].items().map { it.text() }
    }
}
