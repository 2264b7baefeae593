/**
 * Codecs: linear maps between a report as a graph makes it and as it is sent. Spec: docs/spec/plan.md §5.1.
 *
 * A device only encodes. Operations follow the specification in its order, so the bits equal Python's, except for low-rank
 * factors, whose sums have no specified order.
 */
package dev.muster.device.plans

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.utf8

private val LABEL = utf8("muster.codec.v1")

/** The most codecs of a segment, and rows of a sketch: each goes over all values. */
private const val MOST_CODECS = 8
private const val MOST_ROWS = 16
private const val WORD_SCALE = 1.0 / (1L shl 62) / 2

/** The public key of a round's codecs, the same for all its devices. */
internal data class RoundKey(val seed: Long, val round: Int)

/** A linear map of a segment's values. `draw` gives the first words of its random stream. */
internal sealed class Codec {
    /** The number of values sent of `size`, at least 0. Throws [FormatException] when it does not fit. */
    abstract fun codedSize(size: Int): Int

    /** The values to send. */
    abstract fun encode(values: FloatArray, draw: (Int) -> LongArray): FloatArray

    companion object {
        fun of(json: Json): Codec =
            when (json["codec"].text()) {
                "rotation" -> Rotation(json["block"].size())
                "subsample" -> Subsample(json["kept"].size())
                "count_sketch" -> CountSketch(json["rows"].size(), json["columns"].size())
                "low_rank" -> LowRank(json["rank"].size(), json["matrices"].list(Matrix::of))
                else -> json["codec"].wrong("a codec that this device knows")
            }
    }
}

/** The number of values sent of `size`. Throws [FormatException] when a codec does not fit. */
internal fun codedSize(codecs: List<Codec>, size: Int): Int {
    if (codecs.size > MOST_CODECS) throw FormatException("${codecs.size} codecs of a segment; there may be $MOST_CODECS")
    return codecs.fold(size) { left, codec -> codec.codedSize(left) }
}

/** The values to send. segment: the index of the values' segment in its layout. */
internal fun encode(codecs: List<Codec>, values: FloatArray, key: RoundKey, segment: Int): FloatArray =
    codecs.foldIndexed(values) { place, coded, codec ->
        codec.encode(coded) { words -> stream(LABEL, words, key.seed, key.round.toLong(), segment.toLong(), place.toLong()) }
    }

/** Throws [FormatException] unless a codec sends some of `size` values. */
private fun sent(coded: Long, size: Int, what: String): Int {
    if (coded < minOf(1, size) || coded > size) {
        throw FormatException("$what $coded; a segment of $size values has at least 1 and at most as many")
    }
    return coded.toInt()
}

/** Rotates every block under random signs; the last one ends where the values end. */
internal data class Rotation(val block: Int) : Codec() {
    override fun codedSize(size: Int): Int {
        if (Integer.bitCount(block) != 1 || block > maxOf(size, 1)) {
            throw FormatException("a rotation in blocks of $block; $size values need a power of two up to $size")
        }
        return size
    }

    override fun encode(values: FloatArray, draw: (Int) -> LongArray): FloatArray {
        val rotated = values.copyOf()
        val blocks = (values.size + block - 1) / block
        val signs = draw(((blocks.toLong() * block + 63) / 64).toInt())
        for (place in 0 until blocks) {
            val begin = minOf(place * block, values.size - block)
            for (index in 0 until block) {
                val bit = place.toLong() * block + index
                if (signs[(bit ushr 6).toInt()] ushr (bit and 63).toInt() and 1L != 0L) rotated[begin + index] *= -1f
            }
            transform(rotated, begin)
        }
        return rotated
    }

    /** The Walsh–Hadamard transform of a block in place, divided by the root of its length: its own inverse. */
    private fun transform(values: FloatArray, begin: Int) {
        var half = 1
        while (half < block) {
            for (group in begin until begin + block step 2 * half) {
                for (left in group until group + half) {
                    val a = values[left]
                    val b = values[left + half]
                    values[left] = a + b
                    values[left + half] = a - b
                }
            }
            half *= 2
        }
        val scale = Math.pow(block.toDouble(), -0.5).toFloat()
        for (place in begin until begin + block) values[place] *= scale
    }
}

/** Sends one value of each of [kept] strata of neighbours. */
internal data class Subsample(val kept: Int) : Codec() {
    override fun codedSize(size: Int): Int = sent(kept.toLong(), size, "a subsample of")

    override fun encode(values: FloatArray, draw: (Int) -> LongArray): FloatArray {
        if (kept == 0) return FloatArray(0)
        val words = draw(kept)
        val width = values.size / kept
        val longer = values.size % kept
        return FloatArray(kept) { stratum ->
            val size = if (stratum < longer) width + 1 else width
            val within = java.lang.Long.remainderUnsigned(words[stratum], size.toLong()).toInt()
            values[stratum * width + minOf(stratum, longer) + within]
        }
    }
}

