/** Random streams, which depend on a key alone: whoever has the key draws the same words. Spec: docs/spec/plan.md §4. */
package dev.muster.device.plans

import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.u64

private const val ROUNDS = 10
private const val LEFT_FACTOR = -0x2d18b8f11eb3936dL
private const val RIGHT_FACTOR = -0x35a57d9c6aedeea9L
private const val LEFT_STEP = -0x61c8864680b583ebL
private const val RIGHT_STEP = -0x4498517a7b3558c5L
private const val LOWER = 0xffffffffL

/** The first `size` words of the stream under a key of two words: Philox4x64 with 10 rounds, whose counter starts at 1. */
internal fun philox(left: Long, right: Long, size: Int): LongArray {
    val words = LongArray((size + 3) / 4 * 4)
    for (start in words.indices step 4) fill(words, start, left, right)
    return if (words.size == size) words else words.copyOf(size)
}

/** The block of four words at `start`. */
private fun fill(words: LongArray, start: Int, left: Long, right: Long) {
    var a = start / 4 + 1L
    var b = 0L
    var c = 0L
    var d = 0L
    for (round in 0 until ROUNDS) {
        val upperA = multiplyHigh(a, LEFT_FACTOR)
        val upperC = multiplyHigh(c, RIGHT_FACTOR)
        val lowerA = a * LEFT_FACTOR
        val lowerC = c * RIGHT_FACTOR
        a = upperC xor b xor (left + round * LEFT_STEP)
        c = upperA xor d xor (right + round * RIGHT_STEP)
        b = lowerC
        d = lowerA
    }
    words[start] = a
    words[start + 1] = b
    words[start + 2] = c
    words[start + 3] = d
}

/** The upper word of the product of two unsigned words. Java has it since 18, and Android since API 35. */
private fun multiplyHigh(a: Long, b: Long): Long {
    val aHigh = a ushr 32
    val bHigh = b ushr 32
    val aLow = a and LOWER
    val bLow = b and LOWER
    val middle = aHigh * bLow + (aLow * bLow ushr 32)
    val other = aLow * bHigh + (middle and LOWER)
    return aHigh * bHigh + (middle ushr 32) + (other ushr 32)
}

/** The first 64-bit words of the stream that a label and numbers, unsigned, name. */
internal fun stream(label: ByteArray, words: Int, vararg numbers: Long): LongArray {
    val digest = littleEndian(sha256(label, u64(*numbers)))
    return philox(digest.getLong(0), digest.getLong(8), words)
}
