/**
 * Enrolment: a device registers with a coordinator once, and visits it with the id that it received.
 *
 * It pins the keys of secure rounds at first sight, and gets its credential from the authority. Spec: docs/spec/wire.md §9.
 */
package dev.muster.device.protocol

import dev.muster.device.FormatException
import dev.muster.device.Identity
import dev.muster.device.Json
import dev.muster.device.Platform
import dev.muster.device.SecaggRefused
import dev.muster.device.SigningKey
import dev.muster.device.TransportException
import dev.muster.device.base64
import dev.muster.device.hex
import dev.muster.device.keeping
import dev.muster.device.kept.keptBlobs
import dev.muster.device.keptJson
import dev.muster.device.littleEndian
import dev.muster.device.permission.Guard
import dev.muster.device.permission.Place
import dev.muster.device.permission.checkHttps
import dev.muster.device.plans.BlobRef
import dev.muster.device.secagg.SecaggException
import dev.muster.device.secagg.checkCredential
import dev.muster.device.secagg.sign
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.wire.Succession
import dev.muster.device.wire.publicKey
import okhttp3.HttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrlOrNull
import kotlin.math.max

/** The fraction of its validity after which a credential is renewed. */
private const val SPENT = 2.0 / 3

/** The keys of a coordinator's secure rounds: those that a device pinned. */
private class Pinned(val server: ByteArray, val authority: ByteArray)

/** The authority that a coordinator named last: its key, and where it is. */
private class Shown(val key: ByteArray, val url: HttpUrl)

/**
 * A stored enrolment of the device key `key`. isKnown: false once the coordinator said that it knows no such device.
 *
 * pinned, shown: null if the coordinator has no secure rounds.
 */
private class Enrolment(val key: String, val device: String, val pinned: Pinned?, val shown: Shown?, val isKnown: Boolean) {
    fun with(pinned: Pinned? = this.pinned, isKnown: Boolean = this.isKnown) = Enrolment(key, device, pinned, shown, isKnown)

    fun members() =
        mapOf(
            "key" to key, "device" to device, "known" to isKnown,
            "pinned" to pinned?.let { mapOf("server" to it.server, "authority" to it.authority) },
            "shown" to shown?.let { mapOf("key" to it.key, "url" to it.url.toString()) },
        )

    companion object {
        fun of(json: Json) =
            Enrolment(
                json["key"].text(),
                json["device"].text(),
                json.nullable("pinned")?.let { Pinned(it["server"].bytes(32), it["authority"].bytes(32)) },
                json.nullable("shown")?.let { Shown(it["key"].bytes(32), it["url"].run { text().toHttpUrlOrNull() ?: wrong("a URL") }) },
                json["known"].flag(),
            )
    }
}

/** A stored credential of the device's keys, and the authority's key that signed it. */
internal class KeptCredential(
    val key: String,
    val secagg: ByteArray,
    val authority: ByteArray,
    val credential: ByteArray,
    val renewAt: Double,
) {
    fun members() =
        mapOf("key" to key, "secagg" to secagg, "authority" to authority, "credential" to credential, "renew_at" to renewAt)

    companion object {
        fun of(json: Json) =
            KeptCredential(
                json["key"].text(), json["secagg"].bytes(32), json["authority"].bytes(32), json["credential"].bytes(88),
                json["renew_at"].number(),
            )
    }
}

/** A device's enrolment at one coordinator, which the store holds if there is one. Throws [dev.muster.device.StateDamaged]. */
internal class Enrolments(private val platform: Platform, private val place: Place, private val transport: Transport) : Caller {
    /** The key of requests. */
    val key: SigningKey = platform.signingKey("device")

    /** The key of secure aggregation. */
    val secagg: SigningKey = platform.signingKey("secagg")
    private val row = "${Identity.ENROLMENT}${place.coordinator}"
    private val named = place.policy.authority?.let(::publicKey)

    @Volatile
    private var known: Enrolment? = keptJson(platform.store, row)?.let { keeping(row) { Enrolment.of(it) } }

    /** The id at this coordinator; empty before the first enrolment. */
    val device: String get() = known?.device ?: ""

    /** The signer of requests. If this key is not enrolled, the device enrols first. Throws [TransportException]. */
    @Synchronized
    override fun signer(): Signer {
        val enrolled = known?.takeIf { it.isKnown && it.key == key.text } ?: enrol()
        return Signer(enrolled.device, key)
    }

    /** Note that the coordinator does not know this device, so that it enrols before the next request. */
    @Synchronized
    override fun forget() {
        known?.let { keep(it.with(isKnown = false)) }
    }

    /**
     * The server's current key. If it succeeds the pinned key, it is pinned from now on.
     *
     * Throws [SecaggRefused] when it does not; then nothing changes.
     */
    fun server(shown: Succession?): ByteArray {
        val enrolment = known
        val pinned = enrolment?.pinned
        if (pinned == null || shown == null) {
            throw SecaggRefused("the coordinator names no parties of secure rounds, or does not show the server's key")
        }
        val current = refusing { shown.follow("server", pinned.server) }
        if (!current.contentEquals(pinned.server)) keep(enrolment.with(pinned = Pinned(current, pinned.authority)))
        return current
    }

