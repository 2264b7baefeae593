/**
 * The device's half of the wire protocol: its calls, which of them are repeated, and the one that it holds meanwhile.
 *
 * Spec: docs/spec/wire.md.
 */
package dev.muster.device.protocol

import dev.muster.device.BadAnswer
import dev.muster.device.BlobCache
import dev.muster.device.BytesMoved
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.Platform
import dev.muster.device.Refused
import dev.muster.device.Stop
import dev.muster.device.TransportException
import dev.muster.device.Unreachable
import dev.muster.device.hex
import dev.muster.device.plain
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.isBlob
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.CheckInAnswer
import dev.muster.device.wire.Enrolled
import dev.muster.device.wire.Issued
import dev.muster.device.wire.Receipt
import dev.muster.device.wire.Settled
import dev.muster.device.wire.Signed
import dev.muster.device.wire.WIRE_VERSION
import dev.muster.device.wire.assignmentOrRejected
import okhttp3.HttpUrl
import okio.Buffer
import java.util.Locale
import kotlin.concurrent.thread
import kotlin.math.floor
import kotlin.math.max
import kotlin.math.min
import kotlin.math.pow
import kotlin.random.Random

private const val RETRIES = 3
private const val FIRST_DELAY_S = 0.5
private const val LONGEST_DELAY_S = 60.0
// A stopped session ends within a second.
private const val LEAVING_S = 0.8

// A larger report is uploaded resumably, so that a broken connection loses nothing.
private const val LARGEST_WHOLE = 8 shl 20

// A body arrived damaged, or an upload began at another offset: the next attempt asks for the offset again.
private val SENT_AGAIN = setOf("digest-mismatch", "mismatching-offset")

// Rounds that a coordinator knows no more: what they made does not count.
private val FORGOTTEN = setOf("unknown-assignment", "foreign-assignment")
private const val UNRESERVED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~"

/** The device's identity for the coordinator. `signer` may enrol first; after `forget` it does. */
internal interface Caller {
    fun signer(): Signer

    fun forget()
}

/**
 * A conversation with one coordinator, or enrolment authority.
 *
 * A call is repeated on 429, on 503, when the coordinator is too new for a signature, when the connection breaks, and when a proxy
 * sent a request twice: 3 times before there is an assignment, and 3 times within it. If the coordinator finds this device's clock
 * wrong, its time is used for signatures from then on. Once `stopping`, running calls are cut, later ones have [LEAVING_S], and
 * none is repeated. Every method throws [Unreachable], [Refused] or [BadAnswer].
 */
internal class Transport(private val platform: Platform, private val base: HttpUrl, val stopping: Stop = Stop()) {
    var caller: Caller? = null
    val moved = BytesMoved()

    /** The time at which the last call about an assignment ended, in seconds; infinity during one. */
    @Volatile
    var spokeAt = Double.NEGATIVE_INFINITY
        private set
    private var left = RETRIES

    @Volatile
    private var aheadS = 0.0

    /** Check in: this device is willing. */
    fun checkIn(population: String, message: Map<String, Any?>): CheckInAnswer =
        message("/v1/populations/${segment(population)}/checkins", message, CheckInAnswer::of)

    /** Wait, for about `waitS` seconds, to be selected for one of `tasks`: an Assignment, or a Rejected. */
    fun awaitAssignment(session: String, waitS: Double, tasks: List<String>): Any {
        val path = "/v1/sessions/${segment(session)}/assignments"
        val answer = message(path, mapOf("tasks" to tasks), ::assignmentOrRejected, waitS)
        left = RETRIES
        return answer
    }

    /** A blob's bytes, checked. arrived: what earlier sessions brought; it keeps what this one brings if it breaks off. */
    fun blob(ref: BlobRef, arrived: Buffer = Buffer()): ByteArray {
        val isGuess = arrived.size > 0
        val etag = "\"${ref.sha256}\""
        val body =
            again {
                val rest = if (arrived.size > 0) mapOf("range" to "bytes=${arrived.size}-", "if-range" to etag) else emptyMap()
                attempt(Call("GET", "/v1/blobs/${ref.sha256}", headers = rest, most = ref.size, arrived = arrived, etag = etag))
            }.body
        if (isBlob(ref, body)) return body
        arrived.clear()
        if (isGuess) return blob(ref, arrived) // they were damaged
        throw BadAnswer("blob ${ref.sha256.take(12)}… of ${ref.size} bytes arrived as ${body.size} others")
    }

