/**
 * The roster, M2, as one device sees it: the neighbour graph, Merkle paths, and its neighbours' advertisements.
 *
 * Spec: docs/spec/secagg.md §3, §4, §6.
 */
package dev.muster.device.secagg

import dev.muster.device.KEY_BYTES
import dev.muster.device.Keystream
import dev.muster.device.concat
import dev.muster.device.hex
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.u32

private const val DEVICE_BYTES = 16
private const val CREDENTIAL_BYTES = DEVICE_BYTES + 8 + SIGNATURE_BYTES
private const val BEACON_BYTES = SIGNATURE_BYTES

/** M1. A device's id and its keys for this session, signed, and its credential. */
internal class Advertisement(
    val id: ByteArray,
    val maskKey: ByteArray,
    val boxKey: ByteArray,
    val signature: ByteArray,
    val credential: ByteArray,
) {
    /** Its leaf in the roster's tree. */
    val leaf: ByteArray get() = concat(id, maskKey, boxKey)

    fun encoded(inviteHash: ByteArray): ByteArray = message(M.ADVERTISE, inviteHash, leaf, signature, credential)

    companion object {
        fun read(reader: Reader): Advertisement {
            val keys = List(3) { reader.take(KEY_BYTES) }
            return Advertisement(keys[0], keys[1], keys[2], reader.take(SIGNATURE_BYTES), reader.take(CREDENTIAL_BYTES))
        }
    }
}

/** A neighbour in M2: its position, its advertisement, and the path of its leaf. */
internal class RosterEntry(val position: Int, val device: Advertisement, val path: ByteArray)

/**
 * M2. A device's view of the roster of n devices, with k neighbours each, of which t reveal a secret: its own position, and its
 * neighbours by rank.
 */
internal class Roster(
    val n: Int,
    val k: Int,
    val t: Int,
    val root: ByteArray,
    val beacon: ByteArray,
    val position: Int,
    val path: ByteArray,
    val neighbours: List<RosterEntry>,
)

/** The roster as sent to one device. Throws [Malformed]. */
internal fun decodeRoster(data: ByteArray, inviteHash: ByteArray, nMax: Long): Roster {
    val reader = openMessage(data, M.ROSTER, "the roster", inviteHash)
    val (n, k, t) = Triple(reader.size(), reader.size(), reader.size())
    if (n !in 1..nMax || k >= n) {
        throw Malformed("a roster of $n with $k neighbours each does not exist among at most $nMax")
    }
    val (root, beacon, position) = Triple(reader.take(DIGEST_BYTES), reader.take(BEACON_BYTES), reader.size())
    val length = DIGEST_BYTES * depth(n.toLong())
    val path = reader.take(length)
    // Not `List(k)`: that takes memory for what is not there yet.
    val neighbours = (0 until k).map { RosterEntry(reader.size(), Advertisement.read(reader), reader.take(length)) }
    reader.close()
    if (position >= n || neighbours.any { it.position >= n }) {
        throw Malformed("the roster names a position that is not below $n")
    }
    return Roster(n, k, t, root, beacon, position, path, neighbours)
}

/**
 * Throws a [SecaggException] unless the roster holds this device as it is, with the neighbours that it must have.
 *
 * now: the device's time, in seconds since 1970; the credentials of its neighbours must be valid then.
 */
internal fun checkRoster(policy: AggregationPolicy, invite: Invite, own: Advertisement, roster: Roster, now: Long) {
    checkParameters(roster.n, roster.k, roster.t)
    if (roster.n < invite.minSum) {
        throw BelowThreshold("the roster has ${roster.n} devices, and a sum must have ${invite.minSum}")
    }
    if (!leadsTo(roster, own, roster.position, roster.path)) {
        throw SelfMismatch("the roster does not hold this device with the keys that it sent")
    }
    checkBeacon(policy.authority, invite, roster)
    if (roster.neighbours.map { it.position } != neighboursOf(roster)) {
        throw GraphMismatch("the neighbours are not those that roster and beacon imply")
    }
    roster.neighbours.firstOrNull { !leadsTo(roster, it.device, it.position, it.path) }?.let {
        throw GraphMismatch("position ${it.position} is not what the roster holds there")
    }
    val devices = roster.neighbours.map { it.device }
    checkDistinct(listOf(own) + devices)
    val until = maxOf(now.toULong(), invite.deadline)
    for (device in devices) {
        verify(device.id, device.signature, "advertise", invite.hash, concat(device.maskKey, device.boxKey))
        checkCredential(policy.authority, device.id, device.credential, until)
    }
}

