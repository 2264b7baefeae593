package dev.muster.device.wire

import dev.muster.device.Ed25519Key
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.base64url
import dev.muster.device.bytesOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.plans.BlobRef
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

/** Signed statements are read and verified as in Python. */
class StatementsTest {
    private val device = vectors("device.json")
    private val given = device["statements"]
    private val key = Ed25519Key(ByteArray(32) { 1 })

    private fun signed(name: String) = Signed.of(given[name])

    private fun sign(what: String, text: String) =
        Signed(text, key.text, base64url(key.sign(utf8("muster.$what.v1\u0000$text"))))

    @Test
    fun `a plan's signature is its signer's, over this plan`() {
        val (plan, signature) = BlobRef.of(given["plan"]) to Signature.of(given["plan_signature"])
        verifyPlan(plan, signature)
        assertThrows<FormatException> { verifyPlan(BlobRef("00".repeat(32), plan.size), signature) }
    }

    @Test
    fun `releases are read, with a seed and an evaluation where they have them`() {
        val release = verifiedRelease(signed("release"))
        assertEquals("phones", release.population)
        assertNull(release.seed)
        assertNull(release.bounds.target)
        assertEquals("region = eu", verifiedRelease(signed("targeted_release")).bounds.target)
        assertNull(release.evaluation)
        assertEquals(given["release"]["digest"].text(), signed("release").digest)
        assertEquals(device["messages"]["seed"].text(), verifiedRelease(signed("keyed_release")).seed.toString())
        val evaluating = verifiedRelease(signed("evaluating_release"))
        assertEquals(evaluating.evaluation, evaluating.evaluationBy("12".repeat(32)))
        assertNull(evaluating.evaluationBy(evaluating.plan))
        assertEquals(evaluating.bounds.clipNorm, evaluating.boundsOf("12".repeat(32)).clipNorm)
    }

    @Test
    fun `entries of a lineage and heads of a log are read`() {
        assertEquals(1, verifiedEntry(signed("entry")).round)
        assertNull(verifiedEntry(signed("entry")).params)
        val params = device["checkpoints"].items()[3]["vectors"]["params"].list { it.number().toFloat() }.toFloatArray()
        assertEquals(hex(sha256(bytesOf(params))), verifiedEntry(signed("evaluated_entry")).params)
        assertEquals(3, verifiedHead(signed("head")).size)
    }

    @Test
    fun `what is kept of an entry and of a head is read again`() {
        for (name in listOf("entry", "evaluated_entry")) {
            val entry = verifiedEntry(signed(name))
            assertEquals(entry.members(), LineageEntry.of(Json.parse(Json.write(entry.members()), "entry")).members())
        }
        val head = verifiedHead(signed("head"))
        assertEquals(head.members(), TreeHead.of(Json.parse(Json.write(head.members()), "head")).members())
    }

    @Test
    fun `one changed character is seen`() {
        val release = signed("release")
        assertThrows<FormatException> { verifiedRelease(release.copy(text = release.text.replace("phones", "phoney"))) }
        assertThrows<FormatException> { verifiedEntry(release) }
        assertThrows<FormatException> { verifiedRelease(release.copy(value = release.value + "=")) }
        val error = assertThrows<FormatException> { verifiedHead(signed("head").copy(signer = "${release.signer}=")) }
        assertEquals(true, "not a public key" in error.message!!)
    }

    @TestFactory
    fun `a release that is not of its form is refused, whoever signed it`(): List<DynamicTest> {
        val text = given["evaluating_release"]["text"].text()
        verifiedRelease(sign("release", text))
        val changes =
            listOf(
                "\"version\":1" to "\"version\":2",
                "\"version\":1" to "\"versions\":1",
                "\"clip_norm\":1.5" to "\"clip_norm\":0",
                "\"bits\":20" to "\"bits\":21",
                "\"bits\":20" to "\"bits\":1",
                "\"bits\":20" to "\"bits\":2.5",
                "\"honest\":" to "\"honest\":-1,\"other\":",
                "\"noise_multiplier\":" to "\"noise_multiplier\":1e7,\"other\":",
                "\"counter\":" to "\"counter\":0.5,\"other\":",
                "\"population\":\"" to "\"population\":1,\"other\":\"",
                "\"evaluation\":{" to "\"evaluation\":null,\"other\":{",
                "{" to "{\"seed\":-1,",
                "{" to "{\"seed\":9223372036854775808,",
            )
        return changes.map { (from, to) ->
            dynamicTest("$from → $to") {
                assertEquals(true, from in text)
                assertThrows<FormatException> { verifiedRelease(sign("release", text.replaceFirst(from, to))) }
            }
        }
    }

    @Test
    fun `a release of a model is read, and refused under another name`() {
        val blob = """{"sha256":"${"ab".repeat(32)}","size":7}"""
        val text = """{"version":1,"population":"phones","name":"digits","number":3,"plan":$blob,"parameters":$blob,"counter":4}"""
        val release = verifiedModelRelease(sign("model", text))
        assertEquals(listOf("digits", 3, 4L, null), listOf(release.name, release.number, release.counter, release.expiresAt))
        assertEquals(release.plan, release.parameters)
        for ((from, to) in listOf("digits" to "Digits", "digits" to "digits\\n", ":3" to ":0", ":3" to ":2147483648")) {
            assertThrows<FormatException> { verifiedModelRelease(sign("model", text.replaceFirst(from, to))) }
        }
    }

    @TestFactory
    fun `a plan's signature is the published one`(): List<DynamicTest> =
        vectors("signature.json").items().map { one ->
            dynamicTest(one["plan"].text()) {
                val plan = BlobRef(hex(sha256(utf8(one["plan"].text()))), 0)
                val signer = Ed25519Key(fromHex(one["private_key"].text()))
                assertEquals(one["signer"].text(), signer.text)
                assertEquals(one["value"].text(), base64url(signer.sign(fromHex(one["message"].text()))))
                verifyPlan(plan, Signature.of(one))
            }
        }

    @TestFactory
    fun `a pinned key leads where Python says`(): List<DynamicTest> =
        device["successions"].items().mapIndexed { place, one ->
            dynamicTest("succession $place") {
                val shown = Succession.of(Json.parse(one["shown"].text(), "succession"))
                val pinned = fromHex(one["pinned"].text())
                val leadsTo = one.nullable("leads_to")?.text()
                if (leadsTo == null) {
                    assertThrows<FormatException> { shown.follow("server", pinned) }
                } else {
                    assertEquals(leadsTo, hex(shown.follow("server", pinned)))
                }
            }
        }

    @Test
    fun `a succession has sixteen successors at most`() {
        val one = """{"key":"${"A".repeat(43)}=","signature":"${"A".repeat(86)}=="}"""
        val shown = { count: Int -> """{"first":"${"A".repeat(43)}=","successors":[${List(count) { one }.joinToString()}]}""" }
        assertEquals(16, Succession.of(Json.parse(shown(16), "succession")).successors.size)
        assertThrows<FormatException> { Succession.of(Json.parse(shown(17), "succession")) }
    }
}
