package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.PlanRefused
import dev.muster.device.RuntimeFailed
import dev.muster.device.Stop
import dev.muster.device.fromHex
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows

/** Graphs read and write tensors in place, and nothing that does not fit. */
class EngineTest {
    /** Hands `broadcast.params` (3) on as `next.params`. */
    private val graph = Graph.load(fromHex(vectors("device.json")["runner"]["graphs"]["train.begin"].text()), "train.begin")

    private fun run(input: Tensor, output: Tensor) = graph.run(mapOf("broadcast.params" to input), mapOf("next.params" to output))

    @Test
    fun `outputs are written where they are wanted`() {
        val values = floatArrayOf(1f, -2f, 0.5f)
        Tensor(DType.FLOAT32, listOf(3)).use {
            run(flatTensor(values), it)
            assertArrayEquals(values, it.floats())
        }
    }

    @Test
    fun `tensors of another size or type fail, and an empty one is no error of its own`() {
        val three = flatTensor(FloatArray(3) { 1f })
        for (output in listOf(Tensor(DType.FLOAT32, listOf(4)), Tensor(DType.INT32, listOf(3)), Tensor(DType.FLOAT32, listOf(0)))) {
            assertThrows<RuntimeFailed> { run(three, output) }
            assertEquals(output.size, java.lang.reflect.Array.getLength(output.read()))
        }
        assertThrows<RuntimeFailed> { run(Tensor(DType.UINT8, listOf(3)), Tensor(DType.FLOAT32, listOf(3))) }
        assertThrows<RuntimeFailed> { run(Tensor(DType.FLOAT32, listOf(3, 1)), Tensor(DType.FLOAT32, listOf(3))) }
    }

    @Test
    fun `a graph that is stopped runs no more, also when it is freed`() {
        graph.stop()
        assertThrows<RuntimeFailed> { run(flatTensor(FloatArray(3)), flatTensor(FloatArray(3))) }
        graph.close()
        graph.stop()
    }

    @Test
    fun `a graph stays loaded for the next session, until it fails or there are too many`() {
        val bytes = fromHex(vectors("device.json")["runner"]["graphs"]["train.begin"].text())
        val (loaded, read) = LoadedGraphs(1) to ArrayList<String>()

        fun session(sha256: String, work: (Graph) -> Unit = {}) {
            val refs = mapOf("train.begin" to BlobRef(sha256, bytes.size.toLong()))
            withGraphs(refs, { bytes.also { read += sha256 } }, Stop(), loaded) { work(it.getValue("train.begin")) }
        }

        val three = flatTensor(FloatArray(3))
        fun Graph.run(size: Int) = run(mapOf("broadcast.params" to flatTensor(FloatArray(size))), mapOf("next.params" to three))

        repeat(2) { session("a") { it.run(3) } }
        assertEquals(listOf("a"), read)
        session("b")
        session("a")
        assertEquals(listOf("a", "b", "a"), read)
        assertThrows<RuntimeFailed> { session("a") { it.run(2) } }
        session("a")
        assertEquals(listOf("a", "b", "a", "a"), read)
    }

    @Test
    fun `a plan that asks for more memory than there is is refused`() {
        assertThrows<PlanRefused> { Tensor(DType.INT64, listOf(Int.MAX_VALUE)) }
    }

    @Test
    fun `rows of a column of any type are copied in their order`() {
        val columns =
            listOf(
                Column(listOf(2), floatArrayOf(0f, 1f, 2f, 3f, 4f, 5f)),
                Column(listOf(2), longArrayOf(0, 1, 2, 3, 4, 5)),
                Column(listOf(2), intArrayOf(0, 1, 2, 3, 4, 5)),
                Column(listOf(2), byteArrayOf(0, 1, 2, 3, 4, 5)),
            )
        for (column in columns) {
            Tensor(column.dtype, listOf(3, 2)).use {
                it.writeRows(column, 2, intArrayOf(2, 0, 2))
                val found = it.read()
                val numbers = List(6) { place -> (java.lang.reflect.Array.get(found, place) as Number).toInt() }
                assertEquals(listOf(4, 5, 0, 1, 4, 5), numbers)
            }
        }
    }
}
