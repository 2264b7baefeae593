package dev.muster.device.plans

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.NonFiniteReport
import dev.muster.device.bytesOf
import dev.muster.device.concat
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.sha256
import dev.muster.device.u64
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

/** Vectors in files, codecs and reports have Python's bits. */
class ReportTest {
    private val device = vectors("device.json")

    private fun floats(digits: Json) = floatsOf(fromHex(digits.text()))

    private fun keyOf(one: Json) = RoundKey(one["seed"].text().toLong(), one["round"].size())

    @TestFactory
    fun `vectors are read, and one vector is written, as by safetensors`(): List<DynamicTest> =
        device["checkpoints"].items().map { one ->
            val named = one["vectors"].map { vector -> vector.list { it.number().toFloat() }.toFloatArray() }
            dynamicTest(named.keys.joinToString()) {
                val data = fromHex(one["bytes"].text())
                val specs = named.map { (name, vector) -> VectorSpec(name, vector.size) }
                val found = decodeVectors(data, specs)
                for ((name, vector) in named) assertArrayEquals(vector, found.getValue(name))
                if (specs.size == 1) assertEquals(one["bytes"].text(), hex(encodeVector(specs[0].name, found.getValue(specs[0].name))))
                assertThrows<FormatException> { decodeVectors(data, listOf(VectorSpec("other", 1))) }
                assertThrows<FormatException> { decodeVectors(data, specs.map { it.copy(size = it.size + 1) }) }
            }
        }

    @Test
    fun `a checkpoint that is cut anywhere is refused`() {
        val data = fromHex(device["checkpoints"].items()[0]["bytes"].text())
        val specs = listOf(VectorSpec("report", 7))
        for (end in data.indices) assertThrows<FormatException> { decodeVectors(data.copyOf(end), specs) }
        assertThrows<FormatException> { decodeVectors(data + 0, specs) }
    }

    @Test
    fun `vectors that overlap, or leave a gap, are refused`() {
        fun file(vararg offsets: List<Int>): ByteArray {
            val named = listOf("a", "b").zip(offsets).toMap()
            val header = utf8(Json.write(named.mapValues { mapOf("dtype" to "F32", "shape" to listOf(1), "data_offsets" to it.value) }))
            return concat(u64(header.size.toLong()), header, ByteArray(8))
        }
        val specs = listOf(VectorSpec("a", 1), VectorSpec("b", 1))
        assertEquals(2, decodeVectors(file(listOf(4, 8), listOf(0, 4)), specs).size)
        assertThrows<FormatException> { decodeVectors(file(listOf(0, 4), listOf(0, 4)), specs) }
        assertThrows<FormatException> { decodeVectors(file(listOf(0, 4), listOf(2, 6)), specs) }
    }

    @TestFactory
    fun `a report has Python's bits`(): List<DynamicTest> =
        device["reports"].items().mapIndexed { place, one ->
            dynamicTest("$place, of weight ${one["weight"].number()}") {
                val layout = ReportLayout.of(one["layout"])
                val names = mapOf("delta" to "delta", "train.metrics" to "metrics", "plain.metrics" to "more_metrics")
                val parts = names.mapValues { floats(one[it.value]) }
                val weight = one["weight"].number()
                val make = { concatenate(layout, parts, weight, one["clip"].number()) }
                val expected = one.nullable("values")
                if (expected == null) {
                    assertThrows<NonFiniteReport> { make() }
                } else {
                    assertEquals(expected.text(), hex(bytesOf(make())))
                    assertEquals(one["weighed"].text(), hex(bytesOf(weigh(layout, make(), weight))))
                }
            }
        }

    @TestFactory
    fun `values travel as Python's bits`(): List<DynamicTest> =
        device["codecs"].items().map { one ->
            dynamicTest("${one["size"].size()} values") {
                val coded = encode(one["codecs"].list(Codec::of), floats(one["values"]), keyOf(one), one["segment"].size())
                assertEquals(one["coded_sha256"].text(), hex(sha256(bytesOf(coded))))
            }
        }

    @Test
    fun `low-rank factors are Python's up to rounding`() {
        val one = device["low_rank"]
        val coded = encode(one["codecs"].list(Codec::of), floats(one["values"]), keyOf(one), one["segment"].size())
        assertArrayEquals(floats(one["coded"]), coded, 1e-4f)
    }

    @TestFactory
    fun `a codec that does not fit its 100 values is refused`(): List<DynamicTest> =
        listOf(
            Rotation(12) to "power of two",
            Rotation(0) to "power of two",
            Subsample(101) to "at most as many",
            CountSketch(3, 34) to "at most as many",
            CountSketch(17, 1) to "17 rows; there may be 16",
            LowRank(2, listOf(Matrix(9, 11))) to "99 values",
        ).map { (codec, words) ->
            dynamicTest("$codec") {
                val error = assertThrows<FormatException> { codedSize(listOf(codec), 100) }
                assertTrue(words in error.message!!, error.message)
            }
        }

    @Test
    fun `more codecs of a segment than a device goes through are refused`() {
        assertEquals(2, codedSize(List(8) { Subsample(2) }, 100))
        assertThrows<FormatException> { codedSize(List(9) { Subsample(2) }, 100) }
    }

    @Test
    fun `a level of the loss is counted from where it is reached`() {
        val counts = countLosses(floatArrayOf(2f, 3f), floatArrayOf(4f, Float.NaN))
        assertEquals(18f, counts.sum()) // 2^-8 … 1.5 · 2^-1, 1 and 1.5
        assertEquals(1f, counts[17])
        assertEquals(0f, counts[18])
    }
}
