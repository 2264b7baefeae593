/**
 * A call as one HTTP request: signed anew at every attempt, its answer bounded in time and size.
 *
 * A signature is of RFC 9421, by the profile with which a device proves its identity. Spec: docs/spec/wire.md §1, §7, §10.
 */
package dev.muster.device.protocol

import dev.muster.device.BadAnswer
import dev.muster.device.BytesMoved
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.Platform
import dev.muster.device.RefusalHints
import dev.muster.device.Refused
import dev.muster.device.SigningKey
import dev.muster.device.Stop
import dev.muster.device.Unreachable
import dev.muster.device.base64
import dev.muster.device.base64url
import dev.muster.device.hex
import dev.muster.device.plain
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.wire.Problem
import okhttp3.Authenticator
import okhttp3.CookieJar
import okhttp3.Dns
import okhttp3.Headers
import okhttp3.Headers.Companion.toHeaders
import okhttp3.HttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrl
import okhttp3.Interceptor
import okhttp3.MediaType
import okhttp3.OkHttpClient
import okhttp3.Request
import okhttp3.RequestBody
import okhttp3.Response
import okio.Buffer
import okio.BufferedSink
import java.io.IOException
import java.net.InetAddress
import java.util.concurrent.FutureTask
import java.util.concurrent.TimeUnit
import kotlin.concurrent.thread

private val COVERED = listOf("@method", "@authority", "@path", "@query")
private val SIGNED_FIELDS = listOf("content-digest", "upload-offset", "upload-length", "upload-complete", "repr-digest")
private const val VALIDITY_S = 300
private const val NONCE_BYTES = 16
private const val ID_HEX = 32

internal const val TIMEOUT_S = 30.0
private const val LARGEST_MESSAGE = 1L shl 20

/** The least bytes of a body per second; a slower peer counts as gone (docs/spec/wire.md §1). */
private const val SLOWEST = 1000.0
private const val PIECE = 1L shl 16
private const val URN = "urn:muster:problem:"
internal val JSON_TYPE = mapOf("content-type" to "application/json")
internal val BYTES_TYPE = mapOf("content-type" to "application/octet-stream")
private val SECONDS = Regex("[0-9]{1,9}")

/** The parts of a request that a signature can cover. Names of header fields are in lower case. */
internal class SignableRequest(val method: String, val url: HttpUrl, val fields: Map<String, String>)

/** The signer of requests: a private key, and the name by which the coordinator finds the public one. */
internal class Signer(val keyid: String, val key: SigningKey)

/** The two header fields that sign a request, made at `created`, in seconds since 1970. */
internal fun signatureFields(signer: Signer, request: SignableRequest, created: Long, random: (Int) -> ByteArray): Map<String, String> {
    val covered = COVERED + SIGNED_FIELDS.filter { it in request.fields }
    val times = "created=$created;expires=${created + VALIDITY_S}"
    val names = covered.joinToString(" ") { "\"$it\"" }
    val parameters = "($names);$times;nonce=\"${base64url(random(NONCE_BYTES))}\";keyid=\"${signer.keyid}\""
    val signature = signer.key.sign(signatureBase(request, covered, parameters))
    return mapOf("signature-input" to "device=$parameters", "signature" to "device=:${base64(signature)}:")
}

/** The text that is signed (RFC 9421 §2.5): a line for each component, and one for the parameters. */
internal fun signatureBase(request: SignableRequest, covered: List<String>, parameters: String): ByteArray {
    val derived =
        mapOf(
            "@method" to request.method,
            "@authority" to authorityOf(request.url),
            "@path" to request.url.encodedPath,
            "@query" to "?${request.url.encodedQuery ?: ""}",
        )
    val lines = covered.map { "\"$it\": ${derived[it] ?: request.fields[it]}" }
    return utf8((lines + "\"@signature-params\": $parameters").joinToString("\n"))
}

/** The field `Host` of requests to a URL. */
private fun authorityOf(url: HttpUrl): String {
    val host = if (':' in url.host) "[${url.host}]" else url.host
    return if (url.port == HttpUrl.defaultPort(url.scheme)) host else "$host:${url.port}"
}

/** A digest of 32 bytes as Content-Digest and Repr-Digest say it (RFC 9530). */
internal fun digestField(digest: ByteArray): String = "sha-256=:${base64(digest)}:"

/** The id of the device with this public key (as text); it depends on nothing else. */
internal fun deviceId(key: String): String = hex(sha256(utf8(key))).take(ID_HEX)

/**
 * One call of the wire protocol.
 *
 * timeoutS: for the head of the answer, once the body has left, and for each piece of the answer's body; for all of it where nothing
 * can cancel the call. most: bytes of that body.
 * arrived: the bytes that earlier attempts brought of the body with this `etag`; an answer goes on with them, or begins anew.
 */
internal class Call(
    val method: String,
    val path: String,
    val body: ByteArray? = null,
    val headers: Map<String, String> = emptyMap(),
    val timeoutS: Double = TIMEOUT_S,
    val most: Long = LARGEST_MESSAGE,
    val arrived: Buffer = Buffer(),
    val etag: String? = null,
    val cancelled: Stop? = null,
) {
    val name get() = "$method $path"

    fun with(headers: Map<String, String> = this.headers, timeoutS: Double = this.timeoutS, cancelled: Stop? = this.cancelled) =
        Call(method, path, body, headers, timeoutS, most, arrived, etag, cancelled)
}

/** An answer that was read to its end. */
internal class Answer(val status: Int, val headers: Headers, val body: ByteArray)

