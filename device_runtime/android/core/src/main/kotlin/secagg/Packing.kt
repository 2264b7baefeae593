/** Packing: from a float vector to words that can be masked and added, with noise. Spec: docs/spec/secagg.md §5, §9. */
package dev.muster.device.secagg

import dev.muster.device.KEY_BYTES
import dev.muster.device.Keystream
import dev.muster.device.bitLength
import dev.muster.device.littleEndian
import java.math.BigInteger
import kotlin.math.ceil
import kotlin.math.floor
import kotlin.math.sqrt

private const val WORD_BITS = 64
private const val MOST_IN_BITS = 20
private const val MOST_FIELD_BITS = 32
private val RANGES = 1e-40..1e40 // what float32 values span
private const val POINT_BITS = 32
private const val POINT = (1L shl POINT_BITS).toDouble()
private const val MANTISSA = (1L shl MOST_IN_BITS + POINT_BITS).toDouble()
private const val ZERO_TOLERANCE = 1e-6 // of a step, by which 0 may miss one
private const val SLICE = 1 shl 13 // values quantised at a time
private const val LN2 = 0.6931471805599453

/**
 * How `size` values in [low, high] become numbers of `inBits`.
 *
 * A `weighted` segment is multiplied by weight / wMax. `norm` is the greatest L2 norm, to which a longer segment is scaled down; 0
 * is no limit. `noise` is the variance, in squared steps, of the noise that a device adds; 0 is none.
 */
internal data class FixedPoint(
    val size: Int,
    val inBits: Int,
    val low: Double,
    val high: Double,
    val norm: Double,
    val weighted: Boolean,
    val noise: Long = 0,
) {
    /** The greatest number. */
    val most: Long get() = (1L shl inBits) - 1

    /** The difference between neighbouring values. */
    val step: Double get() = (high - low) / most

    /** The number of the value 0, if 0 is one of the steps. */
    val zero: Long get() = Math.round(-low / step)

    /** The greatest squared L2 norm of a segment with noise, rounded, in steps from 0. Its own norm is at most `norm`. */
    val mostSquare: Double get() {
        val (steps, root) = norm / step to sqrt(size.toDouble())
        val likely = steps * steps + size / 4.0 + sqrt(2 * RARE_BITS * LN2) * (steps + root / 2)
        return floor(minOf(likely, (steps + root) * (steps + root)))
    }

    /** The same with the noise that reaches the noise multiplier in a sum if at least `honest` devices add theirs. */
    fun withNoise(noiseMultiplier: Double, honest: Long): FixedPoint =
        copy(noise = ceil(noiseMultiplier * noiseMultiplier * mostSquare / honest).toLong())
}

/** A segment whose numbers are packed into fields of `fieldBits`. */
internal class PackedSegment(val format: FixedPoint, val fieldBits: Int) {
    /** The number of its words. */
    val words: Int get() = (format.size + perWord - 1) / perWord

    private val perWord: Int get() = WORD_BITS / fieldBits
}

/** Throws [HeadroomError] unless every field can hold the sum of nMax values and every range makes sense. */
internal fun checkHeadroom(segments: List<PackedSegment>, nMax: Long) {
    segments.forEachIndexed { place, segment ->
        val format = segment.format
        val fits = format.inBits in 1..minOf(MOST_IN_BITS, segment.fieldBits) && segment.fieldBits <= MOST_FIELD_BITS
        if (!fits || nMax * format.most >= 1L shl segment.fieldBits) {
            throw HeadroomError("segment $place: $nMax values of ${format.inBits} bits do not fit into ${segment.fieldBits} bits")
        }
        if (0.0 !in format.low..format.high || format.high - format.low !in RANGES || format.norm < 0) {
            throw HeadroomError("segment $place: [${format.low}, ${format.high}] with norm ${format.norm} is no range to quantise")
        }
        if (format.noise > 0) checkNoise(segment, nMax, place)
    }
}

private fun checkNoise(segment: PackedSegment, nMax: Long, place: Int) {
    val format = segment.format
    val (step, noise) = format.step to format.noise
    if (format.norm == 0.0 || Math.abs(format.zero * step + format.low) >= ZERO_TOLERANCE * step) {
        throw HeadroomError("segment $place: noise needs a norm, and a range in which 0 is one of the steps")
    }
    if (noise > MOST_VARIANCE || nMax * format.most + 2 * bound(nMax * noise, format.size) >= 1L shl segment.fieldBits) {
        throw HeadroomError("segment $place: noise of variance $noise does not fit into ${segment.fieldBits} bits")
    }
}

/**
 * The words of one device, ready to be masked: its weight, the packed segments, the check word. Throws [BadInput].
 *
 * Trap: values outside [low, high] are clamped, which adds bias; choose norm and range so that it is rare.
 */
