package dev.muster.device

import android.security.keystore.KeyGenParameterSpec
import org.bouncycastle.asn1.ASN1ObjectIdentifier
import org.bouncycastle.asn1.x500.X500Name
import org.bouncycastle.asn1.x509.BasicConstraints
import org.bouncycastle.asn1.x509.Extension
import org.bouncycastle.asn1.x509.KeyUsage
import org.bouncycastle.cert.jcajce.JcaX509CertificateConverter
import org.bouncycastle.cert.jcajce.JcaX509v3CertificateBuilder
import org.bouncycastle.jce.provider.BouncyCastleProvider
import org.bouncycastle.operator.jcajce.JcaContentSignerBuilder
import java.io.InputStream
import java.io.OutputStream
import java.math.BigInteger
import java.security.Key
import java.security.KeyPair
import java.security.KeyPairGenerator
import java.security.KeyPairGeneratorSpi
import java.security.KeyStoreSpi
import java.security.Provider
import java.security.SecureRandom
import java.security.Security
import java.security.cert.Certificate
import java.security.cert.X509Certificate
import java.security.spec.AlgorithmParameterSpec
import java.security.spec.ECGenParameterSpec
import java.util.Collections
import java.util.Date
import java.util.Enumeration
import javax.crypto.KeyGenerator
import javax.crypto.KeyGeneratorSpi
import javax.crypto.SecretKey

/** Beside which the other providers of a desktop's Java do not work under Robolectric. */
internal val BC = BouncyCastleProvider()
private const val ATTESTATION = "1.3.6.1.4.1.11129.2.1.17"
private val held = HashMap<String, Key>()
private val chains = HashMap<String, List<X509Certificate>>()
private val root: Pair<KeyPair, X509Certificate> by lazy { newPair().let { it to certified(it, it, "CN=root", null) } }
private const val DAY_MS = 86_400_000L

/** The app that every chain names, and the digest of the certificate that signs it. */
internal const val PACKAGE = "org.example.digits"
internal val SIGNER = sha256(utf8("the certificate that signs the app"))

/** The certificate that every chain leads to, in PEM. */
internal val ROOT_PEM: String by lazy { "-----BEGIN CERTIFICATE-----\n${base64(root.second.encoded)}\n-----END CERTIFICATE-----\n" }

/** The Android Keystore, which Robolectric lacks, in memory: keys for AES and P-256, and chains of two certificates. */
object FakeKeystore : Provider("AndroidKeyStore", 1.0, "for tests") {
    private fun readResolve(): Any = FakeKeystore

    init {
        put("KeyStore.AndroidKeyStore", Store::class.java.name)
        put("KeyGenerator.AES", Aes::class.java.name)
        put("KeyPairGenerator.EC", Ec::class.java.name)
    }

    /** Take the place of the keystore, without keys. */
    fun install() {
        held.clear()
        chains.clear()
        Security.removeProvider(name)
        Security.addProvider(this)
    }

    /** Lose all keys, as a restored copy of an app has none. */
    fun lose() = held.clear()

    class Aes : KeyGeneratorSpi() {
        private lateinit var spec: KeyGenParameterSpec

        override fun engineInit(random: SecureRandom?) = error("no spec")

        override fun engineInit(size: Int, random: SecureRandom?) = error("no spec")

        override fun engineInit(spec: AlgorithmParameterSpec, random: SecureRandom?) {
            this.spec = spec as KeyGenParameterSpec
        }

        override fun engineGenerateKey(): SecretKey =
            KeyGenerator.getInstance("AES", BC).apply { init(spec.keySize) }.generateKey().also { held[spec.keystoreAlias] = it }
    }

    class Ec : KeyPairGeneratorSpi() {
        private lateinit var spec: KeyGenParameterSpec

        override fun initialize(size: Int, random: SecureRandom?) = error("no spec")

        override fun initialize(spec: AlgorithmParameterSpec, random: SecureRandom?) {
            this.spec = spec as KeyGenParameterSpec
        }

        override fun generateKeyPair(): KeyPair =
            newPair().also {
                held[spec.keystoreAlias] = it.private
                chains[spec.keystoreAlias] = listOf(certified(it, root.first, "CN=leaf", spec.attestationChallenge), root.second)
            }
    }

    class Store : KeyStoreSpi() {
        override fun engineGetKey(alias: String, password: CharArray?): Key? = held[alias]

