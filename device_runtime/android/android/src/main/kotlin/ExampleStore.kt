/** The examples of an app, sealed, each with its time; what is too old or too many is removed. */
package dev.muster.device

import android.database.sqlite.SQLiteDatabase
import android.database.sqlite.SQLiteException
import dev.muster.device.ExamplesException.Companion.invalid
import dev.muster.device.plans.product
import java.io.File
import java.nio.ByteBuffer

/** The first second of 2026. A clock before it was reset, as by an empty battery, and says nothing about ages. */
private const val EARLIEST = 1_767_225_600.0
private const val LENGTH_BYTES = 4

/** The longest example: a row of a cursor holds two mebibytes. */
private const val MOST_BYTES = 3 shl 19
private val TABLES =
    listOf(
        "CREATE TABLE IF NOT EXISTS collections (name TEXT PRIMARY KEY NOT NULL, declared TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS examples " +
            "(id INTEGER PRIMARY KEY, collection TEXT NOT NULL REFERENCES collections, at REAL NOT NULL, example BLOB NOT NULL)",
        "CREATE INDEX IF NOT EXISTS by_collection ON examples (collection, id)",
    )

/**
 * A field of an example, as plans name it. [shape] is that of one example; [high] bounds integers to 0 … high − 1.
 *
 * A text is of [DType.UINT8] and of shape `[n]`: UTF-8 of at most n bytes.
 */
public data class ExampleField @JvmOverloads constructor(
    val name: String,
    val dtype: DType,
    val shape: List<Int> = emptyList(),
    val high: Long? = null,
) {
    internal val isLine get() = dtype == DType.UINT8 && shape.size == 1
    internal val width: Int = product(shape)

    init {
        if (shape.any { it < 0 }) throw invalid("field $name has the shape $shape")
    }

    internal fun members() = mapOf("name" to name, "dtype" to dtype.text, "shape" to shape, "high" to high)

    internal companion object {
        fun of(json: Json) =
            ExampleField(
                json["name"].text(), DType.of(json["dtype"]), json["shape"].list { it.size() },
                json.nullable("high")?.whole(0..Long.MAX_VALUE),
            )
    }
}

/** How long examples are kept: [maxAgeS] seconds, and the newest [most]; null is no limit. */
public data class Retention @JvmOverloads constructor(val maxAgeS: Double? = null, val most: Int? = null)

private class Declared(val fields: List<ExampleField>, val retention: Retention) {
    fun text() =
        Json.write(
            mapOf("fields" to fields.map { it.members() }, "max_age_s" to retention.maxAgeS, "most" to retention.most),
        )

    companion object {
        fun of(text: String): Declared {
            val json = Json.parse(text, "collection")
            val retention = Retention(json.nullable("max_age_s")?.number(), json.nullable("most")?.size(1))
            return Declared(json["fields"].list(ExampleField::of), retention)
        }
    }
}

/**
 * Examples in named collections, for any thread but the app's main one, and any process of the app. They never leave this phone.
 *
 * Methods throw [ExamplesException] for examples that do not fit, and [StateDamaged] when the store cannot be used, as on a full disk,
 * or was erased: then nothing is added. On the app's main thread they throw [dev.muster.device.ConfigException].
 */
