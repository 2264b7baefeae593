/** Keys of the Android Keystore, which never leave it: for sealing, for signing, and new ones whose chains attest this phone. */
package dev.muster.device

import android.security.keystore.KeyGenParameterSpec
import android.security.keystore.KeyPermanentlyInvalidatedException
import android.security.keystore.KeyProperties
import java.math.BigInteger
import java.security.GeneralSecurityException
import java.security.KeyPairGenerator
import java.security.KeyStore
import java.security.PrivateKey
import java.security.ProviderException
import java.security.Signature
import java.security.UnrecoverableKeyException
import java.security.interfaces.ECPublicKey
import java.security.spec.ECGenParameterSpec
import javax.crypto.AEADBadTagException
import javax.crypto.Cipher
import javax.crypto.KeyGenerator
import javax.crypto.SecretKey
import javax.crypto.spec.GCMParameterSpec

private const val PROVIDER = "AndroidKeyStore"
private const val CIPHER = "AES/GCM/NoPadding"
private const val NONCE_BYTES = 12
private const val TAG_BITS = 128
private const val SCALAR_BYTES = 32

/** Where a P-256 signature in DER has the length of its first number, and how many bytes stand before each number. */
private const val FIRST_LENGTH = 3
private const val HEAD_BYTES = 2

private fun keystore(): KeyStore = KeyStore.getInstance(PROVIDER).apply { load(null) }

private inline fun <T> usable(work: () -> T): T =
    try {
        work()
    } catch (error: GeneralSecurityException) {
        throw StateDamaged("the Android Keystore cannot be used now: $error")
    } catch (error: ProviderException) {
        throw StateDamaged("the Android Keystore cannot be used now: $error")
    }

/** Remove a key: nothing that it wrapped opens again. Throws [StateDamaged]. */
internal fun removeKey(alias: String) = usable { keystore().deleteEntry(alias) }

/**
 * The key of this installation, which a restored copy of the app does not have.
 *
 * It wraps a secret, from which the keys of all that is sealed come, as the keystore itself takes milliseconds for each use. Every
 * method throws [StateDamaged] while the keystore cannot be used.
 */
internal class InstallationKey(private val alias: String) {
    /** A new secret of 32 bytes, and the same as only this key opens it. */
    fun newSecret(): Pair<ByteArray, ByteArray> =
        usable {
            val secret = platformRandom(KEY_BYTES)
            val cipher = Cipher.getInstance(CIPHER)
            cipher.init(Cipher.ENCRYPT_MODE, made())
            secret to cipher.iv + cipher.doFinal(secret)
        }

    /** The secret in what `newSecret` gave; null when this key is gone, or another. */
    fun open(wrapped: ByteArray): ByteArray? =
        usable {
            try {
                (keystore().getKey(alias, null) as SecretKey?)?.let { opened(it, wrapped) }
            } catch (_: UnrecoverableKeyException) {
                null
            } catch (_: KeyPermanentlyInvalidatedException) {
                null
            } catch (_: AEADBadTagException) {
                null
            }
        }

    private fun opened(key: SecretKey, wrapped: ByteArray): ByteArray? {
        if (wrapped.size < NONCE_BYTES) return null
        val cipher = Cipher.getInstance(CIPHER)
        cipher.init(Cipher.DECRYPT_MODE, key, GCMParameterSpec(TAG_BITS, wrapped, 0, NONCE_BYTES))
        return cipher.doFinal(wrapped, NONCE_BYTES, wrapped.size - NONCE_BYTES)
    }

    private fun made(): SecretKey {
        val spec =
            KeyGenParameterSpec.Builder(alias, KeyProperties.PURPOSE_ENCRYPT or KeyProperties.PURPOSE_DECRYPT)
                .setKeySize(8 * KEY_BYTES)
                .setBlockModes(KeyProperties.BLOCK_MODE_GCM)
                .setEncryptionPaddings(KeyProperties.ENCRYPTION_PADDING_NONE)
                .build()
        return KeyGenerator.getInstance(KeyProperties.KEY_ALGORITHM_AES, PROVIDER).apply { init(spec) }.generateKey()
    }
}

private fun makePair(alias: String, challenge: ByteArray? = null) {
    val spec =
        KeyGenParameterSpec.Builder(alias, KeyProperties.PURPOSE_SIGN)
            .setAlgorithmParameterSpec(ECGenParameterSpec("secp256r1"))
            .setDigests(KeyProperties.DIGEST_SHA256)
            .apply { if (challenge != null) setAttestationChallenge(challenge) }
            .build()
    KeyPairGenerator.getInstance(KeyProperties.KEY_ALGORITHM_EC, PROVIDER).apply { initialize(spec) }.generateKeyPair()
}

/** A P-256 key of the keystore, made at first. Throws [StateDamaged], also to sign. */
internal class KeystoreSigningKey(private val alias: String) : SigningKey {
    override val publicKey: ByteArray = usable { pointOf(certificate().publicKey as ECPublicKey) }

    override val text: String get() = "ecdsa-p256-sha256:${base64url(publicKey)}"

    override fun sign(message: ByteArray): ByteArray =
        usable {
            val signature = Signature.getInstance("SHA256withECDSA")
            signature.initSign(keystore().getKey(alias, null) as PrivateKey)
            signature.update(message)
            numbersOf(signature.sign())
        }

    private fun certificate() = keystore().getCertificate(alias) ?: makePair(alias).let { keystore().getCertificate(alias) }
}

/** An uncompressed point (SEC 1 §2.3.3), 65 bytes. */
private fun pointOf(key: ECPublicKey): ByteArray = byteArrayOf(4) + fixed(key.w.affineX) + fixed(key.w.affineY)

/** The two numbers of a signature in DER, 64 bytes. */
private fun numbersOf(der: ByteArray): ByteArray {
    val first = FIRST_LENGTH + 1
    val second = first + der[FIRST_LENGTH] + HEAD_BYTES
    return fixed(BigInteger(1, der.copyOfRange(first, second - HEAD_BYTES))) + fixed(BigInteger(1, der.copyOfRange(second, der.size)))
}

private fun fixed(number: BigInteger): ByteArray {
    val bytes = number.toByteArray().takeLast(SCALAR_BYTES).toByteArray()
    return ByteArray(SCALAR_BYTES - bytes.size) + bytes
}

/**
 * Evidence by Android Key Attestation: that the phone is in a state that the receiver takes, and the app the one that it knows.
 *
 * For each request the keystore makes a new key, whose chain of certificates holds the request's challenge.
 */
public class KeyAttestation internal constructor(private val alias: String) : Attester {
    public constructor() : this("dev.muster.device.attestation")

    /** Throws [StateDamaged] when the keystore makes no such key, as on phones without the hardware. */
    override fun attest(key: String, created: Long): Map<String, Any?> =
        usable {
            makePair(alias, attestationChallenge(key, created))
            try {
                mapOf("kind" to "android-key", "chain" to keystore().getCertificateChain(alias).map { it.encoded })
            } finally {
                keystore().deleteEntry(alias)
            }
        }
}