        override fun engineGetCertificateChain(alias: String): Array<Certificate>? = chains[alias]?.toTypedArray()

        override fun engineGetCertificate(alias: String): Certificate? = chains[alias]?.first()?.takeIf { alias in held }

        override fun engineDeleteEntry(alias: String) {
            held.remove(alias)
            chains.remove(alias)
        }

        override fun engineContainsAlias(alias: String) = alias in held

        override fun engineAliases(): Enumeration<String> = Collections.enumeration(held.keys)

        override fun engineSize() = held.size

        override fun engineIsKeyEntry(alias: String) = alias in held

        override fun engineIsCertificateEntry(alias: String) = false

        override fun engineGetCreationDate(alias: String) = Date()

        override fun engineGetCertificateAlias(certificate: Certificate): String? = null

        override fun engineLoad(stream: InputStream?, password: CharArray?) = Unit

        override fun engineStore(stream: OutputStream?, password: CharArray?) = Unit

        override fun engineSetKeyEntry(alias: String, key: Key, password: CharArray?, chain: Array<Certificate>?) = error("no import")

        override fun engineSetKeyEntry(alias: String, key: ByteArray, chain: Array<Certificate>?) = error("no import")

        override fun engineSetCertificateEntry(alias: String, certificate: Certificate) = error("no import")
    }
}

private fun newPair(): KeyPair =
    KeyPairGenerator.getInstance("EC", BC).apply { initialize(ECGenParameterSpec("secp256r1")) }.generateKeyPair()

/** A certificate; with a challenge that of an attested key, else one that may sign others. */
private fun certified(pair: KeyPair, issuer: KeyPair, name: String, challenge: ByteArray?): X509Certificate {
    val (begin, end) = System.currentTimeMillis().let { Date(it - DAY_MS) to Date(it + DAY_MS) }
    val built = JcaX509v3CertificateBuilder(X500Name("CN=root"), BigInteger(64, SecureRandom()), begin, end, X500Name(name), pair.public)
    if (challenge != null) {
        built.addExtension(Extension.keyUsage, true, KeyUsage(KeyUsage.digitalSignature))
        built.addExtension(ASN1ObjectIdentifier(ATTESTATION), false, description(challenge))
    } else {
        built.addExtension(Extension.keyUsage, true, KeyUsage(KeyUsage.keyCertSign))
        built.addExtension(Extension.basicConstraints, true, BasicConstraints(true))
    }
    val signer = JcaContentSignerBuilder("SHA256withECDSA").setProvider(BC).build(issuer.private)
    return JcaX509CertificateConverter().setProvider(BC).getCertificate(built.build(signer))
}

/** What secure hardware says of a locked phone that started as its maker wants, and of the app: the parts that a receiver reads. */
private fun description(challenge: ByteArray): ByteArray {
    val boot = tlv(0x30, tlv(0x04, ByteArray(32)), tlv(0x01, byteArrayOf(-1)), tlv(0x0a, ByteArray(1)), tlv(0x04, ByteArray(32)))
    val app =
        tlv(0x30, tlv(0x31, tlv(0x30, tlv(0x04, utf8(PACKAGE)), tlv(0x02, byteArrayOf(7)))), tlv(0x31, tlv(0x04, SIGNER)))
    return tlv(
        0x30,
        tlv(0x02, byteArrayOf(3)), tlv(0x0a, byteArrayOf(1)), tlv(0x02, byteArrayOf(4)), tlv(0x0a, byteArrayOf(1)),
        tlv(0x04, challenge), tlv(0x04), tlv(0x30, tlv(0xbf8545, tlv(0x04, app))), tlv(0x30, tlv(0xbf8540, boot)),
    )
}

/** DER of fewer than 65,536 bytes: a tag, a length, and the contents one after the other. */
private fun tlv(tag: Int, vararg contents: ByteArray): ByteArray {
    val content = concat(*contents)
    val size = BigInteger.valueOf(content.size.toLong()).toByteArray().dropWhile { it == 0.toByte() }.toByteArray()
    val length = if (content.size < 128) byteArrayOf(content.size.toByte()) else byteArrayOf((0x80 or size.size).toByte()) + size
    return concat(BigInteger.valueOf(tag.toLong()).toByteArray().dropWhile { it == 0.toByte() }.toByteArray(), length, content)
}