    /** The release of a model's version that this device is to use; null if there is none for it. labels: those that it tells. */
    fun model(population: String, name: String, labels: Map<String, String>): Signed? {
        val query = labels.map { (label, value) -> "$label=${segment(value)}" }.joinToString("&")
        val path = "/v1/populations/${segment(population)}/models/$name" + if (query.isEmpty()) "" else "?$query"
        try {
            return read(path, again { attempt(Call("GET", path)) }) { Signed.of(it["release"]) }
        } catch (error: Refused) {
            if (error.reason == "no-model") return null
            throw error
        }
    }

    /** Upload the report. Repeating it is safe: the coordinator counts a digest once. */
    fun report(assignment: String, body: ByteArray) {
        val path = "${assignmentPath(assignment)}/report"
        val answer =
            again {
                if (body.size > LARGEST_WHOLE) bringTheRest(path, body) else attempt(Call("PUT", path, body, BYTES_TYPE))
            }
        if (read(path, answer, Receipt::of).sha256 != hex(sha256(body))) throw BadAnswer("the receipt is for another report")
    }

    /** Hold an assignment for about `waitS` seconds, without retries. Throws [Refused] if the report is not needed. */
    fun hold(assignment: String, waitS: Double, cancelled: Stop) {
        attempt(Call("GET", assignmentPath(assignment), headers = prefer(waitS), timeoutS = waitS + TIMEOUT_S, cancelled = cancelled))
    }

    /**
     * The message of a secure aggregation with that number, or what follows it when it is given and sent.
     *
     * Null when there is none within about `waitS` seconds. Repeating it is safe.
     */
    fun secagg(assignment: String, number: Int, waitS: Double, sent: ByteArray? = null): ByteArray? {
        val path = "${assignmentPath(assignment)}/secagg/$number"
        val type = if (sent == null) emptyMap() else BYTES_TYPE
        val call = Call(if (sent == null) "GET" else "PUT", path, sent, type + prefer(waitS), waitS + TIMEOUT_S)
        val answer = again { attempt(call) }
        return if (answer.status == 204) null else answer.body
    }

    /** Give the assignment up. */
    fun abort(assignment: String, reason: String) {
        val body = utf8(Json.write(mapOf("reason" to reason)))
        again { attempt(Call("POST", "${assignmentPath(assignment)}:abort", body, JSON_TYPE)) }
    }

    /** What became of the round of an assignment; that it does not count if the coordinator knows none such. */
    fun outcome(assignment: String): Settled {
        val path = "${assignmentPath(assignment)}/outcome"
        try {
            return read(path, again { attempt(Call("GET", path)) }, Settled::of)
        } catch (error: Refused) {
            if (error.reason in FORGOTTEN) return Settled(counted = false, over = false)
            throw error
        }
    }

    /** Enrol at the coordinator. message: makes the request for a time. Repeating it is safe. */
    fun enrol(newcomer: Signer, message: (Long) -> Map<String, Any?>): Enrolled =
        introduce("/v1/devices", newcomer, message, Enrolled::of)

    /** Request a credential from an enrolment authority. Repeating it is safe. */
    fun credential(newcomer: Signer, message: (Long) -> Map<String, Any?>): Issued =
        introduce("/v1/credentials", newcomer, message, Issued::of)

    private fun <T> introduce(path: String, newcomer: Signer, message: (Long) -> Map<String, Any?>, of: (Json) -> T): T {
        val answer =
            again {
                val created = now()
                val body = utf8(Json.write(mapOf("version" to WIRE_VERSION) + message(created)))
                send(platform, base, Call("POST", path, body, JSON_TYPE, cancelled = stopping), newcomer, created, moved)
            }
        return read(path, answer, of)
    }

