/** Examples in NumPy's `.npz` files: one array per field, whose first axis counts examples. */
package dev.muster.device.jvm

import dev.muster.device.Column
import dev.muster.device.ExampleSource
import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.zip.ZipFile

private const val SUFFIX = ".npz"
private const val MAGIC = "\u0093NUMPY"
private val HEADER = Regex("'descr': '([^']+)', 'fortran_order': (False|True), 'shape': \\(([\\d, ]*)\\)")

/**
 * The examples at `path`, read afresh at every call: a file is the collection "default", and every file `NAME.npz` of a folder
 * the collection NAME. A file does not know how old its examples are.
 */
internal class NpzExamples(private val path: File) : ExampleSource {
    override fun counts(): Map<String, Int> = files().mapValues { read(it.value).count }

    override fun load(collection: String): Examples = files()[collection]?.let(::read) ?: Examples(0, emptyMap())

    override fun countRecent(collection: String, maxAgeS: Double): Int = 0

    private fun files(): Map<String, File> {
        if (!path.exists()) throw unreadable(path, "there is no such file")
        if (!path.isDirectory) return mapOf("default" to path)
        val found = path.listFiles { file -> isExamples(file.name) } ?: throw unreadable(path, "the folder cannot be listed")
        return found.sorted().associateBy { it.name.removeSuffix(SUFFIX) }
    }
}

/** Whether a file of this name is a collection of a folder of examples. */
internal fun isExamples(name: String): Boolean = name.endsWith(SUFFIX)

private fun read(path: File): Examples {
    val columns = LinkedHashMap<String, Column>()
    val counts = LinkedHashSet<Int>()
    try {
        ZipFile(path).use { zip ->
            for (entry in zip.entries().asSequence().filter { it.name.endsWith(".npy") }) {
                val field = entry.name.removeSuffix(".npy")
                val (count, column) = array(zip.getInputStream(entry).use { it.readBytes() }, field)
                columns[field] = column
                counts += count
            }
        }
    } catch (error: IOException) {
        throw unreadable(path, error.toString())
    }
    if (counts.size > 1) throw ExamplesException.invalid("fields differ in their number of examples: ${counts.joinToString()}")
    return Examples(counts.firstOrNull() ?: 0, columns)
}

/** The examples of an array in NumPy's own format. */
private fun array(data: ByteArray, field: String): Pair<Int, Column> {
    val buffer = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
    val isPlain = data.size >= 12 && String(data, 0, 6, Charsets.ISO_8859_1) == MAGIC && data[6] in 1..2
    if (!isPlain) throw ExamplesException.invalid("field $field is in a format of NumPy's that is not for plain arrays")
    val begin = if (data[6].toInt() == 1) 10 else 12
    val length = if (begin == 10) buffer.getShort(8).toInt() and 0xffff else buffer.getInt(8)
    if (length < 0 || begin + length > data.size) throw ExamplesException.invalid("field $field ends within its header")
    val (kind, order, axes) =
        HEADER.find(String(data, begin, length, Charsets.ISO_8859_1))?.destructured
            ?: throw ExamplesException.invalid("field $field has no header of a plain array")
    val shape =
        axes.split(',').map { it.trim() }.filter { it.isNotEmpty() }
            .map { it.toIntOrNull() ?: throw ExamplesException.invalid("field $field has an axis of $it") }
    if (order == "True" || shape.isEmpty()) throw ExamplesException.invalid("field $field is no array in C order with an axis")
    val size = shape.fold(1L, Long::times)
    buffer.position(begin + length)
    return shape[0] to column(kind, shape.drop(1), buffer.slice().order(ByteOrder.LITTLE_ENDIAN), size, field)
}

private fun column(kind: String, shape: List<Int>, values: ByteBuffer, size: Long, field: String): Column {
    val bytes =
        mapOf("<f4" to 4, "<i8" to 8, "<i4" to 4, "|u1" to 1)[kind]
            ?: throw ExamplesException.invalid("field $field holds $kind: an array of float32, int64, int32 or uint8 is wanted")
    if (size * bytes != values.remaining().toLong()) {
        throw ExamplesException.invalid("field $field says that it has $size values, which its ${values.remaining()} bytes are not")
    }
    val count = size.toInt()
    return when (kind) {
        "<f4" -> Column(shape, FloatArray(count).also { values.asFloatBuffer().get(it) })
        "<i8" -> Column(shape, LongArray(count).also { values.asLongBuffer().get(it) })
        "<i4" -> Column(shape, IntArray(count).also { values.asIntBuffer().get(it) })
        else -> Column(shape, ByteArray(count).also { values.get(it) })
    }
}

private fun unreadable(path: File, why: String) = ExamplesException.invalid("the examples in $path cannot be read: $why")
