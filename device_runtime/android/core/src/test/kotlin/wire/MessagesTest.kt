package dev.muster.device.wire

import dev.muster.device.FormatException
import dev.muster.device.Json
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

    private fun facts(one: Assignment) =
        listOf(
            one.assignment, one.task, one.round, one.attempt, one.slot, one.seed, one.plan, one.checkpoint, one.reportWithinS, one.minimum,
            one.secagg?.toList(), one.release, one.lineage, one.overSelected, one.lostAfterS, one.purpose,
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