    private fun <T> message(path: String, message: Map<String, Any?>, of: (Json) -> T, waitS: Double = 0.0): T {
        val body = utf8(Json.write(mapOf("version" to WIRE_VERSION) + message))
        val headers = JSON_TYPE + if (waitS > 0) prefer(waitS) else emptyMap()
        val call = Call("POST", path, body, headers, waitS + TIMEOUT_S)
        return read(path, again { attempt(call) }, of)
    }

    /** Upload the part that the coordinator does not have yet. */
    private fun bringTheRest(path: String, body: ByteArray): Answer {
        val headers = attempt(Call("HEAD", path)).headers
        val arrived = if (headers["upload-complete"] == "?1") body.size.toLong() else headers["upload-offset"]?.toLongOrNull()
        if (arrived == null || arrived !in 0..body.size) {
            throw BadAnswer("the coordinator does not say how much of the report has arrived")
        }
        val about =
            mapOf(
                "content-type" to "application/partial-upload",
                "upload-offset" to "$arrived",
                "upload-length" to "${body.size}",
                "upload-complete" to "?1",
                "repr-digest" to digestField(sha256(body)),
            )
        val rest = if (arrived < body.size) body.copyOfRange(arrived.toInt(), body.size) else null
        return attempt(Call("PATCH", path, rest, about))
    }

    private fun attempt(call: Call): Answer {
        val signer = checkNotNull(caller) { "a transport without an identity only introduces" }.signer()
        val isAboutAssignment = call.path.startsWith("/v1/assignments/")
        try {
            if (isAboutAssignment) spokeAt = Double.POSITIVE_INFINITY
            val bounded = if (stopping.isSet) call.with(timeoutS = LEAVING_S) else call.with(cancelled = call.cancelled ?: stopping)
            return send(platform, base, bounded, signer, now(), moved)
        } finally {
            if (isAboutAssignment) spokeAt = platform.now()
        }
    }

    /** The answer of the first successful attempt within the rules. Each kind of refusal is mended once. */
    private fun again(attempt: () -> Answer): Answer {
        val mended = HashSet<String>()
        var tries = 0
        while (true) {
            val error =
                try {
                    return attempt()
                } catch (error: TransportException) {
                    error
                }
            if (error is Refused && error.reason !in mended && mend(error)) {
                mended += error.reason
                continue
            }
            val askedS = (error as? Refused)?.hints?.afterS ?: 0.0
            if (!passes(error) || stopping.isSet || left == 0 || askedS > LONGEST_DELAY_S) throw error
            left--
            platform.sleep(max(askedS, FIRST_DELAY_S * 2.0.pow(tries++) * (0.5 + Random.nextDouble() / 2)), stopping)
        }
    }

    /** Remove the cause of a refusal, so that the call is worth another attempt at once; false if impossible. */
    private fun mend(error: Refused): Boolean {
        val theirTime = error.hints.theirTime
        if (error.reason == "unknown-device" && caller != null) {
            caller?.forget()
            return true
        }
        if (error.reason == "stale-signature" && theirTime != null && error.hints.afterS == 0.0) {
            aheadS = theirTime - platform.now()
            return true
        }
        return error.reason in SENT_AGAIN
    }

    /** The coordinator's time, as far as known, in whole seconds. */
    private fun now(): Long = floor(platform.now() + aheadS).toLong()
}

/**
 * A blob that is kept, or is fetched and kept.
 *
 * If the connection breaks for good, what arrived is kept in its place, so that a later session fetches the rest.
 */
internal fun keptOrFetched(ref: BlobRef, blobs: BlobCache, transport: Transport): ByteArray {
    val kept = blobs.get(ref.sha256)
    if (kept != null && isBlob(ref, kept)) return kept
    val arrived = Buffer()
    if (kept != null && kept.size < ref.size) arrived.write(kept)
    try {
        return transport.blob(ref, arrived).also { blobs.put(ref.sha256, it) }
    } catch (error: TransportException) {
        if (kept != null || arrived.size > 0) blobs.put(ref.sha256, arrived.readByteArray())
        throw error
    }
}

