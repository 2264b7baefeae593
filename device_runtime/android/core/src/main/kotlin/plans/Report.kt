/**
 * A device's report: one float32 vector of named segments. Reports are only ever summed. Spec: docs/spec/plan.md §5.
 *
 * A device keeps its report unweighted until it sends it: the values (V), which are all segments but the weight, and the weight
 * beside them. The report is weighted once: here before an unencrypted upload, or in packing when it is masked.
 */
package dev.muster.device.plans

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.NonFiniteReport

private const val WEIGHT = "weight"

/** The most segments of a report: a coordinator goes over all of them for each report that comes. */
private const val MOST_SEGMENTS = 64

/** The vector of a broadcast that holds the bound of bounded reports. */
internal const val CLIP = "clip"

/** Twice the relative error that rounding to float32 may add to a norm. */
private const val ROUNDING = 1.0 / (1 shl 23)
private const val MOST_RANGE_BITS = 20

/** The widths of a range: its steps, too, are then normal numbers in float32. */
private val WIDTHS = 1e-30..1e30

/** Bits of a value in an unencrypted upload; 0 is float32. */
private val BITS = setOf(0, 1, 2, 4, 8)

/** The numbers from [low] to [high], 0 among them, in 2^[bits] − 1 equal steps. */
internal data class Range(val low: Double, val high: Double, val bits: Int) {
    init {
        val holds = low <= 0 && 0 <= high && high - low in WIDTHS && bits in 1..MOST_RANGE_BITS
        if (!holds) throw FormatException("a range from $low to $high of $bits bits cannot be")
    }

    companion object {
        fun of(json: Json): Range = Range(json["low"].number(), json["high"].number(), json["bits"].size())
    }
}

/** One part of the report: [size] values, as a graph or a pass makes them; a mean, or else a sum. */
internal data class Segment(
    val name: String,
    val size: Int,
    val isMean: Boolean,
    val labels: List<String> = emptyList(),
    val codecs: List<Codec> = emptyList(),
    val range: Range? = null,
) {
    init {
        if (codecs.isNotEmpty() && !isMean) throw FormatException("segment $name is a sum of metrics, which no codec may change")
    }

    /** Values that travel. */
    val codedSize: Int = codedSize(codecs, size)

    companion object {
        fun of(json: Json): Segment =
            Segment(
                json["name"].text(),
                json["size"].size(),
                json["reduction"].text(Regex("mean|sum")) == "mean",
                json.optional("labels")?.list(Json::text) ?: emptyList(),
                json.optional("codecs")?.list(Codec::of) ?: emptyList(),
                json.optional("range")?.let(Range::of),
            )
    }
}

/**
 * The segments of a report, in order. Exactly one of them is the device's weight.
 *
 * [byExamples]: whether a device weighs as much as it has examples; else 1. [bounded]: whether all mean segments together keep to
 * a norm. [bits] of a value of a mean segment without a range, in an unencrypted upload; 0 for float32.
 */
internal data class ReportLayout(
    val segments: List<Segment>,
    val byExamples: Boolean,
    val bounded: Boolean = false,
    val bits: Int = 0,
) {
    /** L, the length of the report vector. */
    val size: Int

    init {
        checkWeight(segments)
        for (segment in segments) checkRange(segment)
        val sums = segments.count { !it.isMean }
        val mayGrow = bits != 0 || segments.any { segment -> segment.codecs.any { it is CountSketch } }
        if (bounded && (byExamples || sums != 1 || mayGrow)) {
            throw FormatException("a bounded report weighs 1, has no sums, and is neither quantised nor sketched")
        }
        val whole = segments.sumOf { it.codedSize.toLong() }
        if (whole > Int.MAX_VALUE) throw FormatException("a report of $whole values is too long")
        size = whole.toInt()
    }

    private fun checkRange(segment: Segment) {
        if (segment.range == null) return
        if (bounded || segment.codecs.isNotEmpty() || segment.name == WEIGHT || (segment.isMean && byExamples)) {
            throw FormatException("segment ${segment.name} has a range: none has the weight, what is clipped, coded or weighted")
        }
    }

    companion object {
        fun of(json: Json): ReportLayout =
            ReportLayout(
                json["segments"].list(Segment::of),
                json["weighting"].text(Regex("examples|uniform")) == "examples",
                json.optional("bounded")?.flag() ?: false,
                json.optional("bits")?.run { size().takeIf { it in BITS } ?: wrong("one of $BITS") } ?: 0,
            )
    }
}

private fun checkWeight(segments: List<Segment>) {
    if (segments.size > MOST_SEGMENTS) {
        throw FormatException("a report has ${segments.size} segments; there may be $MOST_SEGMENTS")
    }
    val names = segments.map { it.name }
    val weight = segments.find { it.name == WEIGHT }
    if (names.toSet().size < names.size || weight == null || weight.size != 1 || weight.isMean) {
        throw FormatException("segments must be distinct and hold one $WEIGHT, a single value that is summed: $names")
    }
}

/** Whether segments have codecs. Then only reports that are encoded with the same key add up. */
internal fun hasCodecs(layout: ReportLayout): Boolean = layout.segments.any { it.codecs.isNotEmpty() }