    /**
     * The device's credential, with the key of the authority that signed it.
     *
     * Throws [SecaggRefused] when the coordinator has no secure rounds, or uses another authority than this device;
     * [TransportException] when a needed call to the authority fails; [dev.muster.device.PolicyForbids] when the policy forbids it.
     */
    fun credential(): KeptCredential {
        signer()
        var shown =
            known?.shown ?: enrol().shown // it may be new
                ?: throw SecaggRefused("the coordinator names no enrolment authority, so it has no secure rounds")
        var kept = credentialOf(pinnedAuthority(), shown.url)
        // The authority's key may have a successor, of which the coordinator or the credential does not tell yet.
        for (askAgain in listOf({ enrol() }, { refused() })) {
            if (kept.authority.contentEquals(shown.key)) break
            askAgain()
            shown = known?.shown ?: shown
            kept = credentialOf(pinnedAuthority(), shown.url)
        }
        if (!kept.authority.contentEquals(shown.key)) {
            throw SecaggRefused("the coordinator uses another enrolment authority than this device does")
        }
        return kept
    }

    /** Note that the coordinator refused this device's advertisement, so that it requests a new credential. */
    fun refused() = platform.store.write(mapOf(credentialRow(pinnedAuthority()) to null))

    /** The authority's key that this device uses: the policy's, or the first that it saw. */
    private fun pinnedAuthority(): ByteArray =
        named ?: known?.pinned?.authority ?: throw SecaggRefused("this device has pinned no enrolment authority")

    private fun enrol(): Enrolment {
        val evidence = heldCredential()
        val enrolled = transport.enrol(Signer(key.text, key)) { created -> mapOf("attestation" to (evidence ?: attestation(created))) }
        val parties = enrolled.secagg
        val seen = parties?.let { Pinned(it.server.current, it.authority) }
        val shown = parties?.let { Shown(it.authority, it.authorityUrl) }
        return keep(Enrolment(key.text, enrolled.device, known?.pinned ?: seen, shown, isKnown = true))
    }

    /** The credential as evidence for the coordinator, if the policy names the authority and its URL. */
    private fun heldCredential(): Map<String, Any?>? {
        val url = place.policy.authorityUrl ?: return null
        val kept = credentialOf(pinnedAuthority(), url.toHttpUrl())
        return mapOf("kind" to "credential", "secagg" to base64(kept.secagg), "credential" to base64(kept.credential))
    }

    private fun attestation(created: Long): Map<String, Any?> = platform.attester?.attest(key.text, created) ?: mapOf("kind" to "none")

    private fun keep(enrolment: Enrolment): Enrolment {
        platform.store.write(mapOf(row to Json.write(enrolment.members())))
        known = enrolment
        return enrolment
    }

    /** A stored credential while it is valid, renewed in the last third of its validity if the authority is reachable. */
    private fun credentialOf(pinned: ByteArray, shownUrl: HttpUrl): KeptCredential {
        val row = credentialRow(pinned)
        val kept = keptJson(platform.store, row)?.let { keeping(row) { KeptCredential.of(it) } }?.takeIf(::isGood)
        if (kept != null && platform.now() < kept.renewAt) return kept
        try {
            val fresh = ask(pinned, place.policy.authorityUrl?.toHttpUrl() ?: shownUrl)
            platform.store.write(mapOf(row to Json.write(fresh.members())))
            return fresh
        } catch (error: TransportException) {
            return kept ?: throw error
        }
    }

    private fun isGood(kept: KeptCredential): Boolean =
        try {
            checkCredential(kept.authority, secagg.publicKey, kept.credential, platform.now().toULong())
            kept.key == key.text && kept.secagg.contentEquals(secagg.publicKey)
        } catch (_: SecaggException) {
            false
        }

    private fun ask(pinned: ByteArray, url: HttpUrl): KeptCredential {
        checkHttps(place.policy, "the authority", url)
        val about = sha256(utf8(key.text))
        val issued =
            Transport(platform, url, transport.stopping).credential(Signer(key.text, key)) { created ->
                mapOf(
                    "attestation" to attestation(created),
                    "secagg" to base64(secagg.publicKey),
                    "possession" to base64(sign(secagg, "possession", about, littleEndian(created, 8))),
                )
            }
        val (current, credential) =
            refusing {
                val current = issued.authority.follow("authority", pinned)
                current to checkCredential(current, secagg.publicKey, issued.credential, until = 0u)
            }
        if (hex(credential.device) != deviceId(key.text)) {
            throw SecaggRefused("the authority gave this device the credential of another")
        }
        val now = platform.now()
        val renewAt = now + SPENT * max(0.0, credential.expires.toDouble() - now)
        return KeptCredential(key.text, secagg.publicKey, current, issued.credential, renewAt)
    }
}

private fun credentialRow(authority: ByteArray) = "${Identity.CREDENTIAL}${hex(authority)}"

private fun <T> refusing(check: () -> T): T =
    try {
        check()
    } catch (error: FormatException) {
        throw SecaggRefused(error.message!!)
    } catch (error: SecaggException) {
        throw SecaggRefused(error.message!!)
    }

/** A visit of a device to a coordinator: its calls, under the owner's limits, by the device's identity. */
internal class Visit(val platform: Platform, val place: Place, val transport: Transport) {
    val guard = Guard(platform, place, transport.moved)
    val enrolments: Enrolments

    /** Throws [dev.muster.device.StateDamaged], and [dev.muster.device.PolicyForbids] when the policy demands TLS. */
    init {
        checkHttps(place.policy, "the coordinator", place.coordinator)
        enrolments = Enrolments(platform, place, transport)
        transport.caller = enrolments
    }

    /** A plan, a graph or another blob that is kept between visits. */
    fun blob(ref: BlobRef): ByteArray = keptOrFetched(ref, platform.blobs, transport)

    /** Remove blobs beyond the policy's cache, but none that models need. */
    fun trim() = platform.blobs.trim(place.policy.cacheBytes, keptBlobs(platform.store))
}