/** Whether the same call may succeed later in this session. */
private fun passes(error: TransportException): Boolean =
    when (error) {
        is Unreachable -> true
        is BadAnswer -> false
        is Refused ->
            error.status == 429 || error.status == 503 || error.reason == "replayed-signature" ||
                (error.reason == "stale-signature" && error.hints.afterS > 0) // the coordinator has just begun
    }

private fun <T> read(path: String, answer: Answer, of: (Json) -> T): T {
    if (answer.headers["content-type"]?.startsWith("application/json") != true) {
        // Usually a captive portal's or a proxy's page, which is gone in minutes.
        throw BadAnswer("$path was answered with something other than JSON")
    }
    try {
        return of(Json.parse(answer.body, "answer"))
    } catch (error: FormatException) {
        throw BadAnswer(plain("$path: ${error.message}"))
    }
}

private fun prefer(waitS: Double): Map<String, String> = mapOf("prefer" to "wait=${Math.round(waitS)}")

private fun assignmentPath(assignment: String): String = "/v1/assignments/${segment(assignment)}"

/** A text as one segment of a path. */
private fun segment(text: String): String =
    utf8(text).joinToString("") { byte ->
        val letter = byte.toInt().toChar()
        if (letter in UNRESERVED) "$letter" else "%" + hex(byteArrayOf(byte)).uppercase(Locale.ROOT)
    }

private const val SHARE = 0.2
private const val SHORTEST_S = 0.05
private const val LONGEST_S = 3600.0
private const val LONGEST_WAIT_S = 60.0

/** The hold on an assignment that this device works on, until `end`. A no-op without `lostAfterS`. */
internal class Hold(private val platform: Platform, private val transport: Transport, private val given: Assignment) {
    private val over = Stop()
    private val began = platform.now()

    @Volatile
    private var isOpen = false

    @Volatile
    private var refused: Refused? = null

    init {
        given.lostAfterS?.let { lostAfterS ->
            val afterS = min(max(SHORTEST_S, SHARE * lostAfterS), LONGEST_S)
            thread(isDaemon = true, name = "muster-hold") { keep(afterS) }
        }
    }

    /** End the hold: the work is over. */
    fun end() = over.set()

    /** Throws [Refused] once the coordinator has said that it no longer wants the report. */
    fun check() {
        refused?.let { throw it }
    }

    /** Ask whether the report is still needed. Throws as `check`; without an answer, the report may be needed. */
    fun ask() {
        check()
        if (isOpen) return
        try {
            transport.hold(given.assignment, 0.0, over)
        } catch (error: TransportException) {
            if (error is Refused && error.isNotWanted) throw error
        }
    }

    private fun keep(afterS: Double) {
        val waitS = min(max(1.0, afterS / SHARE), LONGEST_WAIT_S)
        var restS = afterS
        while (true) {
            platform.sleep(restS, over)
            if (over.isSet) return
            val silentS = platform.now() - max(began, transport.spokeAt)
            // A clock that was set back says nothing about the silence.
            restS =
                if (silentS < afterS && (silentS >= 0 || silentS == Double.NEGATIVE_INFINITY)) {
                    min(afterS, afterS - silentS)
                } else {
                    held(afterS, waitS) ?: return
                }
        }
    }

    /** Hold once; the seconds to the next time, or null when nothing is left to hold. */
    private fun held(afterS: Double, waitS: Double): Double? {
        val at = platform.now()
        try {
            isOpen = true
            transport.hold(given.assignment, waitS, over)
            return min(afterS, max(0.0, afterS - (platform.now() - at)))
        } catch (error: Exception) { // what nobody catches would end an app
            if (error !is Refused) return afterS / 2
            if (!error.isFinal) return max(afterS / 2, min(error.hints.afterS, 2 * afterS))
            if (error.isNotWanted) refused = error
            return null
        } finally {
            isOpen = false
        }
    }
}
