/** Checks of examples against a plan, and lines of bytes in a column. */
package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.Examples
import dev.muster.device.ExamplesException

/** Throws [ExamplesException] unless the examples are what the plan trains on: at least one, of its types, finite, in range. */
internal fun checkExamples(plan: Plan, examples: Examples) {
    if (examples.count == 0) throw ExamplesException.tooFew("no examples in collection ${plan.examples.collection}")
    for (field in plan.examples.fields) {
        val column =
            examples.columns[field.name]
                ?: throw ExamplesException.invalid("examples have no field ${field.name}, which the plan wants")
        checkColumn(field, column, examples.count)
    }
}

private fun checkColumn(field: Field, column: Column, count: Int) {
    val isOfSize = column.size.toLong() == count.toLong() * field.width
    if (column.dtype != field.dtype || column.shape != field.shape || !isOfSize) {
        val found = "${column.dtype.text}${column.shape} with ${column.size} values"
        throw ExamplesException.invalid("field ${field.name} holds $found, the plan wants ${field.dtype.text}${field.shape}")
    }
    val place = strange(field, column)
    if (place >= 0) {
        val value = java.lang.reflect.Array.get(column.values, place)
        throw ExamplesException.invalid("field ${field.name} of example ${place / field.width} holds $value")
    }
}

/** The place of the first value that the field may not hold; −1 for none. */
private fun strange(field: Field, column: Column): Int {
    if (column.dtype == DType.FLOAT32) return column.floats.indexOfFirst { !it.isFinite() }
    val high = field.high ?: return -1
    val isStrange = { value: Long -> (value < 0 || value >= high) && value != field.ignored }
    return when (column.dtype) {
        DType.INT64 -> column.longs.indexOfFirst { isStrange(it) }
        DType.INT32 -> column.ints.indexOfFirst { isStrange(it.toLong()) }
        else -> column.bytes.indexOfFirst { isStrange(it.toLong() and 0xff) }
    }
}

/** A line of bytes of a column, which may have zeros at its end. */
internal fun lineOf(column: Column, place: Int): ByteArray {
    val (begin, end) = rangeOf(column, place)
    return column.bytes.copyOfRange(begin, end)
}

/** The column with lines of bytes as long as its shape says, by zeros at their ends. Throws [ExamplesException]. */
internal fun padded(name: String, column: Column, count: Int): Column {
    if (column.ends == null) return column
    val width = product(column.shape)
    val values = ByteArray(count * width)
    for (place in 0 until count) {
        val (begin, end) = rangeOf(column, place)
        if (end - begin > width) throw ExamplesException.invalid("field $name of example $place has ${end - begin} bytes, not $width")
        column.bytes.copyInto(values, place * width, begin, end)
    }
    return Column(column.shape, values)
}

private fun rangeOf(column: Column, place: Int): Pair<Int, Int> {
    val ends = column.ends ?: return product(column.shape).let { place * it to (place + 1) * it }
    return (if (place == 0) 0 else ends[place - 1]) to ends[place]
}
