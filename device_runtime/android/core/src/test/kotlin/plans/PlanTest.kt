package dev.muster.device.plans

import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.utf8
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNotNull
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

/** Plans are read as in Python, and refused where it refuses them. */
class PlanTest {
    private val device = vectors("device.json")
    private val given = device["plan"]
    private val written = given["text"].text()

    private fun plan(text: String, round: Int = 1) = decodePlan(utf8(text), round)

    /** The plan with other members at its top. */
    private fun with(vararg members: Pair<String, Any?>) = Json.write(Json.parse(written, "plan").members() + members)

    private fun refuses(text: String, vararg words: String) {
        val error = assertThrows<PlanRefused> { plan(text) }
        for (one in words) assertTrue(one in error.message!!, error.message)
    }

    @Test
    fun `a plan runs its trips in turn`() {
        for (round in given["layout_hash"].members().keys.map(String::toInt)) {
            val plan = plan(written, round)
            assertEquals(given["parameters"].size(), plan.parameters)
            assertEquals(if (round % 2 == 1) 2 else 1, plan.passes.size)
            assertEquals(2, plan.trips)
        }
    }

    @Test
    fun `a plan says what its predict graph takes and gives`() {
        val predict = plan(given["predicting"].text()).predict!!
        assertEquals(listOf("x"), predict.inputs)
        assertEquals(listOf("output" to listOf(2)), predict.outputs.map { it.name to it.shape })
        assertEquals(1, predict.batchSize)
        assertNull(plan(written).predict)
    }

    @TestFactory
    fun `a plan that predicts otherwise than it may is refused`(): List<DynamicTest> =
        given["bad"].items().mapIndexed { place, text -> dynamicTest("$place") { refuses(text.text()) } }

    @Test
    fun `a plan that asks says its question, of 4,000 characters at most`() {
        val question = plan(given["asking"].text()).question!!
        assertEquals(4000, question.codePointCount(0, question.length))
        assertNull(plan(written).question)
        for (text in given["bad_questions"].items()) refuses(text.text(), "question")
    }

    @TestFactory
    fun `a plan that is not of its form is refused`(): List<DynamicTest> =
        listOf(
            listOf("another version", "\"version\":1", "\"version\":2", "version 2"),
            listOf("a graph too few", "\"report\":{\"sha256\"", "\"repor\":{\"sha256\"", "the passes need"),
            listOf("a negative size", "\"size\":3", "\"size\":-3", "size"),
            listOf("a batch of nothing", "\"batch_size\":4", "\"batch_size\":0", "batch_size"),
            listOf("fractions ignored", "\"name\":\"y\"", "\"ignored\":-100,\"name\":\"y\"", "y ignores -100: it must be int32 or int64"),
            listOf("an ignored class", "\"name\":\"y\"", "\"ignored\":1,\"name\":\"y\"", "ignored"),
            listOf("two weights", "\"name\":\"delta\"", "\"name\":\"weight\"", "weight"),
            listOf("kept vectors without graphs", "\"kept\":[]", "\"kept\":[{\"name\":\"c_i\",\"size\":3}]", "the passes need"),
            listOf("an unknown codec", "\"codecs\":[]", "\"codecs\":[{\"codec\":\"other\"}]", "codec"),
            listOf("three bits", "\"bits\":0", "\"bits\":3", "bits"),
        ).map { (name, from, to, words) ->
            dynamicTest(name) {
                assertTrue(from in written)
                refuses(written.replace(from, to), words)
            }
        }

    @Test
    fun `a plan whose devices keep vectors is read, and has one trip and names of its own`() {
        val graphs = Json.parse(written, "plan")["graphs"]["onnx"].members()
        val all = graphs + (FIRST_KEPT to graphs[REPORT]) + (NEXT_KEPT to graphs[REPORT])
        fun keeping(name: String, second: Any?) =
            with("graphs" to mapOf("onnx" to all), "kept" to listOf(mapOf("name" to name, "size" to 3)), "second" to second)
        assertEquals(listOf(VectorSpec("c_i", 3)), plan(keeping("c_i", null)).kept)
        refuses(keeping("params", null), "a name for each vector")
        val other = Json.parse(written, "plan")["second"].members()
        val both = Json(other, "trip")["graphs"]["onnx"].members()
        val second = other + ("graphs" to mapOf("onnx" to both + (FIRST_KEPT to graphs[REPORT]) + (NEXT_KEPT to graphs[REPORT])))
        refuses(keeping("c_i", second), "one trip")
    }

    @TestFactory
    fun `a plan whose report has a range that cannot be is refused`(): List<DynamicTest> =
        device["refused_layouts"].members().map { (name, layout) -> dynamicTest(name) { refuses(with("report" to layout), "range") } }

