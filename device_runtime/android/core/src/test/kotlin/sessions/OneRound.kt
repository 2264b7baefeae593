/** One clear round of the vectors' plan, on a device whose coordinator answers without a network. */
package dev.muster.device.sessions

import dev.muster.device.Attester
import dev.muster.device.BlobCache
import dev.muster.device.Column
import dev.muster.device.Conditions
import dev.muster.device.ExampleSource
import dev.muster.device.Examples
import dev.muster.device.Json
import dev.muster.device.Platform
import dev.muster.device.SessionConfig
import dev.muster.device.Stop
import dev.muster.device.Store
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.keptSigningKey
import dev.muster.device.plans.encodeVector
import dev.muster.device.plans.engineName
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.vectors
import okhttp3.HttpUrl.Companion.toHttpUrl
import okhttp3.Interceptor
import okhttp3.MediaType.Companion.toMediaType
import okhttp3.OkHttpClient
import okhttp3.Protocol
import okhttp3.Request
import okhttp3.Response
import okhttp3.ResponseBody.Companion.toResponseBody
import okio.Buffer

private val RUNNER = vectors("device.json")["runner"]

internal fun config(stop: Stop = Stop()) = SessionConfig("http://fl.example".toHttpUrl(), "p", waitS = 1.0, stop = stop)

/** An answer of the coordinator. */
internal class Answered(val body: ByteArray, val status: Int = 200)

/** The coordinator of the round, an assignment: `answer` may change what it answers to requests, which are numbered from 0. */
internal class Coordinator(
    private val assignment: String = "a",
    private val answer: (place: Int, good: ByteArray) -> Answered = { _, good -> Answered(good) },
) : Interceptor {
    val paths = ArrayList<String>()
    private val parts =
        listOf(utf8(RUNNER["plan"].text()), encodeVector("params", floats("params"))) +
            RUNNER["graphs"].members().values.map { fromHex(it as String) }
    private val blobs = parts.associateBy { hex(sha256(it)) }

    override fun intercept(chain: Interceptor.Chain): Response {
        val request = chain.request()
        paths += request.url.encodedPath
        val answered = answer(paths.size - 1, good(request))
        val type = if (answered.body.firstOrNull() == '{'.code.toByte()) "application/json" else "application/octet-stream"
        return Response.Builder().request(request).protocol(Protocol.HTTP_1_1).code(answered.status).message("")
            .header("content-type", type).body(answered.body.toResponseBody(type.toMediaType())).build()
    }

    private fun good(request: Request): ByteArray {
        val path = request.url.encodedPath
        return when (path.substringAfterLast('/')) {
            "devices" -> utf8("""{"device": "d-0"}""")
            "checkins" -> utf8("""{"outcome": "accepted", "session": "s", "offers": [{"task": "t", "collection": "default"}], $WINDOW}""")
            "assignments" -> utf8(assignment())
            "report" -> {
                val report = Buffer().also { request.body!!.writeTo(it) }.readByteArray()
                val round = mapOf("assignment" to assignment, "task" to "t", "round" to RUNNER["round"].size())
                utf8(Json.write(round + mapOf("sha256" to hex(sha256(report)))))
            }
            else -> blobs[path.substringAfterLast('/')] ?: ByteArray(0)
        }
    }

    private fun assignment(): String {
        val (plan, checkpoint) = parts.take(2).map { mapOf("sha256" to hex(sha256(it)), "size" to it.size) }
        val round = mapOf("round" to RUNNER["round"].size(), "attempt" to 1)
        val drawn = listOf("seed", "slot").associateWith { RUNNER[it].text().toLong() }
        val given = mapOf("outcome" to "assigned", "assignment" to assignment, "task" to "t", "plan" to plan, "checkpoint" to checkpoint)
        return Json.write(given + round + drawn + mapOf("report_within_s" to 60))
    }

    private companion object {
        const val WINDOW = """"retry": {"min_s": 5, "max_s": 30}"""
    }
}

private fun floats(name: String) = floatsOf(fromHex(RUNNER[name].text()))

/** Texts in memory. */
internal open class MemoryStore : Store {
    val kept = HashMap<String, String>()

    override fun get(key: String): String? = kept[key]

    override fun write(changes: Map<String, String?>) {
        for ((key, value) in changes) if (value == null) kept.remove(key) else kept[key] = value
    }
}

/** The round's examples. */
internal open class RoundExamples : ExampleSource {
    override fun counts() = mapOf("default" to RUNNER["examples"].size())

    override fun load(collection: String) =
        Examples(RUNNER["examples"].size(), mapOf("x" to Column(listOf(3), floats("x")), "y" to Column(emptyList(), floats("y"))))

    override fun countRecent(collection: String, maxAgeS: Double) = 0
}

/** A device of the round. */
internal open class RoundPlatform(coordinator: Interceptor, override val store: MemoryStore = MemoryStore()) : Platform {
    override val http: OkHttpClient = OkHttpClient.Builder().addInterceptor(coordinator).build()
    override val examples: ExampleSource = RoundExamples()
    override val engineName = engineName()
    override val memoryBytes: Long? = null
    override val attester: Attester? = null
    override val blobs =
        object : BlobCache {
            override fun get(sha256: String): ByteArray? = null

            override fun put(sha256: String, data: ByteArray) = Unit

            override fun trim(most: Long, keep: Set<String>) = Unit
        }

    override fun signingKey(name: String) = keptSigningKey(store, name)

    override fun conditions() = Conditions()

    override fun random(size: Int) = ByteArray(size)

    override fun now() = 1e9

    override fun workSeconds() = 0.0

    override fun sleep(seconds: Double, stop: Stop) = Unit
}