/** A credential: the device that it names, 16 bytes, and the last second since 1970 at which it is good. */
internal class Credential(val device: ByteArray, val expires: ULong)

/**
 * The content of a credential, for the key `id`.
 *
 * Throws [BadSignature] or [ExpiredCredential] unless the authority issued it to this key, valid until `until`.
 */
internal fun checkCredential(authority: ByteArray, id: ByteArray, credential: ByteArray, until: ULong): Credential {
    val reader = Reader(credential, "the credential")
    val (device, expires, signature) = Triple(reader.take(DEVICE_BYTES), reader.u64(), reader.take(SIGNATURE_BYTES))
    reader.close()
    verify(authority, signature, "credential", NO_CONTEXT, concat(id, device, littleEndian(expires.toLong(), 8)))
    if (expires < until) throw ExpiredCredential("a credential ended at $expires, and must be good until $until")
    return Credential(device, expires)
}

private fun checkBeacon(authority: ByteArray, invite: Invite, roster: Roster) {
    if (roster.k != roster.n - 1) {
        verify(authority, roster.beacon, "beacon", invite.hash, concat(u32(roster.n, roster.k, roster.t), roster.root))
    } else if (roster.beacon.any { it != 0.toByte() }) {
        throw GraphMismatch("there is a beacon, and everyone is everyone's neighbour: nothing was to be drawn")
    }
}

/** Throws [DuplicateKey] when an id or a key occurs twice, in any role, or a device takes part twice. */
private fun checkDistinct(devices: List<Advertisement>) {
    val seen = HashSet<String>()
    for (device in devices) {
        for (one in listOf(device.id, device.maskKey, device.boxKey, device.credential.copyOf(DEVICE_BYTES))) {
            val name = hex(one)
            if (!seen.add(name)) throw DuplicateKey("id or key ${name.take(12)}… occurs twice: one device plays several")
        }
    }
}

/** The k neighbours of this device's position; the one at index x − 1 has rank x. The relation is symmetric. */
private fun neighboursOf(roster: Roster): List<Int> {
    val (n, k) = roster.n to roster.k
    val drawn = ByteArray(8 * n)
    Keystream(sha256(tag("graph"), roster.root, roster.beacon)).fill(drawn)
    val words = LongArray(n).also { littleEndian(drawn).asLongBuffer().get(it) }
    val ring = words.indices.sortedBy { words[it].toULong() }
    val place = ring.indexOf(roster.position)
    return (1 until n).filter { k == n - 1 || it <= k / 2 || it >= n - k / 2 }.map { ring[(place + it) % n] }
}

private fun leadsTo(roster: Roster, device: Advertisement, position: Int, path: ByteArray): Boolean =
    climb(device.leaf, position.toLong(), path).contentEquals(roster.root)

/** The number of siblings in a path, for n leaves. */
internal fun depth(n: Long): Int = if (n <= 1) 0 else 64 - java.lang.Long.numberOfLeadingZeros(n - 1)

/** The root that follows from a leaf, its position and its path. */
internal fun climb(leaf: ByteArray, position: Long, path: ByteArray): ByteArray {
    var node = sha256(byteArrayOf(0), leaf)
    for (height in 0 until path.size / DIGEST_BYTES) {
        val sibling = path.copyOfRange(DIGEST_BYTES * height, DIGEST_BYTES * (height + 1))
        val isRight = position ushr height and 1 == 1L
        node = if (isRight) sha256(byteArrayOf(1), sibling, node) else sha256(byteArrayOf(1), node, sibling)
    }
    return node
}
