/** Cryptography: digests and ciphers by the platform, Ed25519 and X25519 by Bouncy Castle, as Android has neither before API 33. */
package dev.muster.device

import org.bouncycastle.math.ec.rfc7748.X25519
import org.bouncycastle.math.ec.rfc8032.Ed25519
import java.security.GeneralSecurityException
import java.security.MessageDigest
import java.security.SecureRandom
import javax.crypto.Cipher
import javax.crypto.spec.GCMParameterSpec
import javax.crypto.spec.IvParameterSpec
import javax.crypto.spec.SecretKeySpec

internal const val KEY_BYTES = 32
private const val SIGNATURE_BYTES = 64
private const val BLOCK_BYTES = 16
private const val TAG_BYTES = 16

// The bytes of a block of SHA-256, and the paddings of HMAC.
private const val HASHED_BYTES = 64
private const val INNER = 0x36
private const val OUTER = 0x5c

/**
 * A private key that signs. [text] is its public key as the protocol writes it, such as `ed25519:…`, and [publicKey] the bytes
 * of that.
 */
public interface SigningKey {
    public val publicKey: ByteArray

    public val text: String

    /** A signature as the protocol writes it: of Ed25519 64 bytes, and of P-256 r and s, 64 bytes together. */
    public fun sign(message: ByteArray): ByteArray
}

/** To look an algorithm up costs more than to digest a message. */
private val SHA256 = ThreadLocal.withInitial { MessageDigest.getInstance("SHA-256") }

/** SHA-256, 32 bytes. */
internal fun sha256(vararg parts: ByteArray): ByteArray {
    val digest = SHA256.get()
    for (part in parts) digest.update(part)
    return digest.digest()
}

/** HMAC with SHA-256 (RFC 2104), 32 bytes. */
internal fun hmac(key: ByteArray, vararg parts: ByteArray): ByteArray {
    val padded = (if (key.size > HASHED_BYTES) sha256(key) else key).copyOf(HASHED_BYTES)
    return sha256(padded xor OUTER, sha256(padded xor INNER, *parts))
}

private infix fun ByteArray.xor(byte: Int) = ByteArray(size) { (this[it].toInt() xor byte).toByte() }

/** HKDF-SHA-256 (RFC 5869) to 32 bytes. */
internal fun hkdf(secret: ByteArray, salt: ByteArray, info: ByteArray): ByteArray =
    hmac(hmac(salt, secret), info, byteArrayOf(1))

/** The key of 32 secret bytes that signs by Ed25519. */
public class Ed25519Key(private val secret: ByteArray) : SigningKey {
    init {
        if (secret.size != KEY_BYTES) throw StateDamaged("a private key of ${secret.size} bytes, not $KEY_BYTES")
    }

    override val publicKey: ByteArray = ByteArray(KEY_BYTES).also { Ed25519.generatePublicKey(secret, 0, it, 0) }

    override val text: String get() = "ed25519:${base64url(publicKey)}"

    override fun sign(message: ByteArray): ByteArray {
        val signature = ByteArray(SIGNATURE_BYTES)
        Ed25519.sign(secret, 0, publicKey, 0, message, 0, message.size, signature, 0)
        return signature
    }
}

/** Whether an Ed25519 public key made the signature over the message; false for what is no key or no signature. */
internal fun verifies(publicKey: ByteArray, signature: ByteArray, message: ByteArray): Boolean =
    publicKey.size == KEY_BYTES &&
        signature.size == SIGNATURE_BYTES &&
        Ed25519.verify(signature, 0, publicKey, 0, message, 0, message.size)

/** The private key of 32 bytes that makes secrets with peers by X25519. */
internal class PairKey(private val secret: ByteArray) {
    val publicKey: ByteArray = ByteArray(KEY_BYTES).also { X25519.generatePublicKey(secret, 0, it, 0) }

    /** The shared secret with a peer's public key, 32 bytes. Throws [FormatException] for a key of low order. */
    fun agree(peer: ByteArray): ByteArray {
        if (peer.size != KEY_BYTES) throw FormatException("a public key of ${peer.size} bytes")
        val shared = ByteArray(KEY_BYTES)
        if (!X25519.calculateAgreement(secret, 0, peer, 0, shared, 0)) throw FormatException("the public key has low order")
        return shared
    }
}

/** Boxes of AES-256-GCM with a zero nonce, one after the other: to look the cipher up costs more than a box. */
internal class Boxes {
    private val cipher = Cipher.getInstance("AES/GCM/NoPadding")

    /** A box. A key must seal only one. */
    fun seal(key: ByteArray, content: ByteArray, about: ByteArray): ByteArray = with(Cipher.ENCRYPT_MODE, key, about).doFinal(content)

    /** The content of a box. Throws [FormatException] when it does not open. */
    fun open(key: ByteArray, box: ByteArray, about: ByteArray): ByteArray {
        if (box.size < TAG_BYTES) throw FormatException("a box of ${box.size} bytes has no tag")
        try {
            return with(Cipher.DECRYPT_MODE, key, about).doFinal(box)
        } catch (_: GeneralSecurityException) {
            throw FormatException("a box does not open")
        }
    }

    private fun with(mode: Int, key: ByteArray, about: ByteArray): Cipher {
        cipher.init(mode, SecretKeySpec(key, "AES"), GCMParameterSpec(8 * TAG_BYTES, ByteArray(12)))
        cipher.updateAAD(about)
        return cipher
    }
}

/** What a stream is laid over. A cipher that writes over what it reads copies it first. */
private val ZEROS = ByteArray(1 shl 16)

/** The stream of AES-256-CTR under a key, from a zero counter block, read from front to end. */
internal class Keystream(key: ByteArray) {
    private val cipher = Cipher.getInstance("AES/CTR/NoPadding")

    init {
        cipher.init(Cipher.ENCRYPT_MODE, SecretKeySpec(key, "AES"), IvParameterSpec(ByteArray(BLOCK_BYTES)))
    }

    /** Fill the first `size` bytes of `target` with the next ones of the stream. */
    fun fill(target: ByteArray, size: Int = target.size) {
        for (at in 0 until size step ZEROS.size) {
            val piece = minOf(ZEROS.size, size - at)
            check(cipher.update(ZEROS, 0, piece, target, at) == piece) // a cipher that holds bytes back would leave masks on a sum
        }
    }
}

private val RANDOM = SecureRandom()

/** Random bytes, from the platform. */
internal fun platformRandom(size: Int): ByteArray = ByteArray(size).also(RANDOM::nextBytes)