    @Test
    fun `a plan with ranges is read`() {
        val layout = device["masking"]["ranged"]["layout"]
        val range = plan(with("report" to layout.value)).report.segments[0].range
        assertEquals(Range.of(layout["segments"].items()[0]["range"]), range)
        assertNotNull(range)
    }

    @Test
    fun `more segments of a report than a coordinator goes over are refused`() {
        val present = plan(written).report.segments.size
        fun withMore(count: Int): String {
            val more = (0 until count).joinToString("") { "{\"name\":\"s$it\",\"size\":1,\"reduction\":\"mean\"}," }
            return written.replace("\"segments\":[", "\"segments\":[$more")
        }
        assertEquals(64, plan(withMore(64 - present)).report.segments.size)
        refuses(withMore(65 - present), "65 segments; there may be 64")
    }

    @TestFactory
    fun `loops have Python's steps`(): List<DynamicTest> =
        given["steps"].items().map { one ->
            val (loop, examples, steps) = one.items()
            dynamicTest("${loop.value} over ${examples.value} examples") {
                assertEquals(steps.size(), stepCount(Loop.of(loop), examples.size()))
            }
        }

    @Test
    fun `what calls of many steps hold counts in the estimate of a plan's memory`() {
        assertEquals(4.0 * (12 + 4 + 8), batchBytes(plan(device["runner"]["plan"].text())))
        assertEquals(2.0 * MOST_CALL_BYTES, batchBytes(plan(device["runner"]["many_plan"].text())))
    }

    @Test
    fun `a batch beyond every integer counts as what it is`() {
        val text = device["runner"]["plan"].text().replace(Regex("\"shape\": ?\\[3]"), "\"shape\":[2147483647]")
        val huge = plan(text.replace(Regex("\"batch_size\": ?[0-9]+"), "\"batch_size\": 2147483647"))
        assertTrue(batchBytes(huge) > 1e18, "${batchBytes(huge)}")
    }

    @Test
    fun `a share that holds out all or nothing is refused`() {
        val examples = device["hold_outs"].items()[0]["examples"].members()
        for (share in listOf<Any>(0L, 1L, -0.1, 1.2, "0.5")) {
            refuses(with("examples" to examples + ("hold_out" to mapOf("share" to share, "side" to "train"))), "share")
        }
        refuses(with("examples" to examples + ("hold_out" to mapOf("share" to 0.5, "side" to "both"))), "side")
    }

    @TestFactory
    fun `a predict graph that divides by data is refused, in training it is none`(): List<DynamicTest> =
        given["divisions"]["refused"].members().map { (name, bytes) ->
            dynamicTest(name) {
                val graph = fromHex(bytes as String)
                val error = assertThrows<PlanRefused> { checkGraph(graph, PREDICT) }
                assertTrue("graph predict: it divides by data" in error.message!!)
                checkGraph(graph, "train.step")
            }
        }

    @TestFactory
    fun `a predict graph may divide by constants`(): List<DynamicTest> =
        given["divisions"]["allowed"].members().map { (name, bytes) ->
            dynamicTest(name) { checkGraph(fromHex(bytes as String), PREDICT) }
        }

    @TestFactory
    fun `a graph with more than plans use is refused`(): List<DynamicTest> =
        device["refused_graphs"].members().map { (name, bytes) ->
            dynamicTest(name) {
                val error = assertThrows<PlanRefused> { checkGraph(fromHex(bytes as String), "train.steps") }
                assertTrue("cannot load graph train.steps" in error.message!!)
            }
        }

    @Test
    fun `a loop over the mask is one of many steps alone, and one over steps that the graph holds may be anywhere`() {
        val graph = fromHex(device["runner"]["many_graphs"]["train.steps"].text())
        checkGraph(graph, "train.steps")
        assertTrue("have no bound" in assertThrows<PlanRefused> { checkGraph(graph, "train.step") }.message!!)
        checkGraph(fromHex(device["loop"].text()), "train.step")
    }

    @Test
    fun `a loop over more inputs than it has is refused`() {
        val scanned = hex(utf8("num_scan_inputs"))
        val graph = { count: String -> fromHex(device["loop"].text().replace("${scanned}1802", "${scanned}18$count")) }
        for (count in listOf("02", "03")) checkGraph(graph(count), "a.steps")
        for (count in listOf("04", "7f")) {
            val error = assertThrows<PlanRefused> { checkGraph(graph(count), "a.steps") }
            assertTrue("and has 3" in error.message!!, error.message)
        }
    }

    @Test
    fun `a graph that is cut is refused`() {
        val graph = fromHex(device["runner"]["graphs"]["train.step"].text())
        for (end in graph.indices step 7) assertThrows<PlanRefused> { Graph.load(graph.copyOf(end), "g") }
    }
}
