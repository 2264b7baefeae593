package dev.muster.device.permission

import dev.muster.device.Attester
import dev.muster.device.BlobCache
import dev.muster.device.Conditions
import dev.muster.device.Ed25519Key
import dev.muster.device.ExampleSource
import dev.muster.device.Json
import dev.muster.device.ModelRefused
import dev.muster.device.PlanRefused
import dev.muster.device.Platform
import dev.muster.device.Policy
import dev.muster.device.SigningKey
import dev.muster.device.StateDamaged
import dev.muster.device.Store
import dev.muster.device.base64
import dev.muster.device.base64url
import dev.muster.device.hex
import dev.muster.device.plans.vectorDigest
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.Signed
import okhttp3.HttpUrl.Companion.toHttpUrl
import okhttp3.OkHttpClient
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows

private const val NOW = 1_700_000_000.0
private val TRAINS = "a".repeat(64)
private val EVALUATES = "b".repeat(64)
private val FIRST = "c".repeat(64)

/** A device demands a release of a secure round and of a model, and none can be rolled back. */
class ReleasesTest {
    private val key = Ed25519Key(ByteArray(32) { 3 })
    private val log = Ed25519Key(ByteArray(32) { 4 })
    private val kept = HashMap<String, String>()
    private val platform = MemoryPlatform(kept)
    private val place = placeOf(Policy(signers = setOf(key.text)))
    private val model = floatArrayOf(0f, 1f, 2f)
    private val edges = floatArrayOf(0f, 1f)
    private val bounds =
        mapOf("clip_norm" to 1, "bits" to 20, "max_examples" to 9, "min_sum" to 8, "noise_multiplier" to 0.5, "honest" to 4)

    private fun placeOf(policy: Policy) = Place("http://127.0.0.1/".toHttpUrl(), "phones", policy)

    private fun signed(key: SigningKey, what: String, statement: Map<String, Any?>): Map<String, Any?> {
        val text = Json.write(statement)
        return mapOf("text" to text, "signer" to key.text, "value" to base64url(key.sign(utf8("muster.$what.v1\u0000$text"))))
    }

    private fun release(vararg changes: Pair<String, Any?>) =
        signed(
            key, "release",
            mapOf(
                "version" to 1, "population" to "phones", "plan" to TRAINS, "checkpoint" to FIRST, "bounds" to bounds,
                "evaluation" to mapOf("plan" to EVALUATES, "bounds" to bounds, "constants" to mapOf("edges" to vectorDigest(edges))),
                "lineage" to log.text, "counter" to 2, "expires_at" to NOW.toLong() + 1,
            ) + changes,
        )

    private fun digest(release: Map<String, Any?>) = hex(sha256(utf8(release["text"] as String)))

    private fun entry(round: Int, vararg changes: Pair<String, Any?>) =
        signed(
            log, "lineage",
            mapOf(
                "release" to digest(release()), "round" to round, "parent" to if (round == 1) FIRST else digits(round - 1),
                "checkpoint" to digits(round), "params" to vectorDigest(model),
            ) + changes,
        )

    private fun digits(round: Int) = round.toString().padStart(64, '0')

    /** An assignment to train in `round`, or with changes. */
    private fun given(round: Int, vararg changes: Pair<String, Any?>): Assignment {
        val blob = { sha256: String -> mapOf("sha256" to sha256, "size" to 1) }
        val members =
            mapOf(
                "outcome" to "assigned", "assignment" to "a", "task" to "t", "round" to round, "attempt" to 1, "slot" to 0, "seed" to 0,
                "plan" to blob(TRAINS), "checkpoint" to blob(if (round == 1) FIRST else digits(round - 1)), "report_within_s" to 60,
                "secagg" to "TTA=", "release" to release(), "lineage" to if (round == 1) null else entry(round - 1),
            ) + changes.map { (name, value) -> name to if (name in listOf("plan", "checkpoint")) blob(value as String) else value }
        return Assignment.of(Json.parse(Json.write(members), "assignment"))
    }

    private fun check(given: Assignment, place: Place = this.place, again: Boolean = false) = checkRelease(platform, place, given, again)

    private fun refuses(rule: String, given: Assignment, place: Place = this.place) {
        val before = HashMap(kept)
        val error = assertThrows<PlanRefused> { check(given, place) }
        assertTrue("against $rule of" in error.message!!, error.message)
        assertEquals(before, kept)
    }

