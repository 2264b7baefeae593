package dev.muster.device.models

import dev.muster.device.InputRefused
import dev.muster.device.Json
import dev.muster.device.ModelRefused
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.encodeVector
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.vectors
import dev.muster.device.wire.ModelRelease
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import java.lang.management.BufferPoolMXBean
import java.lang.management.ManagementFactory
import java.util.concurrent.atomic.AtomicBoolean
import java.util.concurrent.atomic.AtomicReference
import kotlin.concurrent.thread

/** `MatMul(example.x, params)`, as Python's `onnx` writes it. */
private const val GRAPH =
    "080a3a770a230a096578616d706c652e780a06706172616d7312066f757470757422064d61744d756c120567726170685a1c0a096578616d706c652e78120f0a" +
        "0d080112090a031201420a0208035a140a06706172616d73120a0a08080112040a02080362150a066f7574707574120b0a09080112050a0312014242040a00" +
        "1012"
private val ROWS = floatArrayOf(1f, 0f, 0f, 0f, 1f, 0f, 0f, 0f, 1f)

/** A version predicts in any thread, refuses inputs that do not fit, and keeps its memory for later calls. */
class VersionTest {
    private val blobs = HashMap<String, ByteArray>()

    private fun blob(data: ByteArray): BlobRef {
        val digest = hex(sha256(data))
        blobs[digest] = data
        return BlobRef(digest, data.size.toLong())
    }

    private fun version(number: Int = 1, params: FloatArray = FloatArray(3) { number.toFloat() }): Version {
        val graph = blob(fromHex(GRAPH))
        val predict =
            mapOf(
                "inputs" to listOf("x"), "outputs" to listOf(mapOf("name" to "output", "dtype" to "float32")), "batch_size" to 1,
                "graphs" to mapOf("onnx" to mapOf("sha256" to graph.sha256, "size" to graph.size)),
            )
        val plan = Json.parse(vectors("device.json")["runner"]["plan"].text(), "plan").members() + ("predict" to predict)
        val parameters = blob(encodeVector("params", params))
        val release = ModelRelease("phones", "keyboard", number, blob(utf8(Json.write(plan))), parameters, 1, null)
        val get = { ref: BlobRef -> blobs.getValue(ref.sha256) }
        return Version.load(release, recipeOf(release, get), get)
    }

    private fun Version.output(rows: FloatArray = ROWS) = predict(mapOf("x" to rows))!!.floats("output")

    @Test
    fun `any number of rows gives an output for each`() {
        val version = version(params = floatArrayOf(1f, 2f, 3f))
        version.tryOut()
        assertArrayEquals(floatArrayOf(1f, 2f, 3f), version.output())
        assertArrayEquals(floatArrayOf(6f), version.output(floatArrayOf(1f, 1f, 1f)))
        assertEquals(100, version.output(FloatArray(300)).size)
        assertThrows<IllegalArgumentException> { version.predict(mapOf("x" to ROWS))!!.longs("output") }
    }

    @Test
    fun `inputs that do not fit are refused by name`() {
        val version = version()
        val refused =
            mapOf(
                mapOf("y" to ROWS) to "the model takes the inputs x, not y",
                mapOf("x" to IntArray(3)) to "input x is IntArray of 3 values, the model takes FloatArray of n × 3 values",
                mapOf("x" to FloatArray(4)) to "input x is FloatArray of 4 values, the model takes FloatArray of n × 3 values",
                mapOf("x" to "a text") to "input x is String, the model takes FloatArray of n × 3 values",
                mapOf("x" to FloatArray(0)) to "input x holds 0 rows; all must hold the same number, at least 1",
            )
        for ((given, words) in refused) assertEquals(words, assertThrows<InputRefused> { version.predict(given) }.message)
    }

    @Test
    fun `what is not finite, or of another size, is refused`() {
        assertThrows<ModelRefused> { version(params = floatArrayOf(1f, Float.NaN, 0f)) }
        assertThrows<ModelRefused> { version(params = FloatArray(4)) }
        assertThrows<ModelRefused> { version(params = FloatArray(3) { Float.MAX_VALUE }).tryOut() }
    }

    @Test
    fun `a call that began before a swap ends on its version, and later ones know that it is gone`() {
        val current = AtomicReference(version(1))
        val failed = AtomicReference<Throwable>()
        val isOver = AtomicBoolean()
        val callers =
            List(8) {
                thread {
                    while (!isOver.get()) {
                        try {
                            val found = current.get().predict(mapOf("x" to ROWS)) ?: continue
                            check(found.floats("output").distinct().size == 1)
                        } catch (error: Exception) {
                            failed.set(error)
                        }
                    }
                }
            }
        for (number in 2..50) current.getAndSet(version(number)).retire()
        isOver.set(true)
        callers.forEach(Thread::join)
        assertNull(failed.get())
        assertArrayEquals(floatArrayOf(50f, 50f, 50f), current.get().output())
        current.get().retire()
        assertNull(current.get().predict(mapOf("x" to ROWS)))
    }

    @Test
    fun `calls of as many rows take the same native memory`() {
        val version = version()
        val pool = ManagementFactory.getPlatformMXBeans(BufferPoolMXBean::class.java).first { it.name == "direct" }
        val rows = FloatArray(30)
        version.output(rows)
        val before = pool.count
        repeat(1000) { version.output(rows) }
        assertEquals(before, pool.count)
    }
}