internal fun pack(segments: List<PackedSegment>, vector: FloatArray, weight: Long, wMax: Long, random: RandomSource): LongArray {
    if (weight !in 0..wMax) throw BadInput("the weight must be 0 to $wMax, not $weight")
    val size = segments.sumOf { it.format.size.toLong() }
    if (vector.size.toLong() != size) throw BadInput("the vector must have $size values, not ${vector.size}")
    val words = LongArray(2 + segments.sumOf { it.words })
    words[0] = weight
    val uniform = Uniform(random(KEY_BYTES))
    var (value, word) = 0 to 1
    for (segment in segments) {
        val part = Part(segment, vector, value, words, word)
        part.quantise(weight.toDouble() / wMax, uniform)
        if (segment.format.noise > 0) part.addNoise(Uniform(random(KEY_BYTES)))
        value += segment.format.size
        word += segment.words
    }
    words[words.size - 1] = checkWord(words)
    return words
}

/** A stream of uniform numbers, read from front to end, up to [SLICE] at a time. */
private class Uniform(key: ByteArray) {
    private val stream = Keystream(key)
    private val bytes = littleEndian(ByteArray(8 * SLICE))

    /** The next numbers of 32 bits. */
    fun fill(numbers: IntArray, size: Int) {
        stream.fill(bytes.array(), 4 * size)
        bytes.asIntBuffer().get(numbers, 0, size)
    }

    /** The next numbers of 64 bits. */
    fun fill(numbers: LongArray, size: Int) {
        stream.fill(bytes.array(), 8 * size)
        bytes.asLongBuffer().get(numbers, 0, size)
    }
}

/** `size` values from index `value` on, that are in as many words from index `word` on, at bit `shift`. */
private class Slice(val value: Int, val word: Int, val size: Int, val shift: Int)

/** A segment of a vector, from index `value` on, and its words, from index `word` on. */
private class Part(
    private val segment: PackedSegment,
    private val vector: FloatArray,
    private val value: Int,
    private val words: LongArray,
    private val word: Int,
) {
    private val format = segment.format

    // Value v goes into word v mod P, at field ⌊v / P⌋.
    private val slices: List<Slice> =
        (0 until format.size step maxOf(segment.words, 1)).flatMapIndexed { plane, begin ->
            val end = minOf(begin + segment.words, format.size)
            (begin until end step SLICE).map { first ->
                Slice(value + first, word + first - begin, minOf(SLICE, end - first), plane * segment.fieldBits)
            }
        }

    /** Quantise and pack; with noise again and again, until the norm is one that noise hides. share: of the greatest weight. */
    fun quantise(share: Double, uniform: Uniform) {
        val rounding = Rounding(format, factor(share))
        val drawn = IntArray(SLICE)
        do {
            words.fill(0, word, word + segment.words)
            var square = 0L
            for (slice in slices) {
                uniform.fill(drawn, slice.size)
                square += rounding.apply(vector, drawn, words, slice)
            }
        } while (format.noise > 0 && square > format.mostSquare)
    }

    /** The factor of the values: clipping to the norm, times `share` if they are weighted. Reports are weighted only here. */
    private fun factor(share: Double): Double {
        var square = 0.0
        for (place in value until value + format.size) square += vector[place].toDouble() * vector[place]
        val norm = sqrt(square)
        if (norm.isNaN() || norm.isInfinite()) {
            throw BadInput("the vector holds a value that is not finite: the training diverged, and nothing is sent")
        }
        val scale = if (format.norm > 0 && format.norm < norm) format.norm / norm else 1.0
        return if (format.weighted) scale * share else scale
    }

    /** Add noise to every value: what a field lacks it borrows from the next, modulo 2⁶⁴. */
    fun addNoise(uniform: Uniform) {
        val table = Skellam(format.noise)
        val (drawn, further) = LongArray(SLICE) to LongArray(1)
        for (slice in slices) {
            uniform.fill(drawn, slice.size)
            for (place in table.addTo(words, slice.word, slice.shift, drawn, slice.size)) {
                uniform.fill(further, 1)
                words[slice.word + place] += table.exactly(drawn[place], further[0]).toLong() shl slice.shift
            }
        }
    }
}

/**
 * Rounds values to numbers, after a multiplication by `factor`.
 *
 * A value becomes a double between 2⁵² and 2⁵³, where neighbours differ by one: its mantissa is the number with 32 bits behind
 * the point. Adding uniform bits to it, and leaving out those behind the point, rounds without bias.
 */
private class Rounding(format: FixedPoint, factor: Double) {
    private val slope = factor * (POINT / format.step)
    private val offset = MANTISSA - format.low * (POINT / format.step)
    private val most = MANTISSA + format.most * POINT
    private val zero = format.zero

