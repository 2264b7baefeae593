/**
 * Batches: the examples on the plan's side of its hold-out, in the order in which a device visits them, and the noise of its
 * steps. Spec: docs/spec/plan.md §1.1, §4.
 */
package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import dev.muster.device.bitLength
import dev.muster.device.concat
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.utf8
import java.nio.ByteBuffer

private val ORDER = utf8("muster.order.v1")
private val NOISE = utf8("muster.noise.v1")
private const val TWO_TO_64 = 18446744073709551616.0

/**
 * The key of a device's random streams in one round.
 *
 * [secret]: in a secure round, bytes that only the device knows; its noise depends on them. Else empty.
 */
internal class StreamKey(val seed: Long, val round: Int, val slot: Long, val secret: ByteArray = ByteArray(0)) {
    /** The first words of the stream of a pass and of an epoch or a step. */
    fun words(label: ByteArray, pass: Int, counter: Int, words: Int): LongArray =
        stream(label, words, seed, round.toLong(), slot, pass.toLong(), counter.toLong())
}

/** A random order of so many indices: the stable argsort of that many words of the stream. */
internal fun permutation(key: StreamKey, pass: Int, epoch: Int, examples: Int): IntArray =
    argsort(key.words(ORDER, pass, epoch, examples))

/**
 * The places of unsigned words in ascending order; of equal words the earlier place comes first.
 *
 * By their upper bits, with places in the lower ones; what those leave in disorder, which is hardly ever any, by comparison.
 */
internal fun argsort(words: LongArray): IntArray {
    val places = (1L shl bitLength(words.size)) - 1
    val keys = LongArray(words.size) { words[it] xor Long.MIN_VALUE and places.inv() or it.toLong() }
    keys.sort()
    val order = IntArray(words.size) { (keys[it] and places).toInt() }
    for (rank in 1 until order.size) {
        var at = rank
        while (at > 0 && words[order[at - 1]].toULong() > words[order[at]].toULong()) {
            order[at] = order[at - 1].also { order[at - 1] = order[at] }
            at--
        }
    }
    return order
}

/** Random integers, uniform over all of int32, one for every place of a batch. */
internal fun noise(key: StreamKey, pass: Int, step: Int, size: Int): IntArray {
    val words = key.words(concat(NOISE, key.secret), pass, step, (size + 1) / 2)
    return IntArray(size) { (words[it / 2] ushr 32 * (it % 2)).toInt() }
}

/** The batches of some steps, one after the other: the indices of their examples, and a mask, 1 for real examples, 0 for padding. */
internal class Batches(val indices: IntArray, val mask: FloatArray)

/**
 * The batches of every step of a pass, in groups of at most `most` steps of one epoch.
 *
 * A short last batch of an epoch is padded with its own first index, under mask 0.
 */
internal fun batches(loop: Loop, examples: Int, key: StreamKey, pass: Int, most: Int): Sequence<Batches> =
    sequence {
        val size = loop.batchSize
        var remaining = stepCount(loop, examples)
        for (epoch in 0 until loop.epochs) {
            if (remaining == 0) break
            val order = if (loop.shuffle) permutation(key, pass, epoch, examples) else IntArray(examples) { it }
            var start = 0
            while (start < examples && remaining > 0) {
                val steps = minOf(most, remaining, (examples - start + size - 1) / size)
                yield(batchesOf(order, start, steps, size))
                start += steps * size
                remaining -= steps
            }
        }
    }

private fun batchesOf(order: IntArray, start: Int, steps: Int, size: Int): Batches {
    val last = start + (steps - 1) * size
    val real = minOf(order.size - start, steps * size)
    val indices = IntArray(steps * size) { order[if (it < real) start + it else last] }
    return Batches(indices, FloatArray(steps * size) { if (it < real) 1f else 0f })
}

/**
 * The examples on the plan's side of its hold-out, in their order, which must fit the plan.
 *
 * Throws [ExamplesException] when they are fewer than `minExamples`, or none.
 */
internal fun onSide(plan: Plan, examples: Examples, minExamples: Long): Examples {
    val holdOut = plan.examples.holdOut
    val kept = if (holdOut == null) examples else only(plan, examples, places(plan.examples, holdOut, examples))
    val least = maxOf(minExamples, 1)
    if (kept.count < least) {
        val found = "the plan runs on ${kept.count} examples of collection ${plan.examples.collection}"
        throw ExamplesException.tooFew("$found, and the task needs $least")
    }
    return kept
}

/** The places of the examples on a side of a hold-out. */
internal fun places(spec: ExamplesPlan, holdOut: HoldOut, examples: Examples): IntArray {
    val columns = spec.fields.map { examples.columns.getValue(it.name) }
    val start = utf8("muster.hold-out.example.v1\u0000${spec.collection}\u0000")
    val hashed = littleEndian(start.copyOf(start.size + spec.fields.sumOf { it.width * it.dtype.bytes }))
    // A power of two scales a number exactly, and an integer is below a number if it is below the next integer.
    val bound = Math.ceil(holdOut.share * TWO_TO_64).toULong()
    return (0 until examples.count).filter { place ->
        hashed.position(start.size)
        for (column in columns) putRow(hashed, column, place, examples.count)
        val digest = ByteBuffer.wrap(sha256(hashed.array()))
        (digest.getLong(0).toULong() < bound) == holdOut.isHeldOut
    }.toIntArray()
}

private fun putRow(buffer: ByteBuffer, column: Column, place: Int, count: Int) {
    val width = column.size / count
    for (at in place * width until (place + 1) * width) {
        when (column.dtype) {
            DType.FLOAT32 -> buffer.putFloat(column.floats[at])
            DType.INT64 -> buffer.putLong(column.longs[at])
            DType.INT32 -> buffer.putInt(column.ints[at])
            DType.UINT8 -> buffer.put(column.bytes[at])
        }
    }
}

/** The examples at some places. */
internal fun only(plan: Plan, examples: Examples, kept: IntArray): Examples {
    val columns = plan.examples.fields.associate { it.name to rowsOf(examples.columns.getValue(it.name), it.width, kept) }
    return Examples(kept.size, columns)
}

private fun rowsOf(column: Column, width: Int, rows: IntArray): Column {
    val size = rows.size * width
    fun <T : Any> copied(into: T): T {
        rows.forEachIndexed { place, row -> System.arraycopy(column.values, row * width, into, place * width, width) }
        return into
    }
    return when (column.dtype) {
        DType.FLOAT32 -> Column(column.shape, copied(FloatArray(size)))
        DType.INT64 -> Column(column.shape, copied(LongArray(size)))
        DType.INT32 -> Column(column.shape, copied(IntArray(size)))
        DType.UINT8 -> Column(column.shape, copied(ByteArray(size)))
    }
}
