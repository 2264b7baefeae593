package dev.muster.device.secagg

import dev.muster.device.Json
import dev.muster.device.KEY_BYTES
import dev.muster.device.Keystream
import dev.muster.device.PairKey
import dev.muster.device.fromHex
import dev.muster.device.fromLittleEndian
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.u64
import dev.muster.device.values
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows
import java.math.BigInteger
import java.util.BitSet

/** The arithmetic of secure aggregation is Python's. */
class SecaggTest {
    private val device = vectors("device.json")
    private val wycheproof = vectors("secagg/wycheproof.json")

    @TestFactory
    fun `a key that SA1 must refuse gives no secret`(): List<DynamicTest> =
        wycheproof["x25519"].items().map { it.items() }.map { row ->
            val (secret, point, shared) = row.subList(1, 4).map { fromHex(it.text()) }
            dynamicTest("vector ${row[0].value}") {
                if (row[5].flag() || fromLittleEndian(point) >= BigInteger.ONE.shiftLeft(255) - 19.toBigInteger()) {
                    assertThrows<BadPoint> { agree(PairKey(secret), point) }
                } else {
                    assertArrayEquals(shared, agree(PairKey(secret), point))
                }
            }
        }

    @Test
    fun `any t shares give a secret back`() {
        val drawn = ArrayDeque(listOf(77L, 154L))
        val shares = split(12345.toBigInteger(), 5, 3) { littleEndian(drawn.removeLast(), it) }
        val ranks = listOf(2, 3, 5).map { it.toBigInteger() }
        val secret =
            ranks.fold(BigInteger.ZERO) { sum, x ->
                val others = ranks - x
                val (top, below) = others.reduce(BigInteger::times) to others.map { it - x }.reduce(BigInteger::times)
                sum + shares[x.toInt() - 1] * top * below.mod(PRIME).modInverse(PRIME)
            }
        assertEquals(12345.toBigInteger(), secret.mod(PRIME))
    }

    @Test
    fun `a mask key is shared out as the integer that X25519 multiplies by`() {
        val secret = ByteArray(KEY_BYTES) { -1 }
        assertEquals(BigInteger.ONE.shiftLeft(255) - 8.toBigInteger(), scalarOf(secret))
        assertEquals(BigInteger.ONE.shiftLeft(254), scalarOf(ByteArray(KEY_BYTES)))
        assertArrayEquals(PairKey(secret).publicKey, PairKey(littleEndian(scalarOf(secret), KEY_BYTES)).publicKey)
    }

    @TestFactory
    fun `packed words are Python's`(): List<DynamicTest> =
        device["packings"].items().map { one ->
            dynamicTest(one["name"].text()) {
                val segments = one["segments"].list(::segment)
                val vector = one.nullable("vector")?.list { it.number().toFloat() }?.toFloatArray()
                val words =
                    pack(
                        segments, vector ?: values(segments.sumOf { it.format.size }), one["weight"].count(), one["w_max"].count(),
                    ) { size -> ByteArray(size) { 7 } }
                assertEquals(one["words"].size(), words.size)
                assertEquals(one["sha256"].text(), hex(sha256(u64(*words))))
            }
        }

    private fun segment(row: Json): PackedSegment {
        val (size, fieldBits, inBits, low, high) = row.items()
        val (norm, weighted, noise) = row.items().drop(5)
        return PackedSegment(
            FixedPoint(size.size(), inBits.size(), low.number(), high.number(), norm.number(), weighted.flag(), noise.count()),
            fieldBits.size(),
        )
    }

    @Test
    fun `fields that cannot hold the sum, and ranges that make no sense, are refused`() {
        val good = FixedPoint(size = 10, inBits = 10, low = -512.0, high = 511.0, norm = 300.0, weighted = true, noise = 900)
        checkHeadroom(listOf(PackedSegment(good, 24)), 100)
        val bad =
            listOf(
                good.copy(inBits = 0), good.copy(inBits = 21), good.copy(low = 0.5), good.copy(high = -0.5), good.copy(norm = -1.0),
                good.copy(low = 0.0, high = 1e-41), good.copy(low = 0.0, high = 1e41), good.copy(norm = 0.0),
                good.copy(low = -512.5), good.copy(noise = (1 shl 26) + 1),
            )
        for (format in bad) assertThrows<HeadroomError>(format.toString()) { checkHeadroom(listOf(PackedSegment(format, 24)), 100) }
        checkHeadroom(listOf(PackedSegment(good.copy(noise = 1 shl 26), 21)), 100)
        assertThrows<HeadroomError> { checkHeadroom(listOf(PackedSegment(good.copy(noise = 1 shl 26), 20)), 100) }
        for (bits in listOf(9, 16, 33, 255)) assertThrows<HeadroomError> { checkHeadroom(listOf(PackedSegment(good, bits)), 100) }
        checkHeadroom(listOf(PackedSegment(good.copy(inBits = 1, low = -1.0, high = 0.0, noise = 0), 32)), 0xffff_ffff)
    }

