/** What a device needs from the machine: storage, network, clock, randomness and examples. The core imports none of them. */
package dev.muster.device

import okhttp3.HttpUrl
import okhttp3.OkHttpClient
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit

/** Texts by key that survive restarts. They hold private keys and other devices' shares: protect them like a key. */
public interface Store {
    /** The text under a key; null when there is none. */
    public fun get(key: String): String?

    /** Write texts, and remove keys whose text is null: all or none, durable when this returns. Throws [StateDamaged]. */
    public fun write(changes: Map<String, String?>)
}

/**
 * Plans, graphs and other blobs by digest, kept between rounds; of one whose download broke off, the first bytes.
 *
 * They may be lost at any time.
 */
public interface BlobCache {
    /** The blob with a digest, in hex; null when it is not kept. */
    public fun get(sha256: String): ByteArray?

    /** Keep a blob under its digest. */
    public fun put(sha256: String, data: ByteArray)

    /** Remove blobs, the longest unused first, until the rest has at most `most` bytes. Those to `keep` do not count. */
    public fun trim(most: Long, keep: Set<String>)
}

/** One reading of a device; null means unknown. [battery] is a fraction. */
public data class Conditions(
    val charging: Boolean? = null,
    val idle: Boolean? = null,
    val unmetered: Boolean? = null,
    val battery: Double? = null,
    val freeStorageBytes: Long? = null,
)

/** Evidence that a key is a device's, for coordinators and authorities. Spec: docs/spec/wire.md §9. */
public interface Attester {
    /** The attestation, as JSON's members, of the public key [key] (as text), for a request that is signed at [created]. */
    public fun attest(key: String, created: Long): Map<String, Any?>
}

/** What a platform's attestation has to answer: 32 bytes for a public key (as text) and a time in seconds since 1970. */
public fun attestationChallenge(key: String, created: Long): ByteArray =
    sha256(utf8("muster.attestation-challenge.v1\u0000$key\u0000$created"))

/** Evidence by a secret that the receiver knows too. It is never sent. */
public class SharedSecret(private val secret: ByteArray) : Attester {
    override fun attest(key: String, created: Long): Map<String, Any?> {
        val proof = hmac(secret, utf8("muster.attestation.v1\u0000$key\u0000$created"))
        return mapOf("kind" to "shared-secret", "proof" to base64(proof))
    }
}

/** Everything that a session needs from the machine. Only one session at a time may use it. */
public interface Platform {
    public val store: Store

    public val blobs: BlobCache

    public val examples: ExampleSource

    /** The engine with its version, as stated to a coordinator. */
    public val engineName: String

    public val http: OkHttpClient

    /** The machine's memory in bytes; null when it is not known. */
    public val memoryBytes: Long?

    /** Null on a device that cannot be attested. */
    public val attester: Attester?

    /** A private key by its name, `device` or `secagg`, made at the first call and kept. Throws [StateDamaged]. */
    public fun signingKey(name: String): SigningKey

    /** Reads the current conditions. Throws [PolicyForbids] when the owner does not let the device work under them. */
    public fun conditions(): Conditions

    public fun random(size: Int): ByteArray

    /** Seconds since 1970, by a clock that may be wrong. */
    public fun now(): Double

    /** Seconds of work, from any start: CPU time if the platform reports it. */
    public fun workSeconds(): Double

    /** Wait for a time, or until `stop` is set. */
    public fun sleep(seconds: Double, stop: Stop) {
        stop.await(seconds)
    }
}

/** A population of a coordinator. */
internal interface Target {
    val coordinator: HttpUrl
    val population: String
}

/** A request to stop, from any thread. */
public class Stop {
    @Volatile
    public var isSet: Boolean = false
        private set
    private val actions = CopyOnWriteArrayList<() -> Unit>()

    @Volatile
    internal var why = "the application is stopping"
        private set

    /** Stop. Later calls do nothing. */
    public fun set(): Unit = set(why)

    internal fun set(why: String) {
        synchronized(this) {
            if (isSet) return
            this.why = why
            isSet = true
        }
        actions.forEach { it() }
    }

    /** Do work, and run `action` if this is set before or meanwhile. */
    public fun <T> use(action: () -> Unit, work: () -> T): T {
        actions += action
        if (isSet && actions.remove(action)) action()
        try {
            return work()
        } finally {
            actions -= action
        }
    }

    /** Wait for a time, or until this is set. */
    public fun await(seconds: Double) {
        val isOver = CountDownLatch(1)
        use(isOver::countDown) { isOver.await((1000 * seconds).toLong(), TimeUnit.MILLISECONDS) }
    }
}

/**
 * Prefixes of the store's keys for a device's identity at coordinators and authorities.
 *
 * These are removed when it leaves. Records of use, answered rounds and releases stay, so that its guards still hold when it
 * returns.
 */
internal object Identity {
    const val ENROLMENT = "enrolment:"
    const val CREDENTIAL = "credential:"
    const val ASSIGNMENT = "assignment:"
    const val TOKEN = "token:"
}

/** The JSON text under a key, as a value; null when there is none. Throws [StateDamaged] when it is not JSON. */
internal fun keptJson(store: Store, key: String): Json? =
    store.get(key)?.let { text ->
        keeping(key) { Json.parse(text, "kept $key") }
    }

/** What `read` makes of something kept. Throws [StateDamaged] where it is not of its form. */
internal fun <T> keeping(key: String, read: () -> T): T =
    try {
        read()
    } catch (error: FormatException) {
        throw StateDamaged("what is kept as $key cannot be read: remove it, and the device begins anew there (${error.message})")
    }

/** The integer under a key, from -1 on; null when there is none. Throws [StateDamaged] when it is not one. */
internal fun keptNumber(store: Store, key: String): Long? =
    keptJson(store, key)?.let { keeping(key) { it.whole(-1..Long.MAX_VALUE) } }

/** The Ed25519 key of that name in a store, made at the first call. Throws [StateDamaged] when what is kept is no key. */
public fun keptSigningKey(store: Store, name: String): SigningKey {
    val place = "key:$name"
    val kept = store.get(place)
    val secret = kept ?: base64(platformRandom(KEY_BYTES)).also { store.write(mapOf(place to it)) }
    return Ed25519Key(keeping(place) { fromBase64(secret) })
}

/** Bytes of bodies sent and received. */
internal class BytesMoved {
    @Volatile
    var up: Long = 0

    @Volatile
    var down: Long = 0

    val total: Long get() = up + down
}