    @Test
    fun `rounds of a release are accepted in turn, and remembered`() {
        for (round in 1..4) check(given(round))
        assertEquals("2", kept["released:${key.text}:phones"])
        val last = Json.parse(kept["lineage:${digest(release())}"]!!, "entry")
        assertEquals(Json.parse(entry(3)["text"] as String, "entry").members(), last.members())
        check(given(4))
        refuses("lineage", given(3))
        refuses("lineage", given(1))
    }

    @Test
    fun `a release that is not for this device, now, is refused`() {
        refuses("signers", given(1, "release" to null))
        refuses("signers", given(1, "release" to release() + ("signer" to log.text)))
        refuses("signers", given(1, "release" to release() + ("value" to "A".repeat(86))))
        refuses("signers", given(1, "release" to signed(key, "release", mapOf("version" to 1))))
        refuses("signers", given(1), placeOf(Policy()))
        refuses("release", given(1, "release" to release("population" to "others")))
        refuses("release", given(1, "release" to release("plan" to FIRST)))
        refuses("release", given(1, "release" to release("expires_at" to NOW.toLong())))
        refuses("min_noise_multiplier", given(1), placeOf(Policy(signers = setOf(key.text), minNoiseMultiplier = 0.6)))
    }

    @Test
    fun `a release with a lower counter than one before is refused`() {
        check(given(1))
        refuses("release", given(1, "release" to release("counter" to 1)))
        check(given(1, "release" to release("counter" to 3)))
        refuses("release", given(1))
    }

    @Test
    fun `a checkpoint must be of the release's lineage`() {
        refuses("lineage", given(1, "checkpoint" to digits(9)))
        refuses("lineage", given(2, "lineage" to null, "checkpoint" to FIRST))
        refuses("lineage", given(2, "checkpoint" to digits(9)))
        refuses("lineage", given(3, "lineage" to entry(1), "checkpoint" to digits(1)))
        refuses("lineage", given(1, "lineage" to entry(0, "parent" to FIRST), "checkpoint" to digits(0)))
        refuses("lineage", given(2, "lineage" to entry(1, "release" to digits(9))))
        refuses("lineage", given(2, "lineage" to entry(1, "parent" to digits(9))))
        refuses("signers", given(2, "lineage" to entry(1) + ("value" to "A".repeat(86))))
        val other = given(2, "release" to release("lineage" to key.text))
        refuses("lineage", other)
        check(given(3))
        refuses("lineage", given(3, "lineage" to entry(2, "parent" to digits(9))))
        refuses("lineage", given(4, "lineage" to entry(3, "parent" to digits(9))))
    }

    @Test
    fun `an evaluation is of a model of the lineage, older ones too`() {
        val evaluation = { entry: Map<String, Any?>? -> given(1, "plan" to EVALUATES, "lineage" to entry) }
        check(evaluation(entry(3)))
        check(evaluation(entry(2)))
        check(evaluation(entry(3)))
        refuses("lineage", evaluation(null))
        refuses("lineage", evaluation(entry(3, "params" to vectorDigest(edges))))
        refuses("lineage", evaluation(entry(2, "checkpoint" to digits(9))))
        refuses("lineage", given(2, "plan" to EVALUATES, "lineage" to entry(3)))
        val nameless = signed(log, "lineage", Json.parse(entry(4)["text"] as String, "entry").members() - "params")
        refuses("lineage", evaluation(nameless))
    }

    @Test
    fun `vectors must be those that an entry names`() {
        val named = given(2)
        val evaluated = given(1, "plan" to EVALUATES, "lineage" to entry(1))
        val nameless = signed(log, "lineage", Json.parse(entry(1)["text"] as String, "entry").members() - "params")
        checkModel(evaluated, mapOf("params" to model, "edges" to edges))
        checkModel(named, mapOf("params" to model, "c" to edges))
        checkModel(given(2, "lineage" to nameless), mapOf("params" to edges))
        checkModel(given(1), mapOf("params" to edges))
        checkModel(given(2, "secagg" to null), mapOf("params" to edges))
        val bad =
            listOf(
                Triple(evaluated, mapOf("params" to edges, "edges" to edges), "vector params .*not the model of round 1"),
                Triple(evaluated, mapOf("params" to model, "edges" to model), "vector edges .*not the released one"),
                Triple(evaluated, mapOf("params" to model, "more" to model), "vector more .*not the released one"),
                Triple(named, mapOf("params" to edges), "vector params .*not the model of round 1"),
            )
        for ((given, received, why) in bad) {
            val error = assertThrows<PlanRefused> { checkModel(given, received) }
            assertTrue(Regex(why) in error.message!!, error.message)
        }
    }

