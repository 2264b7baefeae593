/**
 * A device's part in a recorded session of SA1, from M0 to M11, as a block of work.
 *
 * The folder holds `session.json`, with keys, draws, what it `received` and `sent` in hex, and `vector.f32`.
 */
package dev.muster.device.jvm

import dev.muster.device.Ed25519Key
import dev.muster.device.Json
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.secagg.AggregationPolicy
import dev.muster.device.secagg.Client
import dev.muster.device.secagg.DIGEST_BYTES
import dev.muster.device.secagg.HeldModel
import dev.muster.device.secagg.SessionInput
import java.io.File

/** A recorded session, to be replayed any number of times. */
internal class SecureBlock(folder: File) {
    private val session = Json.parse(File(folder, "session.json").readBytes(), "session")
    private val messages = session["received"].list(::bytes)
    private val answers = session["sent"].list(::bytes)
    private val drawn = session["drawn"].list(::bytes)
    private val identity = Ed25519Key(bytes(session["identity"]))
    private val policy = AggregationPolicy(bytes(session["server"]), bytes(session["authority"]), minSum = 2)
    private val input =
        SessionInput(
            vector = floatsOf(File(folder, "vector.f32").readBytes()),
            weight = session["weight"].count(),
            held = HeldModel(ByteArray(DIGEST_BYTES), ByteArray(DIGEST_BYTES)),
            credential = bytes(session["credential"]),
            lastRound = -1,
            now = 0,
        )

    private fun bytes(json: Json) = fromHex(json.text())

    /** Take part once. Throws [IllegalStateException] unless every answer has the recorded bytes. */
    fun replay() {
        val draws = drawn.iterator()
        val client = Client(identity, policy, input) { draws.next() }
        messages.forEachIndexed { step, message ->
            check(client.receive(message).message.contentEquals(answers[step])) { "M${2 * step + 1} has other bytes" }
        }
    }
}
