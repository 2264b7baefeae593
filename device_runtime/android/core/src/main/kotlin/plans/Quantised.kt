/** Reports in few bits per value, for uploads without masks. Spec: docs/spec/plan.md §5.2. */
package dev.muster.device.plans

import dev.muster.device.NonFiniteReport
import dev.muster.device.littleEndian
import dev.muster.device.utf8
import java.nio.ByteBuffer

private val LABEL = utf8("muster.quantise.v1")

/** Values of a block, which share their least value and their step. */
private const val BLOCK = 1024
private const val FLOAT_BYTES = 4
private const val TWO_TO_32 = 4294967296.0

/** The body of an unencrypted upload: a weighted report (L), in the bits of its layout. Throws [NonFiniteReport]. */
internal fun encodeReport(layout: ReportLayout, report: FloatArray, key: StreamKey): ByteArray =
    if (layout.bits == 0) encodeVector("report", report) else quantise(layout, report, key)

/** The bytes of an unencrypted upload, without the header of a float32 file. */
internal fun uploadBytes(layout: ReportLayout): Long = layout.segments.sumOf { bytesOf(layout, it) }

private fun isQuantised(layout: ReportLayout, segment: Segment) = layout.bits != 0 && segment.isMean && segment.range == null

private fun bytesOf(layout: ReportLayout, segment: Segment): Long {
    val size = segment.codedSize.toLong()
    if (!isQuantised(layout, segment)) return FLOAT_BYTES * size
    return 2 * FLOAT_BYTES * ((size + BLOCK - 1) / BLOCK) + (size * layout.bits + 7) / 8
}

private fun quantise(layout: ReportLayout, report: FloatArray, key: StreamKey): ByteArray {
    val body = littleEndian(ByteArray(Math.toIntExact(uploadBytes(layout))))
    var begin = 0
    layout.segments.forEachIndexed { index, segment ->
        val end = begin + segment.codedSize
        if (isQuantised(layout, segment)) {
            val words = stream(LABEL, (segment.codedSize + 1) / 2, key.seed, key.round.toLong(), key.slot, index.toLong())
            putCodes(body, report.copyOfRange(begin, end), words, layout.bits)
        } else {
            for (place in begin until end) body.putFloat(report[place])
        }
        begin = end
    }
    return body.array()
}

/** Put the least value and the step of every block, then all codes; the first code is in the lowest bits of a byte. */
private fun putCodes(body: ByteBuffer, values: FloatArray, words: LongArray, bits: Int) {
    val most = (1 shl bits) - 1
    val codes = ByteArray((values.size * bits.toLong() + 7 ushr 3).toInt())
    for (begin in values.indices step BLOCK) {
        val end = minOf(begin + BLOCK, values.size)
        var low = values[begin]
        var high = low
        for (place in begin until end) {
            low = minOf(low, values[place])
            high = maxOf(high, values[place])
        }
        val step = ((high.toDouble() - low) / most).toFloat()
        if (!step.isFinite()) throw NonFiniteReport("the values of a block are too far apart to be quantised")
        body.putFloat(low).putFloat(step)
        val width = if (step > 0) step.toDouble() else 1.0
        for (place in begin until end) {
            val uniform = (words[place / 2] ushr 32 * (place % 2) and 0xffffffffL) / TWO_TO_32
            val code = minOf(Math.floor((values[place].toDouble() - low) / width + uniform).toInt(), most)
            val bit = place * bits
            codes[bit / 8] = (codes[bit / 8].toInt() or (code shl bit % 8)).toByte()
        }
    }
    body.put(codes)
}