    private fun head(size: Int, root: ByteArray) = signed(log, "log", mapOf("size" to size, "root" to hex(root)))

    private fun logged(head: Map<String, Any?>, path: ByteArray, position: Int = 0) =
        given(1, "log" to mapOf("head" to head, "position" to position, "path" to base64(path)))

    @Test
    fun `a release must be in a log that only grows, if the policy wants one`() {
        val strict = placeOf(Policy(signers = setOf(key.text), requireReleaseLog = true))
        val leaf = sha256(byteArrayOf(0), utf8("${key.text}\n${release()["text"]}"))
        val sibling = ByteArray(32) { 7 }
        val root = sha256(byteArrayOf(1), leaf, sibling)
        val (small, large) = logged(head(1, leaf), ByteArray(0)) to logged(head(2, root), sibling)
        refuses("require_release_log", given(1), strict)
        refuses("require_release_log", logged(head(1, root), ByteArray(0)), strict)
        refuses("require_release_log", logged(head(1, leaf), sibling), strict)
        refuses("require_release_log", logged(head(2, root), sibling, position = 1), strict)
        refuses("require_release_log", logged(head(2, root), sibling, position = 2), strict)
        refuses("require_release_log", logged(head(2, root) + ("value" to "A".repeat(86)), sibling), strict)
        refuses("require_release_log", logged(signed(key, "log", mapOf("size" to 1, "root" to hex(leaf))), ByteArray(0)), strict)
        check(small, strict)
        check(large, strict)
        refuses("require_release_log", small, strict)
        check(small, strict, again = true)
        val forked = sha256(byteArrayOf(1), leaf, leaf)
        refuses("require_release_log", logged(head(2, forked), leaf), strict)
    }

    @Test
    fun `what is kept of releases is never believed when it is damaged`() {
        for (damage in listOf("x", "-2", "1.5", "[]")) {
            kept["released:${key.text}:phones"] = damage
            assertThrows<StateDamaged> { check(given(1)) }
        }
    }

    private fun modelRelease(vararg changes: Pair<String, Any?>): Signed {
        val blob = mapOf("sha256" to FIRST, "size" to 1)
        val statement =
            mapOf(
                "version" to 1, "population" to "phones", "name" to "digits", "number" to 1, "plan" to blob, "parameters" to blob,
                "counter" to 2,
            ) + changes
        return Signed.of(Json.parse(Json.write(signed(key, "model", statement)), "release"))
    }

    private fun takes(signed: Signed) =
        checkModelRelease(platform, signedRelease(place.policy, signed), signed.signer, "phones", "digits")

    @Test
    fun `a release of a model is for this population and name, and not rolled back`() {
        takes(modelRelease())
        takes(modelRelease("counter" to 3, "expires_at" to NOW.toLong() + 1))
        val bad =
            listOf("counter" to 2, "population" to "others", "name" to "letters", "expires_at" to NOW.toLong(), "number" to 0)
        for (change in bad) assertThrows<ModelRefused>("$change") { takes(modelRelease("counter" to 4, change)) }
        assertThrows<ModelRefused> { takes(modelRelease("counter" to 4).copy(signer = log.text)) }
        assertThrows<ModelRefused> { takes(modelRelease("counter" to 4).copy(value = "A".repeat(86))) }
        assertEquals("3", kept["model-released:${key.text}:phones:digits"])
        signedRelease(Policy(), modelRelease())
    }

    @Test
    fun `limits that keep a model away are named as limits`() {
        withinLimits { }
        val error = assertThrows<AgainstLimits> { withinLimits { throw refused("plan.parameters", "too many") } }
        assertTrue("plan.parameters" in error.message!!)
    }
}

/** A platform with a store in memory and a clock that stands still. */
private class MemoryPlatform(private val kept: MutableMap<String, String>) : Platform {
    override val store =
        object : Store {
            override fun get(key: String) = kept[key]

            override fun write(changes: Map<String, String?>) {
                for ((key, text) in changes) if (text == null) kept -= key else kept[key] = text
            }
        }
    override val blobs: BlobCache get() = throw UnsupportedOperationException()
    override val examples: ExampleSource get() = throw UnsupportedOperationException()
    override val http: OkHttpClient get() = throw UnsupportedOperationException()
    override val engineName = "none"
    override val memoryBytes: Long? = null
    override val attester: Attester? = null

    override fun random(size: Int) = ByteArray(size)

    override fun signingKey(name: String): SigningKey = throw UnsupportedOperationException()

    override fun conditions() = Conditions()

    override fun now() = NOW

    override fun workSeconds() = 0.0
}