/**
 * Make a call once. created: the time of its signature, in seconds since 1970.
 *
 * Throws [Unreachable], [BadAnswer] or [Refused].
 */
internal fun send(platform: Platform, base: HttpUrl, call: Call, signer: Signer, created: Long, moved: BytesMoved): Answer {
    val url = (base.toString().trimEnd('/') + call.path).toHttpUrl()
    val fields = call.headers + (call.body?.let { mapOf("content-digest" to digestField(sha256(it))) } ?: emptyMap())
    val signature = signatureFields(signer, SignableRequest(call.method, url, fields), created, platform::random)
    val answer =
        try {
            exchange(platform.http, url, call, fields + signature, moved)
        } catch (error: IOException) {
            throw Unreachable("${call.name}: ${plain(error.toString())}")
        }
    if (answer.status !in 200..299) throw refusal(call.name, answer)
    return answer
}

private fun exchange(http: OkHttpClient, url: HttpUrl, call: Call, fields: Map<String, String>, moved: BytesMoved): Answer {
    val stop = call.cancelled ?: Stop()
    val wholeS = call.timeoutS + if (call.cancelled == null) 0.0 else ((call.body?.size ?: 0) + call.most) / SLOWEST
    // An app's client may have more than a connection: nothing of the app's may leave, and no nonce be sent twice.
    val client =
        http.newBuilder().retryOnConnectionFailure(false).followRedirects(false)
            .cache(null).cookieJar(CookieJar.NO_COOKIES).authenticator(Authenticator.NONE)
            .addNetworkInterceptor(::withoutRepetition)
            .dns(Names(http.dns, stop, wholeS))
            .readTimeout(millis(call.timeoutS), TimeUnit.MILLISECONDS)
            .writeTimeout(millis(TIMEOUT_S), TimeUnit.MILLISECONDS)
            .callTimeout(millis(wholeS), TimeUnit.MILLISECONDS)
            .build()
    val headers = fields + ("accept-encoding" to "identity")
    val body = call.body ?: if (call.method in listOf("POST", "PUT", "PATCH")) ByteArray(0) else null
    val request = Request.Builder().url(url).headers(headers.toHeaders()).method(call.method, body?.let { Body(it, moved) })
    val running = client.newCall(request.build())
    return stop.use(running::cancel) { running.execute().use { read(call, it, moved) } }
}

/** OkHttp repeats a request at once where the answer 503 says to come back in 0 seconds. */
private fun withoutRepetition(chain: Interceptor.Chain): Response =
    chain.proceed(chain.request()).let { if (it.header("retry-after") == "0") it.newBuilder().removeHeader("retry-after").build() else it }

/** Looks names up on a thread of its own, since nothing but time ends that, and gives up once `stop` is set. */
private class Names(private val names: Dns, private val stop: Stop, private val timeoutS: Double) : Dns {
    override fun lookup(hostname: String): List<InetAddress> {
        val found = FutureTask { names.lookup(hostname) }
        thread(isDaemon = true, name = "muster-names", block = found::run)
        try {
            return stop.use({ found.cancel(true) }) { found.get(millis(timeoutS), TimeUnit.MILLISECONDS) }
        } catch (error: Exception) {
            throw error.cause as? IOException ?: IOException("$hostname was not found: $error")
        }
    }

    // A connection is used again by calls with equal means.
    override fun equals(other: Any?): Boolean = other is Names && other.names == names

    override fun hashCode(): Int = names.hashCode()
}

private fun millis(seconds: Double): Long = minOf(1000 * seconds, Int.MAX_VALUE.toDouble()).toLong()

/** A body whose bytes are counted as they leave. */
private class Body(private val data: ByteArray, private val moved: BytesMoved) : RequestBody() {
    override fun contentType(): MediaType? = null

    override fun contentLength(): Long = data.size.toLong()

    override fun writeTo(sink: BufferedSink) {
        for (at in data.indices step PIECE.toInt()) {
            val size = minOf(PIECE.toInt(), data.size - at)
            sink.write(data, at, size)
            moved.up += size
        }
    }
}

private fun read(call: Call, response: Response, moved: BytesMoved): Answer {
    val most = if (response.isSuccessful) call.most else LARGEST_MESSAGE // a problem may be longer than a small blob
    val goesOn = response.code == 206 && response.header("content-range")?.startsWith("bytes ${call.arrived.size}-") == true
    val data = if (response.isSuccessful && (goesOn || response.header("etag") == call.etag)) call.arrived else Buffer()
    if (!goesOn) data.clear()
    val source = response.body.source()
    while (true) {
        val size = source.read(data, PIECE)
        if (size < 0) break
        moved.down += size
        if (data.size > most) throw BadAnswer("${call.name}: the answer is longer than $most bytes")
    }
    return Answer(response.code, response.headers, data.snapshot().toByteArray())
}

/** The error for an answer with a problem; without a problem document, one made from the status. */
private fun refusal(name: String, answer: Answer): Refused {
    val after = answer.headers["retry-after"]?.takeIf(SECONDS::matches)?.toDouble() ?: 0.0
    val theirTime = answer.headers.getDate("date")?.let { it.time / 1000.0 }
    try {
        val problem = Problem.of(Json.parse(answer.body, "problem"))
        val hints = RefusalHints(problem.retry, after, theirTime)
        return Refused(answer.status, plain(problem.type.removePrefix(URN)), plain(problem.detail), hints)
    } catch (_: FormatException) { // to HEAD, or by a proxy
        val named = plain(answer.headers["muster-problem"] ?: "http-${answer.status}")
        return Refused(answer.status, named, "$name was answered with status ${answer.status}", RefusalHints(null, after, theirTime))
    }
}