public class ExampleStore internal constructor(
    private val file: File,
    private val sealer: () -> Sealer,
    private val mayWait: () -> Unit = {},
    private val now: () -> Double,
) : ExampleSource, AutoCloseable {
    private val opening = lazy { openDatabase(file, TABLES) { putAside = it }.also { identity = identityOf(file) } }
    internal val database: SQLiteDatabase get() = opening.value
    private var identity: Any? = null

    /** Whether another process of the app erased or replaced what is open here. */
    internal val isStale: Boolean get() = opening.isInitialized() && identityOf(file) != identity

    /** What was done with a damaged file, in words; null without one. */
    public var putAside: String? = null
        private set

    /** Declare a collection. It may be declared again with the same fields and another retention. */
    @JvmOverloads
    public fun declare(collection: String, fields: List<ExampleField>, retention: Retention = Retention()) {
        val names = fields.map { it.name }
        if (collection.isEmpty() || names.isEmpty() || names.toSet().size < names.size || names.any { it.isEmpty() }) {
            throw invalid("collection $collection needs a name, and fields that each have a name of their own")
        }
        writing {
            val before = find(collection)
            if (before != null && before.fields != fields) {
                throw invalid("collection $collection already has other fields: ${before.fields}")
            }
            execSQL("INSERT OR REPLACE INTO collections VALUES (?, ?)", arrayOf(collection, Declared(fields, retention).text()))
            retain(collection, retention)
        }
    }

    /**
     * Add an example to a declared collection: a value for each field, durable when this returns.
     *
     * A value is a FloatArray, LongArray, IntArray or ByteArray, as the field's type is, a number for a field without axes, or a text
     * for one of bytes.
     */
    public fun append(collection: String, example: Map<String, Any>) {
        writing {
            val declared = find(collection) ?: throw invalid("collection $collection was not declared")
            val row = sealer().seal(encoded(collection, declared.fields, example), collection)
            if (row.size > MOST_BYTES) throw invalid("an example of collection $collection has ${row.size} bytes, more than $MOST_BYTES")
            execSQL("INSERT INTO examples (collection, at, example) VALUES (?, ?, ?)", arrayOf<Any>(collection, now(), row))
            retain(collection, declared.retention)
        }
    }

    override fun counts(): Map<String, Int> =
        reading {
            rows("SELECT collection, count(*) FROM examples GROUP BY collection") { it.getString(0) to it.getInt(1) }.toMap()
        }

    override fun countRecent(collection: String, maxAgeS: Double): Int =
        reading {
            val recent = "SELECT count(*) FROM examples WHERE collection = ? AND at >= ?"
            rows(recent, collection, (now() - maxAgeS).toString()) { it.getInt(0) }.single()
        }

    override fun load(collection: String): Examples =
        reading {
            val declared = find(collection) ?: throw ExamplesException.tooFew("no examples in collection $collection")
            val sealed = rows("SELECT example FROM examples WHERE collection = ? ORDER BY id", collection) { it.getBlob(0) }
            decoded(declared.fields, sealed.map { sealer().open(it, collection) })
        }

    /** Remove the examples of a collection, or of all; their number. */
    @JvmOverloads
    public fun clear(collection: String? = null): Int =
        writing { if (collection == null) delete("examples", "1", null) else delete("examples", "collection = ?", arrayOf(collection)) }

    override fun close() {
        if (opening.isInitialized()) database.close()
    }

    private fun find(collection: String): Declared? =
        database.rows("SELECT declared FROM collections WHERE name = ?", collection) { Declared.of(it.getString(0)) }.firstOrNull()

    /** Remove what is too old or too many. Examples of the future are of now: the clock was ahead when they came. */
    private fun SQLiteDatabase.retain(collection: String, retention: Retention) {
        val at = now()
        if (at >= EARLIEST) execSQL("UPDATE examples SET at = ? WHERE collection = ? AND at > ?", arrayOf<Any>(at, collection, at))
        retention.maxAgeS?.let { execSQL("DELETE FROM examples WHERE collection = ? AND at < ?", arrayOf<Any>(collection, at - it)) }
        retention.most?.let {
            val kept = "SELECT id FROM examples WHERE collection = ? ORDER BY id DESC LIMIT ?"
            execSQL("DELETE FROM examples WHERE collection = ? AND id NOT IN ($kept)", arrayOf<Any>(collection, collection, it))
        }
    }

    private fun <T> writing(work: SQLiteDatabase.() -> T): T = usable { database.transact { database.work() } }

    private fun <T> reading(work: SQLiteDatabase.() -> T): T =
        writing {
            val all = rows("SELECT name, declared FROM collections") { it.getString(0) to Declared.of(it.getString(1)) }
            for ((name, declared) in all) retain(name, declared.retention)
            work()
        }

    private fun <T> usable(work: () -> T): T =
        try {
            mayWait()
            if (isStale) throw StateDamaged("these examples were erased: take the store from Muster again")
            work()
        } catch (error: SQLiteException) {
            throw StateDamaged("the examples cannot be used: ${error.message}")
        } catch (_: IllegalStateException) {
            throw StateDamaged("the examples are closed")
        } catch (error: FormatException) {
            throw StateDamaged("an example does not open: it was changed, or is of another installation (${error.message})")
        }
}

/** The bytes of an example: the fields of fixed size, and then each line of bytes with its length, without zeros at its end. */
private fun encoded(collection: String, fields: List<ExampleField>, example: Map<String, Any>): ByteArray {
    val names = fields.map { it.name }
    if (example.keys != names.toSet()) {
        throw invalid("an example of collection $collection has the fields ${names.sorted()}, not ${example.keys.sorted()}")
    }
    val bytes = fields.associateWith { bytesOf(it, example.getValue(it.name)) }
    val (lines, fixed) = fields.partition { it.isLine }
    val size = bytes.values.sumOf { it.size } + LENGTH_BYTES * lines.size
    val row = littleEndian(ByteArray(size))
    for (field in fixed) row.put(bytes.getValue(field))
    for (field in lines) row.putInt(bytes.getValue(field).size).put(bytes.getValue(field))
    return row.array()
}

