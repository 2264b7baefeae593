/** Examples as an app hands them in: a collection has a column for each field. */
package dev.muster.device

/** The element types of fields. */
public enum class DType(internal val bytes: Int) {
    FLOAT32(4),
    INT64(8),
    INT32(4),
    UINT8(1),
    ;

    /** The name in plans. */
    internal val text: String = name.lowercase(java.util.Locale.ROOT)

    internal companion object {
        /** The type of that name in plans. Throws [FormatException]. */
        fun of(json: Json): DType = entries.find { it.text == json.text() } ?: json.wrong("one of ${entries.map { it.text }}")
    }
}

/**
 * The values of one field, example by example. [shape] is that of a single example.
 *
 * [values] is a FloatArray, LongArray, IntArray or ByteArray, as [dtype] says. [ends]: of lines of bytes, such as texts, that are
 * each as long as they are, up to the shape: where each ends in the values.
 */
public class Column private constructor(
    public val dtype: DType,
    public val shape: List<Int>,
    internal val values: Any,
    internal val ends: IntArray?,
) {
    public constructor(shape: List<Int>, values: FloatArray) : this(DType.FLOAT32, shape, values, null)

    public constructor(shape: List<Int>, values: LongArray) : this(DType.INT64, shape, values, null)

    public constructor(shape: List<Int>, values: IntArray) : this(DType.INT32, shape, values, null)

    @JvmOverloads
    public constructor(shape: List<Int>, values: ByteArray, ends: IntArray? = null) :
        this(DType.UINT8, shape, values, ends)

    internal val floats: FloatArray get() = values as FloatArray
    internal val longs: LongArray get() = values as LongArray
    internal val ints: IntArray get() = values as IntArray
    internal val bytes: ByteArray get() = values as ByteArray

    /** Values of all examples. */
    internal val size: Int
        get() =
            when (dtype) {
                DType.FLOAT32 -> floats.size
                DType.INT64 -> longs.size
                DType.INT32 -> ints.size
                DType.UINT8 -> bytes.size
            }
}

/** The examples of a collection: [count] of them, and the column of every field by name. */
public class Examples(public val count: Int, public val columns: Map<String, Column>)

/** Examples in named collections. Every method throws [ExamplesException] for what cannot be read. */
public interface ExampleSource {
    /** The number of examples per collection. */
    public fun counts(): Map<String, Int>

    /** All examples of a collection. */
    public fun load(collection: String): Examples

    /** The number of examples that are at most [maxAgeS] seconds old; 0 in a source that does not know their age. */
    public fun countRecent(collection: String, maxAgeS: Double): Int
}