/** The outputs of the report graph, by name, encoded by the codecs. */
internal fun encodeMeans(layout: ReportLayout, means: Map<String, FloatArray>, key: RoundKey): Map<String, FloatArray> {
    val coded = HashMap<String, FloatArray>()
    layout.segments.forEachIndexed { index, segment ->
        val values = means[segment.name]
        if (values?.size == segment.size) coded[segment.name] = encode(segment.codecs, values, key, index)
    }
    return coded
}

/** The segments of the values (V), which are kept until the report is weighted: all but the weight. */
internal fun unweighted(layout: ReportLayout): List<Segment> = layout.segments.filter { it.name != WEIGHT }

/** The weight of a device with so many examples. */
internal fun weightOf(layout: ReportLayout, examples: Int): Double = if (layout.byExamples) examples.toDouble() else 1.0

/** The name of the segment that holds a pass's metric sums. */
internal fun metricsSegment(pass: String): String = "$pass.metrics"

/**
 * The unweighted values (V) of a report from its coded segments by name, each within its segment's range; zeros if bounded and
 * not finite.
 *
 * `clip` is the bound that devices received, if the report is bounded: the whole report is clipped to it in float64. Throws
 * [NonFiniteReport] when a segment is missing, of another size, or not finite once it has the weight.
 */
internal fun concatenate(
    layout: ReportLayout,
    parts: Map<String, FloatArray>,
    weight: Double,
    clip: Double = Double.POSITIVE_INFINITY,
): FloatArray {
    val values = FloatArray(layout.size - 1)
    var start = 0
    for (segment in unweighted(layout)) {
        val part = parts[segment.name]
        if (part?.size != segment.codedSize) {
            throw NonFiniteReport("segment ${segment.name} must be float32[${segment.codedSize}]")
        }
        if (!staysFinite(part, factorOf(segment, weight))) {
            if (layout.bounded) return FloatArray(values.size)
            throw NonFiniteReport("segment ${segment.name} holds a non-finite value")
        }
        part.copyInto(values, start)
        segment.range?.let { clamp(values, start, start + part.size, it) }
        start += part.size
    }
    return if (layout.bounded) held(values, clip) else values
}

private fun staysFinite(values: FloatArray, factor: Float): Boolean {
    for (value in values) {
        if (!(value * factor).isFinite()) return false
    }
    return true
}

private fun clamp(values: FloatArray, begin: Int, end: Int, range: Range) {
    val least = range.low.toFloat()
    val most = range.high.toFloat()
    for (place in begin until end) values[place] = minOf(maxOf(values[place], least), most)
}

/** The l2 norm of values, computed in float64. */
internal fun normOf(values: FloatArray): Double {
    var square = 0.0
    for (value in values) square += value.toDouble() * value
    return Math.sqrt(square)
}

/** Finite values, scaled down in place to an l2 norm of at most `clip`. */
private fun held(values: FloatArray, clip: Double): FloatArray {
    val norm = normOf(values)
    if (norm > clip) {
        val factor = clip / norm * (1 - ROUNDING)
        for (place in values.indices) values[place] = (values[place] * factor).toFloat()
    }
    return values
}

/** The report (L) for an unencrypted upload: mean segments times the weight, and the weight itself. */
internal fun weigh(layout: ReportLayout, values: FloatArray, weight: Double): FloatArray {
    val report = FloatArray(layout.size)
    var from = 0
    var to = 0
    for (segment in layout.segments) {
        if (segment.name == WEIGHT) {
            report[to++] = weight.toFloat()
            continue
        }
        val factor = factorOf(segment, weight)
        repeat(segment.codedSize) { report[to++] = values[from++] * factor }
    }
    return report
}

private fun factorOf(segment: Segment, weight: Double): Float = if (segment.isMean) weight.toFloat() else 1f

/** The name of the segment that counts devices by their loss. */
internal const val LOSSES = "losses"
private const val LEAST_OCTAVE = -8
private const val OCTAVES = 32

/** The losses that are looked for, ascending: 2^k and 1.5 · 2^k. */
private val LEVELS = FloatArray(2 * OCTAVES) { Math.scalb(1 + 0.5f * (it % 2), LEAST_OCTAVE + it / 2) }

/** Values of the segment: the counts before training, and those of training. */
internal const val LOSSES_SIZE = 4 * OCTAVES

/** The segment that counts losses. */
private val LOSS_COUNTS = Segment(LOSSES, LOSSES_SIZE, isMean = false, range = Range(0.0, 1.0, 1))

/** Whether this is the segment that counts losses. */
internal fun countsLosses(segment: Segment): Boolean = segment == LOSS_COUNTS

/**
 * The values of the segment: 1 for every level that a mean loss reaches, and 0.
 *
 * first: the metric sums of the first step of the first pass. training: those of the whole last pass. The first of each is the
 * number of examples, the second the loss.
 */
internal fun countLosses(first: FloatArray, training: FloatArray): FloatArray {
    val means = floatArrayOf(first[1] / first[0], training[1] / training[0])
    return FloatArray(LOSSES_SIZE) { if (means[it / LEVELS.size] >= LEVELS[it % LEVELS.size]) 1f else 0f }
}
