package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.DeadlinePassed
import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import dev.muster.device.Json
import dev.muster.device.NonFiniteReport
import dev.muster.device.PlanRefused
import dev.muster.device.RuntimeFailed
import dev.muster.device.Stop
import dev.muster.device.bytesOf
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.utf8
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

/** The runner gives Python's report, bit for bit, and refuses what it must. */
class RunnerTest {
    private val runner = vectors("device.json")["runner"]
    private val plan = decodePlan(utf8(runner["plan"].text()), 1)
    private val many = decodePlan(utf8(runner["many_plan"].text()), 1)

    private fun floats(name: String) = floatsOf(fromHex(runner[name].text()))

    private fun examples() =
        Examples(runner["examples"].size(), mapOf("x" to Column(listOf(3), floats("x")), "y" to Column(emptyList(), floats("y"))))

    private fun graphs(written: Json) = written.members().mapValues { (name, bytes) -> Graph.load(fromHex(bytes as String), name) }

    private fun work(plan: Plan = this.plan, written: String = "graphs"): Work {
        val key = StreamKey(runner["seed"].text().toLong(), runner["round"].size(), runner["slot"].text().toLong())
        return Work(plan, graphs(runner[written]), mapOf("params" to floats("params")), emptyMap(), null, examples(), key) { true }
    }

    private fun assertPython(found: TrainingResult) {
        assertEquals(runner["values"].text(), hex(bytesOf(found.values)))
        assertEquals(runner["weight"].number(), found.weight)
        assertEquals(listOf(runner["steps"].size(), runner["examples"].size()), listOf(found.steps, found.examples))
    }

    @Test
    fun `two passes give Python's values, weight and steps`() = assertPython(execute(work()))

    @Test
    fun `many steps in a call give the same values`() = assertPython(execute(work(many, "many_graphs")))

    @Test
    fun `graphs that stayed loaded give the same values`() {
        val bytes = runner["many_graphs"].members().mapValues { fromHex(it.value as String) }
        val (loaded, refs) = LoadedGraphs(bytes.size) to bytes.keys.associateWith { BlobRef(it, 1) }
        repeat(3) {
            withGraphs(refs, { bytes.getValue(it.sha256) }, Stop(), loaded) { graphs ->
                assertPython(execute(work(many, "many_graphs").copy(graphs = graphs)))
            }
        }
    }

    @Test
    fun `work that may not go on stops between two calls, and says where`() {
        var left = 3
        val one = assertThrows<DeadlinePassed> { execute(work().copy(keepGoing = { left-- > 0 })) }
        assertTrue("in pass train after 3 steps" in one.message!!)
        left = 1
        val more = assertThrows<DeadlinePassed> { execute(work(many, "many_graphs").copy(keepGoing = { left-- > 0 })) }
        assertTrue("in pass train after 4 steps" in more.message!!)
    }

    @Test
    fun `a checkpoint that diverges gives no report, and says when it began`() {
        val error = assertThrows<NonFiniteReport> { execute(work().copy(broadcast = mapOf("params" to FloatArray(3) { 3e38f }))) }
        assertTrue("not finite in the first step" in error.message!!, error.message)
    }

    @Test
    fun `a plan whose sums no pass makes is refused`() {
        val segments = plan.report.segments.map { if (it.name == "train.metrics") it.copy(name = "other") else it }
        assertThrows<PlanRefused> { execute(work(plan.copy(report = plan.report.copy(segments = segments)))) }
    }

    @Test
    fun `a graph of other outputs than the plan's is refused`() {
        val other = plan.passes.map { pass -> pass.copy(carry = listOf(VectorSpec("other", 3))) }
        val error = assertThrows<PlanRefused> { execute(work(plan.copy(passes = other))) }
        assertTrue("train.begin" in error.message!! && "next.other" in error.message!!)
        val longer = plan.passes.map { pass -> pass.copy(carry = pass.carry.map { it.copy(size = 4) }) }
        assertThrows<RuntimeFailed> { execute(work(plan.copy(passes = longer))) }
    }

    @Test
    fun `what a device keeps is what the graph for the next round makes, and must be finite`() {
        val keeping = plan.copy(kept = listOf(VectorSpec("params", 3)))
        val begin = fromHex(runner["graphs"]["train.begin"].text()) // hands `broadcast.params` on as `next.params`
        fun given() = work(keeping).run { copy(graphs = graphs + listOf(FIRST_KEPT, NEXT_KEPT).associateWith { Graph.load(begin, it) }) }
        assertArrayEquals(floats("params"), execute(given()).kept["params"])
        val next = given()
        next.graphs.getValue(FIRST_KEPT).close() // of the first round alone
        assertArrayEquals(floats("params"), execute(next.copy(kept = mapOf("params" to FloatArray(3)))).kept["params"])
        assertThrows<PlanRefused> { execute(work(keeping)) }
        assertTrue(execute(work()).kept.isEmpty())
    }

    @Test
    fun `labels may be those that the plan ignores, and no others below 0`() {
        val field = Field("y", DType.INT64, listOf(2), 3, null, -100)
        val ignoring = plan.copy(examples = plan.examples.copy(fields = listOf(field)))
        fun check(vararg labels: Long) = checkExamples(ignoring, Examples(2, mapOf("y" to Column(listOf(2), labels))))
        check(0, -100, 2, -100)
        assertTrue("field y of example 1 holds -99" in assertThrows<ExamplesException> { check(0, -100, 2, -99) }.message!!)
        assertTrue("field y of example 0 holds 3" in assertThrows<ExamplesException> { check(3, -100, 2, 0) }.message!!)
    }

    @TestFactory
    fun `examples that do not fit are refused`(): List<DynamicTest> =
        listOf(
            Triple("none", Examples(0, examples().columns), "no examples"),
            Triple("too many values", Examples(12, examples().columns), "x holds float32"),
            Triple("a missing field", Examples(13, emptyMap()), "no field x"),
            Triple("a NaN", Examples(13, mapOf("x" to Column(listOf(3), FloatArray(39) { Float.NaN }))), "example 0 holds NaN"),
            Triple("another type", Examples(13, mapOf("x" to Column(listOf(3), IntArray(39)))), "plan wants float32"),
        ).map { (name, given, words) ->
            dynamicTest(name) {
                val error = assertThrows<ExamplesException> { checkExamples(plan, given) }
                assertTrue(words in error.message!!, error.message)
            }
        }
}
