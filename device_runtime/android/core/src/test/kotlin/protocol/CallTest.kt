package dev.muster.device.protocol

import dev.muster.device.Ed25519Key
import dev.muster.device.Json
import dev.muster.device.SharedSecret
import dev.muster.device.attestationChallenge
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.vectors
import dev.muster.device.verifies
import dev.muster.device.wire.publicKey
import okhttp3.HttpUrl.Companion.toHttpUrl
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.MethodSource

/** Requests are signed as every coordinator verifies them. */
class CallTest {
    @ParameterizedTest
    @MethodSource("good")
    fun `the base of a signature is the vector's`(one: Case) {
        val (covered, parameters) = one.input
        assertEquals(one.json["base"].text(), String(signatureBase(one.request, covered, parameters)))
    }

    @Test
    fun `a signature verifies, and its fields are in their one spelling`() {
        val key = Ed25519Key(ByteArray(32) { 7 })
        val request = SignableRequest("GET", "https://fl.example.org/v1/blobs/a?b=%C3%BC".toHttpUrl(), emptyMap())
        val fields = signatureFields(Signer("d", key), request, 1_763_740_800) { ByteArray(it) { place -> place.toByte() } }
        val parameters = fields.getValue("signature-input").removePrefix("device=")
        val base = signatureBase(request, listOf("@method", "@authority", "@path", "@query"), parameters)
        val signature = java.util.Base64.getDecoder().decode(fields.getValue("signature").removePrefix("device=:").removeSuffix(":"))
        assertTrue(verifies(publicKey(key.text), signature, base))
        assertTrue(parameters.endsWith(";created=1763740800;expires=1763741100;nonce=\"AAECAwQFBgcICQoLDA0ODw\";keyid=\"d\""))
    }

    @Test
    fun `a device's id depends on its key alone`() {
        val masking = vectors("device.json")["masking"]
        assertEquals(masking["device"].text(), deviceId(masking["device_key"].text()))
    }

    @Test
    fun `evidence for a key and a time is Python's`() {
        for (one in vectors("device.json")["attestations"].items()) {
            val (key, created) = one["key"].text() to one["created"].count()
            val proof = SharedSecret(fromHex(one["secret"].text())).attest(key, created)
            assertEquals(one["proof"].map { it.text() }, proof)
            assertEquals(one["challenge"].text(), hex(attestationChallenge(key, created)))
        }
    }

    /** A request of the vectors. */
    class Case internal constructor(internal val json: Json) {
        internal val request: SignableRequest
            get() {
                val url = "https://${json["host"].text()}${json["target"].text()}".toHttpUrl()
                return SignableRequest(json["method"].text(), url, json["fields"].map { it.text() })
            }
        internal val input: Pair<List<String>, String>
            get() {
                val parameters = json["signature_input"].text().substringAfter('=')
                return Regex("\"([^\"]+)\"").findAll(parameters.substringBefore(')')).map { it.groupValues[1] }.toList() to parameters
            }

        override fun toString() = json["name"].text()
    }

    companion object {
        @JvmStatic
        fun good() = vectors("requests.json").items().filter { it["outcome"].text() == "good" }.map(::Case)
    }
}