/** Sends counters, row by row: the sums, in float64, of the values that each has, under their signs. */
internal data class CountSketch(val rows: Int, val columns: Int) : Codec() {
    override fun codedSize(size: Int): Int {
        if (rows > MOST_ROWS) throw FormatException("a sketch of $rows rows; there may be $MOST_ROWS")
        return sent(rows.toLong() * columns, size, "a sketch with counters:")
    }

    override fun encode(values: FloatArray, draw: (Int) -> LongArray): FloatArray {
        val counters = DoubleArray(rows * columns)
        val words = draw(rows * values.size)
        for (row in 0 until rows) {
            for (index in values.indices) {
                val word = words[row * values.size + index]
                val column = (word ushr 1).rem(columns).toInt()
                counters[row * columns + column] += if (word and 1L != 0L) -values[index].toDouble() else values[index].toDouble()
            }
        }
        return FloatArray(counters.size) { counters[it].toFloat() }
    }
}

/** The shape of a matrix. */
internal data class Matrix(val rows: Int, val columns: Int) {
    val size: Long get() = rows.toLong() * columns
    val shorter: Int get() = minOf(rows, columns)
    val longer: Int get() = maxOf(rows, columns)

    companion object {
        fun of(json: Json): Matrix {
            val sides = json.list { it.size() }
            return if (sides.size == 2) Matrix(sides[0], sides[1]) else json.wrong("rows and columns")
        }
    }
}

/** Sends the products of matrices with random orthonormal bases along their longer sides, matrix by matrix. */
internal data class LowRank(val rank: Int, val matrices: List<Matrix>) : Codec() {
    override fun codedSize(size: Int): Int {
        val found = matrices.sumOf { it.size }
        if (rank < 1 || found != size.toLong()) {
            throw FormatException("factors of rank $rank of matrices with $found values; the segment has $size")
        }
        return matrices.sumOf { sentOf(it) }
    }

    override fun encode(values: FloatArray, draw: (Int) -> LongArray): FloatArray {
        val words = draw(matrices.sumOf { wordsOf(it) })
        val coded = FloatArray(matrices.sumOf { sentOf(it) })
        var begin = 0
        var used = 0
        var at = 0
        for (matrix in matrices) {
            if (isWhole(matrix)) {
                values.copyInto(coded, at, begin, begin + matrix.size.toInt())
            } else {
                val drawn = DoubleArray(wordsOf(matrix)) { words[used + it] * WORD_SCALE }
                product(values, begin, matrix, orthonormal(drawn)).forEachIndexed { place, value -> coded[at + place] = value.toFloat() }
            }
            begin += matrix.size.toInt()
            used += wordsOf(matrix)
            at += sentOf(matrix)
        }
        return coded
    }

    private fun isWhole(matrix: Matrix) = matrix.shorter <= rank

    private fun wordsOf(matrix: Matrix) = if (isWhole(matrix)) 0 else rank * matrix.longer

    private fun sentOf(matrix: Matrix) = if (isWhole(matrix)) matrix.size.toInt() else rank * matrix.shorter

    /** The columns of a matrix (n, rank) made orthonormal, first to last: Gram–Schmidt, twice against rounding. */
    private fun orthonormal(matrix: DoubleArray): FloatArray {
        for (column in 0 until rank) {
            for (turn in 0 until 2 * column) {
                val other = turn % column
                val factor = dot(matrix, column, other)
                for (row in matrix.indices step rank) matrix[row + column] -= factor * matrix[row + other]
            }
            val norm = Math.sqrt(dot(matrix, column, column))
            for (row in matrix.indices step rank) matrix[row + column] /= norm
        }
        return FloatArray(matrix.size) { matrix[it].toFloat() }
    }

    private fun dot(matrix: DoubleArray, a: Int, b: Int): Double {
        var sum = 0.0
        for (row in matrix.indices step rank) sum += matrix[row + a] * matrix[row + b]
        return sum
    }

    /** M Q, (rows, rank), where rows are at least as long as columns, else Qᵀ M, (rank, columns). */
    private fun product(values: FloatArray, begin: Int, matrix: Matrix, basis: FloatArray): DoubleArray {
        val found = DoubleArray(rank * matrix.shorter)
        val isWide = matrix.columns >= matrix.rows
        for (row in 0 until matrix.rows) {
            for (column in 0 until matrix.columns) {
                val value = values[begin + row * matrix.columns + column].toDouble()
                for (factor in 0 until rank) {
                    if (isWide) found[row * rank + factor] += value * basis[column * rank + factor]
                    else found[factor * matrix.columns + column] += value * basis[row * rank + factor]
                }
            }
        }
        return found
    }
}