private fun bytesOf(field: ExampleField, given: Any): ByteArray {
    if (field.isLine) return lineOf(field, given)
    val values = arrayOf(field, given)
    val bytes = ByteArray(field.width * field.dtype.bytes)
    val target = littleEndian(bytes)
    when (values) {
        is FloatArray -> target.asFloatBuffer().put(values)
        is LongArray -> target.asLongBuffer().put(values)
        is IntArray -> target.asIntBuffer().put(values)
        is ByteArray -> target.put(values)
    }
    return bytes
}

/** The values of a field in an array of its type, checked. */
private fun arrayOf(field: ExampleField, given: Any): Any {
    val values =
        when (field.dtype) {
            DType.FLOAT32 -> if (given is Number) floatArrayOf(given.toFloat()) else given as? FloatArray
            DType.INT64 -> if (isWhole(given)) longArrayOf((given as Number).toLong()) else given as? LongArray
            DType.INT32 -> if (isWhole(given)) intOf(given as Number)?.let { intArrayOf(it) } else given as? IntArray
            DType.UINT8 -> given as? ByteArray
        }
    val size = values?.let(java.lang.reflect.Array::getLength) ?: -1
    if (values == null || size != field.width) {
        val found = if (values == null) given.javaClass.simpleName else "$size values"
        throw invalid("field ${field.name} is $found; it takes ${field.dtype.text}${field.shape}")
    }
    val isHeld =
        when (values) {
            is FloatArray -> values.all { it.isFinite() }
            is LongArray -> field.high == null || values.all { it in 0 until field.high }
            is IntArray -> field.high == null || values.all { it in 0 until field.high }
            is ByteArray -> field.high == null || values.all { it.toInt() and 0xff < field.high }
            else -> false
        }
    return if (isHeld) values else throw invalid("field ${field.name} holds an infinity, a NaN or a number out of range")
}

private fun intOf(given: Number): Int? = given.toLong().toInt().takeIf { it.toLong() == given.toLong() }

private fun isWhole(given: Any) = given is Int || given is Long || given is Short || given is Byte

private fun lineOf(field: ExampleField, given: Any): ByteArray {
    val line = if (given is String) utf8(given) else given as? ByteArray
    if (line == null || line.size > field.width) {
        val found = line?.let { "${it.size} bytes" } ?: given.javaClass.simpleName
        throw invalid("field ${field.name} is $found; it takes a text or at most ${field.width} bytes")
    }
    return line.copyOf(line.indexOfLast { it != 0.toByte() } + 1)
}

/** The columns of encoded examples. */
private fun decoded(fields: List<ExampleField>, all: List<ByteArray>): Examples {
    val rows = all.map(::littleEndian)
    val (lines, fixed) = fields.partition { it.isLine }
    val columns = fixed.associate { it.name to column(it, rows) } + lines.associate { it.name to lines(it, rows) }
    if (rows.any { it.hasRemaining() }) throw FormatException("an example is longer than its fields")
    return Examples(all.size, columns)
}

private fun column(field: ExampleField, rows: List<ByteBuffer>): Column {
    val size = field.width * field.dtype.bytes
    val all = littleEndian(ByteArray(size * rows.size))
    for (row in rows) {
        if (row.remaining() < size) throw FormatException("an example is shorter than its fields")
        all.put(row.array(), row.position(), size)
        row.position(row.position() + size)
    }
    all.clear()
    val count = field.width * rows.size
    return when (field.dtype) {
        DType.FLOAT32 -> Column(field.shape, FloatArray(count).also { all.asFloatBuffer().get(it) })
        DType.INT64 -> Column(field.shape, LongArray(count).also { all.asLongBuffer().get(it) })
        DType.INT32 -> Column(field.shape, IntArray(count).also { all.asIntBuffer().get(it) })
        DType.UINT8 -> Column(field.shape, all.array())
    }
}

private fun lines(field: ExampleField, rows: List<ByteBuffer>): Column {
    val found =
        rows.map { row ->
            if (row.remaining() < LENGTH_BYTES) throw FormatException("an example is shorter than its fields")
            val size = row.int
            if (size < 0 || size > row.remaining()) throw FormatException("an example is shorter than its fields")
            ByteArray(size).also { row.get(it) }
        }
    var end = 0
    val ends = IntArray(found.size) { place -> (end + found[place].size).also { end = it } }
    return Column(field.shape, dev.muster.device.joined(found), ends)
}