    @Test
    fun `a number that falls on a threshold of the noise needs further bits`() {
        val table = Skellam(4)
        var (below, above) = 0L to Long.MAX_VALUE // without the bit of the sign: 0 stands for 0, the last for more
        while (above - below > 1) {
            val middle = below + (above - below) / 2
            if (table.number(middle shl 1) == 0) below = middle else above = middle
        }
        assertEquals(Skellam.UNDECIDED, table.number(above shl 1))
        assertEquals(0, table.exactly(above shl 1, 0))
        assertEquals(1, table.exactly(above shl 1, -1))
        assertEquals(-1, table.exactly(above shl 1 or 1, -1))
        assertEquals(1, table.number((above shl 1) + 2))
        val words = LongArray(2)
        assertEquals(listOf(1), table.addTo(words, 0, 8, longArrayOf((above shl 1) + 3, above shl 1), 2))
        assertArrayEquals(longArrayOf(-256, 0), words)
    }

    @Test
    fun `noise of a variance that no table has is refused`() {
        for (variance in listOf(0L, (1L shl 26) + 1)) assertThrows<HeadroomError> { Skellam(variance) }
        assertEquals(0, Skellam(1L shl 26).number(0))
    }

    @Test
    fun `masks of both signs cancel out, over several chunks`() {
        val before = LongArray(150_001) { it * 2_654_435_761L }
        val words = before.copyOf()
        val key = ByteArray(KEY_BYTES) { 3 }
        addMasks(words, listOf(Mask(key, isAdded = true)))
        val stream = ByteArray(8 * words.size).also { Keystream(key).fill(it) }
        assertArrayEquals(stream, u64(*LongArray(words.size) { words[it] - before[it] }))
        addMasks(words, listOf(Mask(key, isAdded = false)))
        assertArrayEquals(before, words)
    }

    @Test
    fun `a sum of so many has as many honest devices as Python says`() {
        for (row in device["least_honest"].items()) {
            val (minSum, nMax, honest) = row.list { it.count() }
            assertEquals(honest, leastHonest(minSum, nMax))
        }
    }

    @TestFactory
    fun `rosters are as strong as Python says`(): List<DynamicTest> =
        device["parameters"].items().map { it.items() }.map { row ->
            val (n, k, t) = row.take(3).map { it.size() }
            dynamicTest("n = $n, k = $k, t = $t: ${row[3].flag()}") {
                if (row[3].flag()) checkParameters(n, k, t) else assertThrows<PolicyViolation> { checkParameters(n, k, t) }
            }
        }

    @Test
    fun `bitmaps of any size survive their bytes, and name no others`() {
        for (n in listOf(0, 1, 7, 8, 9, 33)) {
            val all = BitSet().apply { set(0, n) }
            assertEquals(all, Reader(bitmap(all, n), "bitmap").bitmap(n))
            assertEquals(BitSet(), Reader(bitmap(BitSet(), n), "bitmap").bitmap(n))
        }
        assertThrows<Malformed> { Reader(byteArrayOf(2), "bitmap").bitmap(1) }
        assertThrows<Malformed> { Reader(byteArrayOf(1), "bitmap").bitmap(9) }
        assertThrows<Malformed> { Reader(ByteArray(100), "bitmap").bitmap(Int.MAX_VALUE) }
    }

    @Test
    fun `integers of any size survive their bytes`() {
        for (value in listOf(BigInteger.ZERO, 255.toBigInteger(), PRIME - BigInteger.ONE)) {
            assertEquals(value, fromLittleEndian(littleEndian(value, 32)))
        }
        val reader = Reader(u64(-1, 1L shl 63) + ByteArray(8) { -1 }, "message")
        assertEquals(listOf(ULong.MAX_VALUE, 1uL shl 63), listOf(reader.u64(), reader.u64()))
        assertEquals(0xffff_ffff, reader.u32())
        assertThrows<Malformed> { reader.size() }
    }
}
