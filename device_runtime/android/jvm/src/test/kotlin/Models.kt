/**
 * Models on devices for Python's tests: an order a line, an answer a line, both in JSON, as of `js/tests/models.ts`.
 *
 * With a number as the only word the process is killed at the write of the state that comes after so many.
 */
package dev.muster.device.jvm

import dev.muster.device.BlobCache
import dev.muster.device.Device
import dev.muster.device.DeviceException
import dev.muster.device.Json
import dev.muster.device.Model
import dev.muster.device.Platform
import dev.muster.device.Policy
import dev.muster.device.SessionConfig
import dev.muster.device.Store
import dev.muster.device.kept.journal
import okhttp3.HttpUrl.Companion.toHttpUrl
import java.io.File
import java.util.concurrent.Callable
import java.util.concurrent.Executors
import java.util.concurrent.Future
import kotlin.concurrent.thread

private val POOL = Executors.newFixedThreadPool(8) { task -> Thread(task).also { it.isDaemon = true } }

internal fun main(words: Array<String>) {
    val orders = Orders(words.firstOrNull()?.toInt())
    for (line in generateSequence(::readlnOrNull)) {
        println(Json.write(orders.answer(Json.parse(line, "order"))))
        System.out.flush()
    }
    Runtime.getRuntime().halt(0)
}

private class Orders(private val steps: Int?) {
    private lateinit var own: JvmPlatform
    private lateinit var device: Device
    private lateinit var model: Model
    private val warnings = ArrayList<String>()
    private var storm: List<Future<Double>> = emptyList()

    fun answer(order: Json): Map<String, Any?> {
        if (order["do"].text() == "leave") return leave()
        val answer =
            try {
                carryOut(order)
            } catch (error: DeviceException) {
                val name = error.javaClass.simpleName
                mapOf("error" to NAMES.getOrElse(name) { name.removeSuffix("Exception") }, "detail" to error.message)
            }
        val now = mapOf("version" to model.version, "personal" to model.personal, "journal" to journal(own.store).map { it.members }, "warnings" to warnings.toList())
        return answer + now
    }

    private fun leave(): Map<String, Any?> {
        storm.forEach { it.get() }
        model.close()
        own.close()
        return emptyMap()
    }

    private fun open(order: Json) {
        val state = File(order["state"].text())
        own = JvmPlatform(state, NpzExamples(File(state, "../examples.npz")))
        warnings.clear()
        storm = emptyList()
        val policy = Policy.of(Json.write(order["policy"].value))
        val labels = order.optional("labels")?.map(Json::text) ?: emptyMap()
        val config = SessionConfig(order["url"].text().toHttpUrl(), "phones", policy, waitS = 5.0, labels = labels)
        device = Device(if (steps == null) own else Mortal(own, steps), config) { warnings += it }
        model = device.model("keyboard")
    }

    private fun carryOut(order: Json): Map<String, Any?> =
        when (order["do"].text()) {
            "open" -> emptyMap<String, Any?>().also { open(order) }
            "refresh" -> mapOf("swapped" to model.refresh())
            "predict" -> model.predict(columns(order)).run { mapOf("outputs" to names.associateWith { numbers(get(it)) }) }
            "session" -> mapOf("outcome" to Json.parse(device.runOnce().toJson(), "outcome").value)
            "personalise" -> personalise()
            "forget" -> mapOf("forgot" to model.forget())
            "close" -> emptyMap<String, Any?>().also { model.close() }
            "storm" -> emptyMap<String, Any?>().also { storm = predicting(columns(order), order["calls"].size()) }
            "calm" -> mapOf("first" to storm.map { it.get() })
            "both" -> both()
            "swaps" -> swapping(columns(order), order["calls"].size())
            else -> error(order)
        }

    private fun personalise(): Map<String, Any?> =
        model.personalise().run {
            mapOf(
                "version" to version, "before" to before, "after" to after, "examples" to examples, "leftOut" to leftOut,
                "kept" to kept,
            )
        }

    /** A refresh while a session is under way. */
    private fun both(): Map<String, Any?> {
        val session = thread { device.runOnce() }
        Thread.sleep(10)
        try {
            return mapOf("swapped" to model.refresh())
        } finally {
            session.join()
        }
    }

    /** The different answers of so many calls, while the model becomes personal and is forgotten. */
    private fun swapping(inputs: Map<String, Any>, calls: Int): Map<String, Any?> {
        val asked = predicting(inputs, calls)
        var swaps = 0
        while (!asked.all { it.isDone }) {
            model.forget()
            model.personalise()
            swaps++
        }
        return mapOf("answers" to asked.map { it.get() }.distinct(), "calls" to calls, "swaps" to swaps)
    }

    /** The first value of `output` of so many calls, several at a time, which take a second: versions are swapped meanwhile. */
    private fun predicting(inputs: Map<String, Any>, calls: Int): List<Future<Double>> {
        val call =
            Callable {
                Thread.sleep(1)
                model.predict(inputs).floats("output")[0].toDouble()
            }
        return List(calls) { POOL.submit(call) }
    }
}

private val NAMES = mapOf("ExamplesException" to "ExamplesError", "ConfigException" to "ConfigError")

private fun columns(order: Json): Map<String, Any> =
    order["columns"].map { column ->
        val (type, all) = column.list { it }
        when (type.text()) {
            "text" -> all.list { it.text() }
            "float32" -> all.list { it.number().toFloat() }.toFloatArray()
            "int64" -> all.list { it.number().toLong() }.toLongArray()
            else -> all.list { it.number().toInt() }.toIntArray()
        }
    }

private fun numbers(values: Any): List<Number> =
    when (values) {
        is FloatArray -> values.map { it.toDouble() }
        is LongArray -> values.asList()
        is IntArray -> values.asList()
        else -> (values as ByteArray).map { it.toInt() and 0xff }
    }

/** A platform whose process is killed at the write that comes after so many. */
private class Mortal(own: JvmPlatform, private var rest: Int) : Platform by own {
    private fun count() {
        if (--rest < 0) ProcessBuilder("kill", "-9", "${ProcessHandle.current().pid()}").start().waitFor()
    }

    override val store: Store =
        object : Store by own.store {
            override fun write(changes: Map<String, String?>) {
                count()
                own.store.write(changes)
            }
        }
    override val blobs: BlobCache =
        object : BlobCache by own.blobs {
            override fun put(sha256: String, data: ByteArray) {
                count()
                own.blobs.put(sha256, data)
            }
        }
}