    /** Round the values of a slice into a field of its words, and give their squared norm in steps from 0. */
    fun apply(values: FloatArray, drawn: IntArray, words: LongArray, slice: Slice): Long {
        val (slope, offset, most) = Triple(slope, offset, most)
        val (zero, shift) = zero to slice.shift
        var square = 0L
        for (place in 0 until slice.size) {
            val fixed = values[slice.value + place] * slope + offset
            val held = Math.min(Math.max(fixed, MANTISSA), most).toRawBits()
            val number = held + (drawn[place].toLong() and 0xffff_ffffL) ushr POINT_BITS and (1L shl MOST_IN_BITS) - 1
            square += (number - zero) * (number - zero)
            words[slice.word + place] = words[slice.word + place] or (number shl shift)
        }
        return square
    }
}

/** Σ (2m + 1) · word m over all words but the last: linear, so it adds up, and no two words have the same factor. */
private fun checkWord(words: LongArray): Long {
    var total = 0L
    for (m in 0 until words.size - 1) total += (2L * m + 1) * words[m]
    return total
}

private const val MOST_VARIANCE = 1L shl 26
private const val RARE_BITS = 40
private const val TAIL_BITS = 130
private const val COARSE_BITS = 63
private const val FINE_BITS = 64
private const val GUIDE_BITS = 14

/** A number that noise exceeds at none of `size` values, but with a chance below 2⁻⁴⁰. */
private fun bound(variance: Long, size: Int): Long {
    val exponent = (RARE_BITS + 1 + bitLength(size)) * LN2
    return if (variance == 0L) 0 else ceil(sqrt(2 * variance * exponent) + exponent / 3).toLong()
}

/** The distribution of a device's noise: 2¹²⁷ · P[|X| ≤ k] for k = 0, 1, …, and the same times 2⁻⁶⁴ but for the last. */
internal class Skellam(variance: Long) {
    private val exact = thresholds(variance)
    private val coarse = LongArray(exact.size - 1) { exact[it].shiftRight(FINE_BITS).toLong() }

    // For each prefix of a number, how many thresholds are not above the first such number.
    private val guide = guide()

    /** Add the numbers that words of a stream stand for to words at a bit, and give the places where only further bits can tell. */
    fun addTo(words: LongArray, first: Int, shift: Int, drawn: LongArray, size: Int): List<Int> {
        val left = ArrayList<Int>(0)
        for (place in 0 until size) {
            val number = number(drawn[place])
            if (number == UNDECIDED) left += place else words[first + place] += number.toLong() shl shift
        }
        return left
    }

    /** The number that a word stands for; [UNDECIDED] where only further bits can tell. */
    fun number(word: Long): Int {
        val magnitude = word ushr 1
        var found = guide[(magnitude ushr COARSE_BITS - GUIDE_BITS).toInt()]
        while (found < coarse.size && coarse[found] <= magnitude) found++
        return if (found > 0 && coarse[found - 1] == magnitude) UNDECIDED else signed(found, word)
    }

    /** The number that a word stands for with a further one. */
    fun exactly(word: Long, further: Long): Int {
        val drawn = (word ushr 1).toBigInteger().shiftLeft(FINE_BITS) + further.toULong().toString().toBigInteger()
        return signed(exact.count { it <= drawn }, word)
    }

    private fun signed(magnitude: Int, word: Long): Int = if (word and 1 == 1L) -magnitude else magnitude

    private fun guide(): IntArray {
        val guide = IntArray(1 shl GUIDE_BITS)
        var found = 0
        for (prefix in guide.indices) {
            val first = prefix.toLong() shl COARSE_BITS - GUIDE_BITS
            while (found < coarse.size && coarse[found] <= first) found++
            guide[prefix] = found
        }
        return guide
    }

    companion object {
        const val UNDECIDED = Int.MIN_VALUE

        /** P[X = k] = e⁻ᵛ I_k(v): Bessel functions by Miller's recurrence, downwards in integers, from where they vanish. */
        private fun thresholds(variance: Long): List<BigInteger> {
            if (variance !in 1..MOST_VARIANCE) {
                throw HeadroomError("noise of variance $variance cannot be drawn: it must be 1 to $MOST_VARIANCE")
            }
            val bessel = bessel(variance)
            val total = bessel.fold(BigInteger.ZERO, BigInteger::add).shiftLeft(1) - bessel[0]
            var below = -bessel[0]
            return bessel.map { value ->
                below += value.shiftLeft(1)
                below.shiftLeft(COARSE_BITS + FINE_BITS) / total
            }
        }

        /** Integers in proportion to I_0(v), I_1(v), …. */
        private fun bessel(variance: Long): List<BigInteger> {
            val exponent = TAIL_BITS * LN2
            val last = ceil(sqrt(2 * variance * exponent) + exponent / 3).toLong()
            var (after, here) = BigInteger.ZERO to BigInteger.ONE.shiftLeft(128)
            val found = arrayListOf(here)
            for (order in last downTo 1) {
                val before = after + here * (2 * order).toBigInteger() / variance.toBigInteger()
                after = here
                here = before
                found += here
            }
            return found.asReversed()
        }
    }
}
