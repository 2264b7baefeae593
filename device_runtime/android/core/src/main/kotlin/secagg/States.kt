/**
 * The states of a session at a device, and what the server's messages must fulfil to lead from one to the next.
 *
 * Spec: docs/spec/secagg.md §6. The state after the upload is kept, and holds secrets of other devices: protect its bytes like a
 * key.
 */
package dev.muster.device.secagg

import dev.muster.device.Boxes
import dev.muster.device.KEY_BYTES
import dev.muster.device.PairKey
import dev.muster.device.concat
import dev.muster.device.joined
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.u32
import java.math.BigInteger
import java.util.BitSet

/**
 * The input of a device to a session.
 *
 * vector: float32 (D,). weight: 0 … w_max. lastRound: the greatest round of the task that the device ever answered for; -1 for
 * none. now: the device's time, in seconds since 1970; 0 if its clock cannot be trusted.
 */
internal class SessionInput(
    val vector: FloatArray,
    val weight: Long,
    val held: HeldModel,
    val credential: ByteArray,
    val lastRound: Long,
    val now: Long,
)

/** The state between M1 and M2. */
internal class Advertised(
    val given: SessionInput,
    val invite: Invite,
    val maskSecret: ByteArray,
    val maskKey: PairKey,
    val boxKey: PairKey,
    val device: Advertisement,
)

/** The state between M3 and M4. Secrets are by the position of a neighbour. */
internal class Shared(
    val given: SessionInput,
    val invite: Invite,
    val roster: Roster,
    val sid: ByteArray,
    val seed: BigInteger,
    val maskSecrets: Map<Int, ByteArray>,
    val boxSecrets: Map<Int, ByteArray>,
)

/** The state between M5 and M6. delivered: U0. peers: the neighbours in it whose boxes opened, with their shares. */
internal class Opened(val before: Shared, val delivered: BitSet, val peers: List<Peer>, val accused: BitSet)

/** A neighbour that shared its secrets: its id, and a share of each secret; 0 replaces a share that must not leave. */
internal data class Peer(val position: Int, val id: ByteArray, val seedShare: BigInteger, val keyShare: BigInteger)

/** The last step that a device took after M6. It only increases. */
internal enum class Stage { MASKED, CONFIRMED, REVEALED }

/** The state that must be durable before M7 leaves, and again before M9 and M11. shared, alive: U1 and U2. */
internal data class ClientState(
    val sid: ByteArray,
    val n: Int,
    val t: Int,
    val minSum: Long,
    val position: Int,
    val shared: BitSet,
    val peers: List<Peer>,
    val stage: Stage = Stage.MASKED,
    val alive: BitSet = BitSet(),
) {
    /** The digest of the survivors that a device signs in M9. */
    val survivorsDigest: ByteArray get() = sha256(bitmap(shared, n), bitmap(alive, n))

    /** The state after revealing one share of every peer. It no longer has the other shares. */
    fun revealed(): ClientState =
        copy(
            stage = Stage.REVEALED,
            peers = peers.map { if (alive[it.position]) it.copy(keyShare = BigInteger.ZERO) else it.copy(seedShare = BigInteger.ZERO) },
        )

    /** M11: a share of the seed of every peer that survived, and of the mask key of the others. */
    fun unmask(): ByteArray {
        val entries =
            peers.sortedBy { it.position }.map {
                val (kind, share) = if (alive[it.position]) SEED_SHARE to it.seedShare else KEY_SHARE to it.keyShare
                concat(u32(it.position), byteArrayOf(kind), littleEndian(share, SHARE_BYTES))
            }
        return message(M.UNMASK, sid, littleEndian(entries.size.toLong(), 2), *entries.toTypedArray())
    }

    fun encoded(): ByteArray {
        val shares =
            peers.map {
                concat(u32(it.position), it.id, littleEndian(it.seedShare, SHARE_BYTES), littleEndian(it.keyShare, SHARE_BYTES))
            }
        val head = concat(byteArrayOf(FORMAT, stage.ordinal.toByte()), sid, u32(n, t, minSum.toInt(), position, peers.size))
        return concat(head, bitmap(shared, n), bitmap(alive, n), joined(shares))
    }

    companion object {
        private const val FORMAT: Byte = 1
        private const val SEED_SHARE: Byte = 0
        private const val KEY_SHARE: Byte = 1

        /** The inverse of `encoded`. Throws [Malformed]. */
        fun decode(data: ByteArray): ClientState {
            val reader = Reader(data, "the kept state")
            val (format, number) = reader.u8() to reader.u8()
            val stage = Stage.entries.getOrNull(number)
            if (format != FORMAT.toInt() || stage == null) {
                throw Malformed("the kept state is damaged, or of another version: the session is lost, and nothing else")
            }
            val (sid, n, t) = Triple(reader.take(DIGEST_BYTES), reader.size(), reader.size())
            val (minSum, position, count) = Triple(reader.u32(), reader.size(), reader.size())
            val (shared, alive) = reader.bitmap(n) to reader.bitmap(n)
            val peers = (0 until count).map { Peer(reader.size(), reader.take(KEY_BYTES), reader.share(), reader.share()) }
            reader.close()
            if (peers.any { it.seedShare >= PRIME || it.keyShare >= PRIME }) {
                throw Malformed("the kept state holds a share that is too large")
            }
            return ClientState(sid, n, t, minSum, position, shared, peers, stage, alive)
        }
    }
}

