/** Derived values of a secure round, the same at both ends: hashes, formats, weights, numbers. Spec: docs/spec/wire.md §8. */
package dev.muster.device.protocol

import dev.muster.device.Json
import dev.muster.device.bitLength
import dev.muster.device.concat
import dev.muster.device.fromHex
import dev.muster.device.joined
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.Codec
import dev.muster.device.plans.CountSketch
import dev.muster.device.plans.LowRank
import dev.muster.device.plans.ReportLayout
import dev.muster.device.plans.Rotation
import dev.muster.device.plans.Segment
import dev.muster.device.plans.Subsample
import dev.muster.device.plans.hasCodecs
import dev.muster.device.plans.unweighted
import dev.muster.device.secagg.FixedPoint
import dev.muster.device.sha256
import dev.muster.device.u64
import dev.muster.device.utf8
import dev.muster.device.wire.SumBounds
import kotlin.math.sqrt
import kotlin.math.truncate

// A sum without a range is sent as two numbers: whole units, and the rest in steps.
private const val METRIC_BITS = 20
private const val METRIC_UNIT = 16f
private const val METRIC_STEP = 1.0 / (1 shl 14)
private const val CLAMPED_BITS = 10
private const val LN2 = 0.6931471805599453

/**
 * The formats of all values that a round sums, as `summedValues` has them, with the noise of each. Plan and release determine
 * them.
 *
 * With noise, all mean segments are treated as one, whatever their ranges: they are scaled down together, and 0 is one of the
 * steps.
 */
internal fun fixedPoints(layout: ReportLayout, bounds: SumBounds): List<FixedPoint> =
    if (bounds.noiseMultiplier > 0) listOf(noisyFormat(layout, bounds)) else unweighted(layout).flatMap { formats(it, bounds) }

/** Those of a segment without noise: two of a sum without a range, which is split, else one. */
private fun formats(segment: Segment, bounds: SumBounds): List<FixedPoint> {
    val range = segment.range
    if (range != null) return listOf(FixedPoint(segment.size, range.bits, range.low, range.high, norm = 0.0, weighted = false))
    if (segment.isMean) {
        val reach = reach(segment, bounds.clipNorm)
        return listOf(FixedPoint(segment.codedSize, bounds.bits, -reach, reach, bounds.clipNorm, weighted = true))
    }
    return listOf(1.0, METRIC_STEP).map { steps(segment.size, METRIC_BITS, it, norm = 0.0, weighted = false) }
}

private fun noisyFormat(layout: ReportLayout, bounds: SumBounds): FixedPoint {
    val means = unweighted(layout).filter { it.isMean }
    val reach = means.maxOfOrNull { reach(it, bounds.clipNorm) } ?: 0.0
    val step = reach / ((1 shl bounds.bits - 1) - 1)
    return steps(means.sumOf { it.codedSize }, bounds.bits, step, bounds.clipNorm, weighted = true)
        .withNoise(bounds.noiseMultiplier, bounds.honest)
}

/** The format whose numbers are all multiples of a step that `bits` can tell, as many below 0 as not. */
private fun steps(size: Int, bits: Int, step: Double, norm: Double, weighted: Boolean): FixedPoint {
    val half = 1 shl bits - 1
    return FixedPoint(size, bits, -half * step, (half - 1) * step, norm, weighted)
}

/** The greatest absolute value in a mean segment; rotated values exceed it with probability below 2⁻¹⁰. */
private fun reach(segment: Segment, clip: Double): Double {
    val rotation = segment.codecs.lastOrNull { it !is Subsample } as? Rotation ?: return clip
    val exponent = (CLAMPED_BITS + 1 + bitLength(segment.codedSize)) * LN2
    return clip * minOf(1.0, sqrt(2 * exponent / rotation.block))
}

/**
 * What a round sums of the values of a report: sums without a range in two parts.
 *
 * With noise there are no metrics, as nothing would hide them.
 */
internal fun summedValues(layout: ReportLayout, bounds: SumBounds, values: FloatArray): FloatArray {
    val noisy = bounds.noiseMultiplier > 0
    val summed = FloatArray(fixedPoints(layout, bounds).sumOf { it.size })
    var (begin, end) = 0 to 0
    for (segment in unweighted(layout)) {
        val size = segment.codedSize
        if (segment.isMean || (segment.range != null && !noisy)) {
            values.copyInto(summed, end, begin, begin + size)
            end += size
        } else if (!noisy) {
            for (place in 0 until size) {
                val units = truncate(values[begin + place] / METRIC_UNIT)
                summed[end + place] = units
                summed[end + size + place] = values[begin + place] - METRIC_UNIT * units
            }
            end += 2 * size
        }
        begin += size
    }
    return summed
}

/** The greatest weight of a device: 1 when all devices count equally. */
internal fun greatestWeight(layout: ReportLayout, bounds: SumBounds): Long = if (layout.byExamples) bounds.maxExamples else 1

/** The name of a task in an invitation, 32 bytes. */
internal fun taskHash(task: String): ByteArray = sha256(utf8(task))

/** The number of one attempt at a round; it grows with both, so that no attempt can be mistaken for an older one. */
internal fun sessionNumber(round: Int, attempt: Long): Long = round.toLong() shl 32 or attempt

/** The greatest session number of a round: a device that answered it takes part in no other attempt. */
internal fun lastSessionNumber(round: Int): Long = sessionNumber(round, 0xffff_ffff)

/** A hash of the model, 32 bytes, that masks depend on: with another plan or checkpoint they do not cancel out. */
internal fun modelHash(plan: BlobRef, checkpoint: BlobRef): ByteArray = sha256(fromHex(plan.sha256), fromHex(checkpoint.sha256))

/**
 * The digest of a report layout, 32 bytes. With codecs it covers the task's seed, which keys them.
 *
 * The layout is compact JSON, with its members in the specification's order. Ranges are covered as bytes, since languages write
 * the same number in different ways.
 */
internal fun layoutHash(layout: ReportLayout, seed: Long): ByteArray {
    val members =
        mapOf(
            "segments" to layout.segments.map(::members),
            "weighting" to if (layout.byExamples) "examples" else "uniform",
            "bounded" to layout.bounded,
            "bits" to layout.bits,
        )
    val key = if (hasCodecs(layout)) u64(seed) else ByteArray(0)
    val ranges =
        layout.segments.mapIndexedNotNull { index, segment ->
            segment.range?.let { concat(u64(index.toLong(), it.low.toRawBits(), it.high.toRawBits()), byteArrayOf(it.bits.toByte())) }
        }
    return sha256(utf8(Json.write(members)), key, joined(ranges))
}

private fun members(segment: Segment): Map<String, Any> =
    mapOf(
        "name" to segment.name,
        "size" to segment.size,
        "reduction" to if (segment.isMean) "mean" else "sum",
        "labels" to segment.labels,
        "codecs" to segment.codecs.map(::members),
    )

private fun members(codec: Codec): Map<String, Any> =
    when (codec) {
        is Rotation -> mapOf("codec" to "rotation", "block" to codec.block)
        is Subsample -> mapOf("codec" to "subsample", "kept" to codec.kept)
        is CountSketch -> mapOf("codec" to "count_sketch", "rows" to codec.rows, "columns" to codec.columns)
        is LowRank -> {
            val matrices = codec.matrices.map { listOf(it.rows, it.columns) }
            mapOf("codec" to "low_rank", "rank" to codec.rank, "matrices" to matrices)
        }
    }
