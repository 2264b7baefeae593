package dev.muster.device

import dev.muster.device.kept.AssignmentKeeper
import dev.muster.device.kept.KeptAssignment
import dev.muster.device.kept.Phase
import dev.muster.device.permission.Place
import dev.muster.device.plans.Field
import dev.muster.device.plans.VectorSpec
import dev.muster.device.plans.checkGraph
import dev.muster.device.plans.decodePlan
import dev.muster.device.plans.decodeVectors
import dev.muster.device.secagg.SecaggException
import dev.muster.device.secagg.checkCredential
import dev.muster.device.sessions.MemoryStore
import dev.muster.device.texts.Work
import dev.muster.device.texts.loadedTokenizer
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.CheckInAnswer
import dev.muster.device.wire.Enrolled
import dev.muster.device.wire.LineageEntry
import dev.muster.device.wire.Problem
import dev.muster.device.wire.Receipt
import dev.muster.device.wire.Release
import dev.muster.device.wire.Succession
import dev.muster.device.wire.TreeHead
import okhttp3.HttpUrl.Companion.toHttpUrl
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.TestFactory

/** Damaged bytes: every decoder refuses them with an error that it promises, or reads them as what they now are. */
class DamageTest {
    private val device = vectors("device.json")
    private val messages = device["messages"]["good"]
    private val statements = device["statements"]
    private val checkpoint = device["checkpoints"].items()[3]
    private val specs = checkpoint["vectors"].members().map { (name, one) -> VectorSpec(name, (one as List<*>).size) }
    private val target = Place("http://127.0.0.1:1".toHttpUrl(), "p", Policy())

    private fun json(text: String, of: (Json) -> Any) = utf8(text) to { data: ByteArray -> of(Json.parse(data, "it")) }

    private fun json(text: Json, of: (Json) -> Any) = json(text.text(), of)

    private val decoders: Map<String, Pair<ByteArray, (ByteArray) -> Any>> =
        mapOf(
            "an assignment" to json(messages["assignment"].items()[0], Assignment::of),
            "an answer to a check-in" to json(messages["checkIn"].items()[1], CheckInAnswer::of),
            "an answer to an enrolment" to json(messages["enrolled"].items()[0], Enrolled::of),
            "a problem" to json("""{"type": "urn:muster:problem:unavailable", "status": 503}""", Problem::of),
            "a receipt" to json("""{"assignment": "a", "task": "t", "round": 3, "sha256": "0"}""", Receipt::of),
            "a release" to json(statements["evaluating_release"]["text"], Release::of),
            "an origin" to json(statements["entry"]["text"], LineageEntry::of),
            "the head of a log" to json(statements["head"]["text"], TreeHead::of),
            "a succession" to json(Json.write(device["successions"].items()[1]["shown"].value), Succession::of),
            "a plan" to (utf8(device["plan"]["text"].text()) to { decodePlan(it, 1) }),
            "a checkpoint" to (fromHex(checkpoint["bytes"].text()) to { decodeVectors(it, specs) }),
            "a graph" to (fromHex(device["runner"]["graphs"]["train.step"].text()) to { checkGraph(it, "g") }),
            "a tokenizer" to (utf8(Json.write(vectors("tokenizers.json")["tokenizers"].items()[0]["file"].value)) to ::tokenizer),
            "a credential" to (ByteArray(88) to { checkCredential(ByteArray(32) { 2 }, ByteArray(32) { 3 }, it, 0u) }),
            "a policy" to (utf8("""{"min_cohort": 8, "signers": [], "plan": {"parameters": 9}}""") to { Policy.of(String(it)) }),
            "a kept assignment" to (keptAssignment() to ::keptAgain),
        )

    private fun tokenizer(data: ByteArray): Any {
        val blob = """{"sha256": "${"0".repeat(64)}", "size": 1}"""
        val field = """{"name": "x", "dtype": "int32", "shape": [8], "high": 9999, "tokenizer": {"blob": $blob}}"""
        return loadedTokenizer(Field.of(Json.parse(field, "field")), data, Work()).encode("a b", Work())
    }

    private fun keptAssignment(): ByteArray {
        val store = MemoryStore()
        val given = Assignment.of(Json.parse(messages["assignment"].items()[0].text(), "it"))
        AssignmentKeeper(store, target).keep(KeptAssignment(given, 1.5, Phase.TRAINED, byteArrayOf(1, 2, -1), "typed", 3, 4))
        return utf8(store.kept.values.single())
    }

    private fun keptAgain(data: ByteArray): Any {
        val store = MemoryStore().apply { kept["${Identity.ASSIGNMENT}${target.coordinator}:p"] = String(data) }
        return AssignmentKeeper(store, target).get()!!
    }

    @TestFactory
    fun `damaged bytes are refused by name`() =
        decoders.map { (name, decoder) ->
            dynamicTest(name) {
                val (data, decode) = decoder
                val refused = (0 until TIMES).count { seed -> isRefused(damaged(data, seed), decode) }
                assertTrue(refused > TIMES / 10, "$refused")
            }
        }

    private fun isRefused(data: ByteArray, decode: (ByteArray) -> Any): Boolean =
        try {
            decode(data)
            false
        } catch (_: DeviceException) {
            true
        } catch (_: SecaggException) {
            true
        }

    private companion object {
        val TIMES = System.getenv("MUSTER_FUZZ")?.toInt() ?: 300
    }
}
