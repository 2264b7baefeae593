/** The device's end of a session of SA1, as a state machine. Spec: docs/spec/secagg.md §6. */
package dev.muster.device.secagg

import dev.muster.device.Boxes
import dev.muster.device.KEY_BYTES
import dev.muster.device.PairKey
import dev.muster.device.SigningKey
import dev.muster.device.concat
import dev.muster.device.littleEndian
import dev.muster.device.platformRandom
import dev.muster.device.sha256
import dev.muster.device.u32

/** The answer to a message: the bytes to send next, none after the last, and the state that must be durable before. */
internal class Reply(val message: ByteArray? = null, val keep: ByteArray? = null)

/** M12: whether the session came to a sum, and the server's signed account of it. */
internal class SessionResult(val summed: Boolean, val aggregateHash: ByteArray, val transcriptRoot: ByteArray)

private typealias Answer = (ByteArray) -> Reply

/**
 * A device in one session.
 *
 * [receive] takes every message of the server, in the order M0, M2, M4, M6, M8, M10, M12, and gives the message to send next. The
 * host must keep two promises:
 *
 * - [Reply.keep], if there is one, is durable before [Reply.message] leaves.
 * - The round is noted, durably, before M1 leaves: `lastRound` of every later session of the task is at least this round.
 */
internal class Client private constructor(
    private val identity: SigningKey,
    private val policy: AggregationPolicy,
    private val random: RandomSource,
) {
    /** By the numbers of the messages that may come next, what answers them; null once the session is over. */
    private var due: Map<Int, Answer>? = null
    private var ended: SessionResult? = null

    /** A device at the start of a session; to continue one use [restore]. */
    constructor(
        identity: SigningKey,
        policy: AggregationPolicy,
        given: SessionInput,
        random: RandomSource = ::platformRandom,
    ) : this(identity, policy, random) {
        due = mapOf(M.INVITE to { advertise(given, it) })
    }

    /** The server's signed result of the session. Throws [OutOfOrder] before M12 was received. */
    val result: SessionResult get() = ended ?: throw OutOfOrder("the session has no result: M12 has not come")

    /** Handle a message of the server. Any [SecaggException] ends the session for this device, and drops its secrets. */
    fun receive(message: ByteArray): Reply {
        val due = this.due ?: throw OutOfOrder("the session is over: this device answers nothing more")
        this.due = null // so that an error leaves nothing
        val number = numberOf(message)
        val answer = due[number] ?: throw OutOfOrder("M$number is not due: a device answers in order, and once")
        return answer(message)
    }

    /** M0 to M1. */
    private fun advertise(given: SessionInput, data: ByteArray): Reply {
        val invite = acceptInvitation(policy, data, given.held, given.lastRound)
        val maskSecret = random(KEY_BYTES)
        val (maskKey, boxKey) = PairKey(maskSecret) to PairKey(random(KEY_BYTES))
        val signature = sign(identity, "advertise", invite.hash, concat(maskKey.publicKey, boxKey.publicKey))
        val device = Advertisement(identity.publicKey, maskKey.publicKey, boxKey.publicKey, signature, given.credential)
        val state = Advertised(given, invite, maskSecret, maskKey, boxKey, device)
        due = mapOf(M.ROSTER to { share(state, it) })
        return Reply(device.encoded(invite.hash))
    }

    /** M2 to M3. */
    private fun share(before: Advertised, data: ByteArray): Reply {
        val invite = before.invite
        val roster = decodeRoster(data, invite.hash, invite.nMax)
        checkRoster(policy, invite, before.device, roster, before.given.now)
        val sid = sha256(tag("sid"), invite.hash, u32(roster.n, roster.k, roster.t), roster.root, roster.beacon)
        val maskSecrets = roster.neighbours.associate { it.position to agree(before.maskKey, it.device.maskKey) }
        val boxSecrets = roster.neighbours.associate { it.position to agree(before.boxKey, it.device.boxKey) }
        val state = Shared(before.given, invite, roster, sid, randomBelowPrime(random), maskSecrets, boxSecrets)
        val boxes = boxes(state, before.maskSecret)
        val commitment = sha256(tag("commit"), sid, u32(roster.position), littleEndian(state.seed, KEY_BYTES))
        due = mapOf(M.DELIVER to { complain(state, it) })
        return Reply(message(M.SHARES, sid, commitment, *boxes.toTypedArray()))
    }

    /** A box for each neighbour, by rank, with its shares of the seed and of the mask key. */
    private fun boxes(state: Shared, maskSecret: ByteArray): List<ByteArray> {
        val (roster, sid) = state.roster to state.sid
        val seedShares = split(state.seed, roster.k, roster.t, random)
        val keyShares = split(scalarOf(maskSecret), roster.k, roster.t, random)
        val boxes = Boxes()
        return roster.neighbours.mapIndexed { rank, peer ->
            val key = derive(state.boxSecrets.getValue(peer.position), sid, "box", roster.position, peer.position)
            val shares = concat(littleEndian(seedShares[rank], SHARE_BYTES), littleEndian(keyShares[rank], SHARE_BYTES))
            boxes.sealShares(key, shares, sid, roster.position, peer.position)
        }
    }

    /** M4 to M5: the shares of every neighbour whose box opens, and complaints about the others. */
    private fun complain(shared: Shared, data: ByteArray): Reply {
        val opened = openBoxes(shared, data)
        due = mapOf(M.INCLUDED to { mask(opened, it) })
        return Reply(message(M.COMPLAINTS, shared.sid, bitmap(opened.accused, shared.roster.n)))
    }

    /** M6 to M7. Afterwards the device no longer has its own secrets. */
    private fun mask(opened: Opened, data: ByteArray): Reply {
        val (before, kept) = opened.before to included(opened, data)
        val given = before.given
        val words = pack(before.invite.segments, given.vector, given.weight, before.invite.wMax, random)
        addMasks(words, masks(before, kept))
        val bytes = ByteArray(8 * words.size)
        littleEndian(bytes).asLongBuffer().put(words)
        val signature = sign(identity, "masked", kept.sid, sha256(bytes))
        return keeping(kept, message(M.MASKED, kept.sid, bytes, signature))
    }

    private fun masks(before: Shared, kept: ClientState): List<Mask> {
        val (sid, own) = kept.sid to kept.position
        val pairs =
            kept.peers.map { (position) ->
                val secret = before.maskSecrets.getValue(position)
                Mask(derive(secret, sid, "mask", minOf(own, position), maxOf(own, position)), isAdded = own < position)
            }
        return pairs + Mask(derive(littleEndian(before.seed, KEY_BYTES), sid, "self", own), isAdded = true)
    }

    /** M8 to M9. The same M8 again gets the same answer, another M8 gets none. */
    private fun confirm(kept: ClientState, data: ByteArray): Reply {
        val alive = readSet(data, M.SURVIVORS, "the survivor set", kept.sid, kept.n)
        if (kept.stage == Stage.REVEALED && alive != kept.alive) {
            throw AlreadyRevealed("this device revealed its shares for another survivor set, and reveals no others")
        }
        if (kept.stage == Stage.CONFIRMED && alive != kept.alive) {
            throw InconsistentSurvivors("this device was shown another survivor set before, and signs one")
        }
        checkSurvivors(kept, alive)
        val settled = if (kept.stage == Stage.MASKED) kept.copy(stage = Stage.CONFIRMED, alive = alive) else kept
        val signature = sign(identity, "survivors", settled.sid, settled.survivorsDigest)
        return keeping(settled, message(M.CONFIRM, settled.sid, signature))
    }

    /** M10 to M11: one share of every neighbour. */
    private fun reveal(kept: ClientState, data: ByteArray): Reply {
        if (kept.stage == Stage.MASKED) throw OutOfOrder("confirmations came before survivors were settled")
        checkConfirmations(kept, data)
        val revealed = kept.revealed()
        return keeping(revealed, revealed.unmask())
    }

    /** M12. The client drops its state, and the host can delete the kept one. */
    private fun finish(kept: ClientState, data: ByteArray): Reply {
        val reader = openMessage(data, M.RESULT, "the result", kept.sid)
        val (status, aggregateHash, transcriptRoot) =
            Triple(reader.take(1), reader.take(DIGEST_BYTES), reader.take(DIGEST_BYTES))
        val signature = reader.take(SIGNATURE_BYTES)
        reader.close()
        if (status[0] !in 0..1) throw Malformed("status ${status[0]} does not exist")
        verify(policy.serverKey, signature, "result", kept.sid, concat(status, aggregateHash, transcriptRoot))
        ended = SessionResult(summed = status[0] == 0.toByte(), aggregateHash, transcriptRoot)
        return Reply()
    }

    /** A reply whose state must be durable first. */
    private fun keeping(state: ClientState, message: ByteArray): Reply {
        due = afterMasking(state)
        return Reply(message, state.encoded())
    }

    private fun afterMasking(kept: ClientState): Map<Int, Answer> =
        mapOf(
            M.SURVIVORS to { confirm(kept, it) },
            M.CONFIRMATIONS to { reveal(kept, it) },
            M.RESULT to { finish(kept, it) },
        )

    companion object {
        /** The client of a restarted device, from the last [Reply.keep]. Throws [Malformed]. */
        fun restore(identity: SigningKey, policy: AggregationPolicy, keep: ByteArray): Client =
            Client(identity, policy, ::platformRandom).also { it.due = it.afterMasking(ClientState.decode(keep)) }
    }
}