private const val BOX_BYTES = 2 * SHARE_BYTES + 16

/** The shares in M4, of every neighbour whose box opens; the others are accused. */
internal fun openBoxes(state: Shared, data: ByteArray): Opened {
    val roster = state.roster
    val reader = openMessage(data, M.DELIVER, "the delivery", state.sid)
    val delivered = reader.bitmap(roster.n)
    val near = roster.neighbours.filter { delivered[it.position] }
    val boxes = near.map { reader.take(BOX_BYTES) }
    reader.close()
    checkShared(state, delivered, near.size)
    val (peers, accused) = ArrayList<Peer>() to BitSet()
    val opening = Boxes()
    for ((entry, box) in near.zip(boxes)) {
        try {
            peers += openPeer(state, entry, box, opening)
        } catch (_: BadCiphertext) {
            accused.set(entry.position)
        }
    }
    return Opened(state, delivered, peers, accused)
}

/** A neighbour's two shares. Throws [BadCiphertext]. */
private fun openPeer(state: Shared, entry: RosterEntry, box: ByteArray, opening: Boxes): Peer {
    val (sender, receiver) = entry.position to state.roster.position
    val key = derive(state.boxSecrets.getValue(sender), state.sid, "box", sender, receiver)
    val shares = Reader(opening.openShares(key, box, state.sid, sender, receiver), "the box from position $sender")
    val (seedShare, keyShare) = shares.share() to shares.share()
    if (seedShare >= PRIME || keyShare >= PRIME) throw BadCiphertext("the box from position $sender holds no shares")
    return Peer(sender, entry.device.id, seedShare, keyShare)
}

/** The state to keep after M6: the shares of every neighbour that stays in the session. */
internal fun included(opened: Opened, data: ByteArray): ClientState {
    val (state, roster) = opened.before to opened.before.roster
    val shared = readSet(data, M.INCLUDED, "the included devices", state.sid, roster.n)
    if (!shared.isWithin(opened.delivered)) throw InconsistentSurvivors("devices are included that never shared")
    if (shared.intersects(opened.accused)) throw BadCiphertext("devices are included whose boxes did not open")
    val peers = opened.peers.filter { shared[it.position] }
    checkShared(state, shared, peers.size)
    return ClientState(state.sid, roster.n, roster.t, state.invite.minSum, roster.position, shared, peers)
}

private fun checkShared(state: Shared, shared: BitSet, neighbours: Int) {
    val (roster, minSum) = state.roster to state.invite.minSum
    if (!shared[roster.position]) {
        throw SelfMarkedDead("position ${roster.position} sent its shares, but is listed as gone")
    }
    if (neighbours < roster.t) throw TooFewNeighbours("$neighbours neighbours are left, and ${roster.t} must be")
    val size = shared.cardinality()
    if (size < minSum) throw BelowThreshold("$size devices shared, and $minSum must")
}

/** Throws a [SecaggException] unless a sum over the survivors in M8 is allowed. */
internal fun checkSurvivors(kept: ClientState, alive: BitSet) {
    if (!alive[kept.position]) {
        throw SelfMarkedDead("position ${kept.position} sent its vector, but is listed as gone")
    }
    if (!alive.isWithin(kept.shared)) {
        throw InconsistentSurvivors("devices are said to have survived that never shared")
    }
    val (size, near) = alive.cardinality() to kept.peers.count { alive[it.position] }
    if (size < kept.minSum || near < kept.t) {
        throw BelowThreshold("$size devices survived, $near of them neighbours; at least ${kept.minSum} and ${kept.t} must")
    }
}

/** Throws a [SecaggException] unless enough neighbours signed the survivors in M10, and none signed others. */
internal fun checkConfirmations(kept: ClientState, data: ByteArray) {
    val reader = openMessage(data, M.CONFIRMATIONS, "the confirmations", kept.sid)
    val signed = reader.entries(reader.u16()) { reader.take(DIGEST_BYTES) to reader.take(SIGNATURE_BYTES) }
    reader.close()
    if (signed.size < kept.t) {
        throw BelowThreshold("${signed.size} neighbours confirmed the survivors, and ${kept.t} must")
    }
    val survivors = kept.peers.filter { kept.alive[it.position] }.associateBy { it.position }
    val shown = kept.survivorsDigest
    for ((position, confirmed) in signed) {
        val (digest, signature) = confirmed
        val peer = survivors[position] ?: throw BadSignature("position $position confirmed, but is no neighbour that survived")
        verify(peer.id, signature, "survivors", kept.sid, digest)
        if (!digest.contentEquals(shown)) throw InconsistentSurvivors("position $position signed another survivor set")
    }
}
