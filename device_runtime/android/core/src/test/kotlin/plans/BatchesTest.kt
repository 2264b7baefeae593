package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import dev.muster.device.Json
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.u32
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

/** A device visits the examples that Python's would, in its order and with its noise, and no others. */
class BatchesTest {
    private val device = vectors("device.json")

    /** An unsigned number, written as one or as a text. */
    private fun wide(json: Json) = json.value.toString().toBigInteger().toLong()

    private fun keyOf(one: Json) = // one vector has a round of 2^32
        { label: String, counter: String, words: Int ->
            val numbers = listOf("seed", "round", "slot", "pass", counter).map { wide(one[it]) }
            stream(label.toByteArray(), words, *numbers.toLongArray())
        }

    @TestFactory
    fun `orders are Python's`(): List<DynamicTest> =
        vectors("order.json").items().map { one ->
            dynamicTest("of ${one["examples"].size()} examples in round ${one["round"].value}") {
                val order = argsort(keyOf(one)("muster.order.v1", "epoch", one["examples"].size()))
                assertEquals(one["order"].list { it.size() }, order.asList())
            }
        }

    @TestFactory
    fun `noise is Python's`(): List<DynamicTest> =
        vectors("noise.json").items().map { one ->
            dynamicTest("of ${one["size"].size()} places in round ${one["round"].value}") {
                val key = StreamKey(wide(one["seed"]), one["round"].size(), wide(one["slot"]))
                val found = noise(key, one["pass"].size(), one["step"].size(), one["size"].size())
                assertEquals(one["noise"].list { (it.value as Long).toInt() }, found.asList())
            }
        }

    @TestFactory
    fun `long orders, and noise with a secret, are Python's`(): List<DynamicTest> =
        device["orders"].items().map { one ->
            dynamicTest("seed ${one["seed"].text()}") {
                val key = StreamKey(wide(one["seed"]), one["round"].size(), wide(one["slot"]), fromHex(one["secret"].text()))
                val size = one["size"].size()
                assertEquals(one["order_sha256"].text(), hex(sha256(u32(*permutation(key, 1, 2, size)))))
                assertEquals(one["noise_sha256"].text(), hex(sha256(u32(*noise(key, 1, 2, size)))))
            }
        }

    @Test
    fun `places are sorted by all bits of their words, and places of equal words stay in order`() {
        val words = longArrayOf(Long.MIN_VALUE, 7, 5, 6, 5, Long.MIN_VALUE + 1, 0, 5)
        assertArrayEquals(intArrayOf(6, 2, 4, 7, 3, 1, 0, 5), argsort(words))
        assertArrayEquals(intArrayOf(0), argsort(longArrayOf(-1)))
        assertArrayEquals(intArrayOf(), argsort(longArrayOf()))
    }

    @TestFactory
    fun `batches are of one epoch, and padded with their own first example`(): List<DynamicTest> =
        device["plan"]["steps"].items().flatMap { one ->
            val (given, examples, steps) = one.items()
            val loop = Loop.of(given)
            listOf(1, 3).map { most ->
                dynamicTest("${given.value} over ${examples.value}, $most in a call") {
                    val made = batches(loop, examples.size(), StreamKey(1, 1, 1), 0, most).toList()
                    assertEquals(steps.size(), made.sumOf { it.mask.size / loop.batchSize })
                    for (call in made) {
                        assertTrue(call.mask.size <= most * loop.batchSize)
                        val real = call.mask.count { it == 1f }
                        assertEquals(real, call.indices.take(real).toSet().size)
                        val last = call.indices.takeLast(loop.batchSize)
                        assertTrue(call.indices.drop(real).all { it == last[0] })
                    }
                }
            }
        }

    private fun examplesOf(one: Json): Examples {
        val columns =
            one["examples"]["fields"].list(Field::of).associate { field ->
                val data = fromHex(one["columns"][field.name].text())
                val size = data.size / field.dtype.bytes
                val buffer = littleEndian(data)
                field.name to
                    when (field.dtype) {
                        DType.FLOAT32 -> Column(field.shape, floatsOf(data))
                        DType.INT64 -> Column(field.shape, LongArray(size) { buffer.getLong(8 * it) })
                        DType.INT32 -> Column(field.shape, IntArray(size) { buffer.getInt(4 * it) })
                        DType.UINT8 -> Column(field.shape, data)
                    }
            }
        return Examples(one["count"].size(), columns)
    }

    private fun planOf(examples: Json) =
        decodePlan(device["plan"]["text"].text().toByteArray(), 1).copy(examples = ExamplesPlan.of(examples))

    private fun valueAt(column: Column, place: Int) = java.lang.reflect.Array.get(column.values, place)

    @TestFactory
    fun `examples on the side of a plan are Python's`(): List<DynamicTest> =
        device["hold_outs"].items().map { one ->
            dynamicTest("${one["examples"]["collection"].text()}: ${one["examples"]["hold_out"].value}") {
                val plan = planOf(one["examples"])
                val all = examplesOf(one)
                val expected = one["kept"].list { it.size() }
                checkExamples(plan, all)
                if (expected.isEmpty()) {
                    val error = assertThrows<ExamplesException> { onSide(plan, all, 0) }
                    assertTrue("runs on 0 " in error.message!! && "needs 1" in error.message!!)
                    return@dynamicTest
                }
                val kept = onSide(plan, all, expected.size.toLong())
                assertEquals(expected.size, kept.count)
                for (field in plan.examples.fields) {
                    val from = all.columns.getValue(field.name)
                    val wanted = expected.flatMap { row -> List(field.width) { valueAt(from, row * field.width + it) } }
                    assertEquals(wanted, List(kept.count * field.width) { valueAt(kept.columns.getValue(field.name), it) })
                }
                assertThrows<ExamplesException> { onSide(plan, all, expected.size + 1L) }
            }
        }
}
