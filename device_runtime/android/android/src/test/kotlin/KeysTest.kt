package dev.muster.device

import org.bouncycastle.asn1.ASN1OctetString
import org.bouncycastle.asn1.ASN1Sequence
import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.annotation.Config
import java.io.ByteArrayInputStream
import java.math.BigInteger
import java.security.AlgorithmParameters
import java.security.KeyFactory
import java.security.Signature
import java.security.cert.CertificateFactory
import java.security.cert.X509Certificate
import java.security.spec.ECGenParameterSpec
import java.security.spec.ECParameterSpec
import java.security.spec.ECPoint
import java.security.spec.ECPublicKeySpec

/** The place of the challenge in the description of an attested key. */
private const val CHALLENGE = 4

/** Keys of the keystore sign as the protocol wants, and vouch for this phone. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class KeysTest {
    @Before
    fun install() = FakeKeystore.install()

    @Test
    fun `the device's key is of P-256, the same each time, and its signatures are r and s`() {
        val key = KeystoreSigningKey("test")
        assertEquals("ecdsa-p256-sha256:${base64url(key.publicKey)}", KeystoreSigningKey("test").text)
        assertEquals(65, key.publicKey.size)
        val parameters = AlgorithmParameters.getInstance("EC", BC).apply { init(ECGenParameterSpec("secp256r1")) }
        val (x, y) = listOf(1..32, 33..64).map { BigInteger(1, key.publicKey.sliceArray(it)) }
        val spec = ECPublicKeySpec(ECPoint(x, y), parameters.getParameterSpec(ECParameterSpec::class.java))
        repeat(200) { place ->
            val message = byteArrayOf(place.toByte())
            val signature = key.sign(message)
            assertEquals(64, signature.size)
            val verifier = Signature.getInstance("SHA256withPLAIN-ECDSA", BC)
            verifier.initVerify(KeyFactory.getInstance("EC", BC).generatePublic(spec))
            verifier.update(message)
            assertTrue(verifier.verify(signature))
        }
    }

    @Test
    fun `evidence is the chain of a new key, made for the request's challenge`() {
        val evidence = KeyAttestation().attest("ed25519:key", 1_763_740_800)
        assertEquals("android-key", evidence["kind"])
        val chain =
            (evidence["chain"] as List<*>).map { der ->
                CertificateFactory.getInstance("X.509", BC).generateCertificate(ByteArrayInputStream(der as ByteArray)) as X509Certificate
            }
        chain[0].verify(chain[1].publicKey)
        val extension = ASN1OctetString.getInstance(chain[0].getExtensionValue("1.3.6.1.4.1.11129.2.1.17")).octets
        val challenge = ASN1OctetString.getInstance(ASN1Sequence.getInstance(extension).getObjectAt(CHALLENGE)).octets
        assertArrayEquals(attestationChallenge("ed25519:key", 1_763_740_800), challenge)
    }

    @Test
    fun `what another key wrapped, or one that is gone, does not open`() {
        val (secret, wrapped) = InstallationKey("one").newSecret()
        assertArrayEquals(secret, InstallationKey("one").open(wrapped))
        InstallationKey("two").newSecret()
        assertNull(InstallationKey("two").open(wrapped))
        removeKey("one")
        assertNull(InstallationKey("one").open(wrapped))
    }
}
