package dev.muster.device

import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.annotation.Config
import java.io.File

/** An app's examples are checked against what was declared, sealed, and kept no longer than the app says. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class ExampleStoreTest {
    private val file = File(RuntimeEnvironment.getApplication().noBackupFilesDir, "examples.db")
    private var clock = 1_800_000_000.0
    private var secret = ByteArray(32)
    private val store = open()
    private val fields =
        listOf(
            ExampleField("x", DType.FLOAT32, listOf(2)),
            ExampleField("text", DType.UINT8, listOf(20)),
            ExampleField("y", DType.INT64, high = 10),
        )

    private fun open() = ExampleStore(file, { Sealer(secret) }) { clock }

    private fun example(y: Int): Map<String, Any> = mapOf("x" to floatArrayOf(y.toFloat(), 0.5f), "text" to "a text $y", "y" to y)

    @Test
    fun `examples come back as columns, in their order, from another opening too`() {
        store.declare("digits", fields)
        repeat(3) { store.append("digits", example(it)) }
        store.close()
        val again = open()
        val found = again.load("digits")
        assertEquals(3, found.count)
        assertArrayEquals(floatArrayOf(0f, 0.5f, 1f, 0.5f, 2f, 0.5f), found.columns.getValue("x").floats, 0f)
        assertArrayEquals(longArrayOf(0, 1, 2), found.columns.getValue("y").longs)
        assertEquals("a text 0a text 1a text 2", String(found.columns.getValue("text").bytes))
        assertArrayEquals(intArrayOf(8, 16, 24), found.columns.getValue("text").ends)
        assertEquals(mapOf("digits" to 3), again.counts())
        assertFalse("a text" in file.readBytes().toString(Charsets.ISO_8859_1))
    }

    @Test
    fun `examples that do not fit are refused by name, and nothing is added`() {
        store.declare("digits", fields)
        val refused =
            mapOf(
                (example(1) - "y") to "has the fields [text, x, y], not [text, x]",
                (example(1) + ("x" to floatArrayOf(1f))) to "field x is 1 values; it takes float32[2]",
                (example(1) + ("x" to floatArrayOf(1f, Float.NaN))) to "field x holds an infinity, a NaN or a number out of range",
                (example(1) + ("y" to 10)) to "field y holds an infinity, a NaN or a number out of range",
                (example(1) + ("y" to "one")) to "field y is String; it takes int64[]",
                (example(1) + ("text" to "a".repeat(21))) to "field text is 21 bytes; it takes a text or at most 20 bytes",
            )
        for ((given, words) in refused) {
            val error = assertThrows(ExamplesException::class.java) { store.append("digits", given) }
            assertTrue(error.message, words in error.message!!)
        }
        store.declare("counts", listOf(ExampleField("n", DType.INT32)))
        assertThrows(ExamplesException::class.java) { store.append("counts", mapOf("n" to (1L shl 40))) }
        assertThrows(ExamplesException::class.java) { ExampleField("n", DType.INT32, listOf(-1)) }
        assertThrows(ExamplesException::class.java) { store.append("letters", example(1)) }
        assertThrows(ExamplesException::class.java) { store.declare("digits", fields.drop(1)) }
        assertEquals(emptyMap<String, Int>(), store.counts())
    }

    @Test
    fun `what is too old or too many is removed, and a clock that was ahead keeps nothing for ever`() {
        store.declare("digits", fields, Retention(maxAgeS = 100.0, most = 2))
        repeat(3) { store.append("digits", example(it)) }
        assertArrayEquals(longArrayOf(1, 2), store.load("digits").columns.getValue("y").longs)
        clock += 60
        store.append("digits", example(3))
        assertEquals(1, store.countRecent("digits", 50.0))
        clock += 60
        assertEquals(mapOf("digits" to 1), store.counts())
        clock -= 10_000
        assertEquals(mapOf("digits" to 1), store.counts())
        clock += 101
        assertEquals(emptyMap<String, Int>(), store.counts())
    }

    @Test
    fun `under another key examples do not open, and can be cleared`() {
        store.declare("digits", fields)
        store.append("digits", example(1))
        secret = ByteArray(32) { 1 }
        assertThrows(StateDamaged::class.java) { store.load("digits") }
        assertEquals(1, store.clear())
    }
}
