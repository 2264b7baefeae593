package dev.muster.device

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows
import javax.crypto.Cipher
import javax.crypto.Mac
import javax.crypto.spec.GCMParameterSpec
import javax.crypto.spec.SecretKeySpec

/** The primitives give published answers. */
class CryptographyTest {
    private val known = vectors("secagg/known_answers.json")
    private val wycheproof = vectors("secagg/wycheproof.json")

    private fun Json.bytes(name: String) = fromHex(get(name).text())

    private fun each(name: String, check: (Json) -> Unit): List<DynamicTest> =
        known[name]["vectors"].items().mapIndexed { place, one -> dynamicTest("vector $place") { check(one) } }

    /** Rows of Wycheproof: `check` gets the bytes, and whether they are valid. */
    private fun rows(name: String, check: (List<ByteArray>, Boolean) -> Unit): List<DynamicTest> =
        wycheproof[name].items().map { it.items() }.map { row ->
            val texts = row.drop(1).mapNotNull { it.value as? String }
            dynamicTest("vector ${row[0].value}") { check(texts.dropLast(1).map(::fromHex), texts.last() == "valid") }
        }

    @TestFactory
    fun `X25519 gives the RFC's secrets`() =
        each("x25519") { one ->
            val point = one.bytes("u")
            point[31] = (point[31].toInt() and 0x7f).toByte()
            assertEquals(one["output"].text(), hex(PairKey(one.bytes("scalar")).agree(point)))
        }

    @TestFactory
    fun `X25519 gives Wycheproof's secrets, or refuses a point of low order`(): List<DynamicTest> =
        wycheproof["x25519"].items().map { it.items() }.map { row ->
            dynamicTest("vector ${row[0].value}") {
                val (secret, point, shared) = row.subList(1, 4).map { fromHex(it.text()) }
                if (row[5].flag()) {
                    assertThrows<FormatException> { PairKey(secret).agree(point) }
                } else {
                    assertArrayEquals(shared, PairKey(secret).agree(point))
                }
            }
        }

    @TestFactory
    fun `Ed25519 gives the RFC's signatures`() =
        each("ed25519") { one ->
            val key = Ed25519Key(one.bytes("private"))
            val (message, signature) = one.bytes("message") to one.bytes("signature")
            assertEquals(one["public"].text(), hex(key.publicKey))
            assertArrayEquals(signature, key.sign(message))
            assertTrue(verifies(key.publicKey, signature, message))
            assertFalse(verifies(key.publicKey, signature, message + 0))
            assertFalse(verifies(key.publicKey, signature.copyOf(63), message))
        }

    @TestFactory
    fun `signatures are accepted and refused as they should`() =
        rows("ed25519") { (key, message, signature), isValid -> assertEquals(isValid, verifies(key, signature, message)) }

    @TestFactory
    fun `HKDF gives the RFC's first bytes`() =
        each("hkdf_sha256") { one ->
            assertEquals(one["okm"].text().take(64), hex(hkdf(one.bytes("ikm"), one.bytes("salt"), one.bytes("info"))))
        }

    @TestFactory
    fun `HKDF gives Wycheproof's first bytes`() =
        rows("hkdf_sha256") { (secret, salt, info, made), _ ->
            val size = minOf(made.size, KEY_BYTES)
            assertArrayEquals(made.copyOf(size), hkdf(secret, salt, info).copyOf(size))
        }

    @TestFactory
    fun `a keystream is AES-256-CTR from a zero counter`() =
        each("aes_256_ctr") { one ->
            val counter = one.bytes("counter")
            val block = Cipher.getInstance("AES/ECB/NoPadding")
            block.init(Cipher.ENCRYPT_MODE, SecretKeySpec(one.bytes("key"), "AES"))
            val first = block.doFinal(counter).zip(one.bytes("plaintext")) { a, b -> (a.toInt() xor b.toInt()).toByte() }
            assertEquals(hex(first.toByteArray()), one["ciphertext"].text().take(2 * first.size))
            val stream = ByteArray(16).also { Keystream(one.bytes("key")).fill(it) }
            assertArrayEquals(block.doFinal(ByteArray(16)), stream)
        }

    @Test
    fun `HMAC is the platform's, for keys of any length`() {
        for (size in 1..130) {
            val key = ByteArray(size) { it.toByte() }
            val mac = Mac.getInstance("HmacSHA256").apply { init(SecretKeySpec(key, "HmacSHA256")) }
            assertArrayEquals(mac.doFinal(key + 7), hmac(key, key, byteArrayOf(7)))
        }
        assertEquals("b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad", hex(hmac(ByteArray(0))))
    }

    @Test
    fun `a keystream is the same in pieces of any size`() {
        val key = ByteArray(KEY_BYTES) { 9 }
        val sizes = listOf(7, 16, 500, 1, 476, 70_000, 3)
        val whole = ByteArray(sizes.sum()).also { Keystream(key).fill(it) }
        val stream = Keystream(key)
        val pieces = sizes.map { size -> ByteArray(size + 100) { -1 }.also { stream.fill(it, size) }.copyOf(size) }
        assertArrayEquals(whole, joined(pieces))
    }

    @TestFactory
    fun `boxes of a zero nonce are GCM's`() =
        each("aes_256_gcm") { one ->
            val (key, about, plain) = Triple(one.bytes("key"), one.bytes("aad"), one.bytes("plaintext"))
            val box = Boxes().seal(key, plain, about)
            assertArrayEquals(plain, Boxes().open(key, box, about))
            assertThrows<FormatException> { Boxes().open(ByteArray(KEY_BYTES), box, about) }
            assertThrows<FormatException> { Boxes().open(key, box, about + 0) }
            box[0] = (box[0].toInt() xor 1).toByte()
            assertThrows<FormatException> { Boxes().open(key, box, about) }
            assertThrows<FormatException> { Boxes().open(key, box.copyOf(3), about) }
        }

    @TestFactory
    fun `the platform's GCM opens boxes as it should`() =
        rows("aes_gcm") { (key, nonce, about, plain, box), isValid ->
            val cipher = Cipher.getInstance("AES/GCM/NoPadding")
            val parameters = GCMParameterSpec(128, nonce)
            cipher.init(Cipher.DECRYPT_MODE, SecretKeySpec(key, "AES"), parameters)
            cipher.updateAAD(about)
            val opened = runCatching { cipher.doFinal(box) }.getOrNull()
            assertArrayEquals(if (isValid) plain else null, opened)
        }

    @Test
    fun `a box of zeros is the published one`() {
        val zeros = ByteArray(KEY_BYTES)
        val known = "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e2d46b7e01dcbc3baf13bcfc76a3bd207"
        assertEquals(known, hex(Boxes().seal(zeros, zeros, zeros)))
    }
}
