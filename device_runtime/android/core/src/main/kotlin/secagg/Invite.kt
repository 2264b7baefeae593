/**
 * The invitation to a session, M0, and a device's conditions for accepting one: how strong a session must be.
 *
 * Spec: docs/spec/secagg.md §2, §4, §6.
 */
package dev.muster.device.secagg

import dev.muster.device.sha256
import java.math.BigInteger

private const val SUITE = 1
private const val ACTIVE = 1

/**
 * M0. The terms of a session: segments to sum, number of devices, round. [hash] is `invite_hash`.
 *
 * deadline: in seconds since 1970; credentials must be valid until then. round: a number that counts attempts too.
 */
internal class Invite(
    val task: ByteArray,
    val round: ULong,
    val deadline: ULong,
    val nMax: Long,
    val minSum: Long,
    val wMax: Long,
    val layoutHash: ByteArray,
    val modelHash: ByteArray,
    val segments: List<PackedSegment>,
    val hash: ByteArray,
)

/**
 * Constants of the device, which no server can change.
 *
 * serverKey, authority: Ed25519 public keys of 32 bytes. minSum: the least number of devices that a sum may have.
 */
internal class AggregationPolicy(val serverKey: ByteArray, val authority: ByteArray, val minSum: Long)

/** The hashes of the model and the report layout that a device holds, 32 bytes each. */
internal class HeldModel(val modelHash: ByteArray, val layoutHash: ByteArray)

/**
 * The invitation in M0, if this device may accept it. This checks one signature, so call it before other work.
 *
 * lastRound: the greatest round of the task that the device ever answered for; -1 for none. Throws a [SecaggException]. The
 * mode without signatures, which is for simulations, is never followed.
 */
internal fun acceptInvitation(policy: AggregationPolicy, message: ByteArray, held: HeldModel, lastRound: Long): Invite {
    val invite = verifiedInvite(message, policy.serverKey)
    if (lastRound >= 0 && invite.round <= lastRound.toULong()) {
        throw ReplayedRound("round ${invite.round} is over for this device: it answered for $lastRound")
    }
    checkStrength(policy, invite)
    checkHeadroom(invite.segments, invite.nMax)
    if (!invite.modelHash.contentEquals(held.modelHash) || !invite.layoutHash.contentEquals(held.layoutHash)) {
        throw ModelMismatch("the invitation is for another model or layout than this device holds")
    }
    return invite
}

private fun checkStrength(policy: AggregationPolicy, invite: Invite) {
    if (invite.nMax < LEAST_COHORT) {
        throw PolicyViolation("a cohort of at most ${invite.nMax} devices is refused: it must have $LEAST_COHORT")
    }
    if (invite.minSum !in maxOf(policy.minSum, 1)..invite.nMax) {
        throw PolicyViolation(
            "the sum would be over at least ${invite.minSum} of at most ${invite.nMax} devices; this device insists on ${policy.minSum}",
        )
    }
}

private fun verifiedInvite(data: ByteArray, serverKey: ByteArray): Invite {
    val reader = openMessage(data, M.INVITE, "the invitation")
    val (suite, mode) = reader.u8() to reader.u8()
    if (suite != SUITE) throw UnsupportedSuite("the invitation asks for suite $suite; this end knows $SUITE: update it")
    if (mode > ACTIVE) throw Malformed("mode $mode does not exist")
    val invite =
        Invite(
            task = reader.take(32),
            round = reader.u64(),
            deadline = reader.u64(),
            nMax = reader.u32(),
            minSum = reader.u32(),
            wMax = reader.u32().also { if (it == 0L) throw Malformed("a greatest weight of 0 has no meaning") },
            layoutHash = reader.take(DIGEST_BYTES),
            modelHash = reader.take(DIGEST_BYTES),
            segments = List(reader.u16()) { readSegment(reader) },
            hash = sha256(data.copyOf(maxOf(0, data.size - SIGNATURE_BYTES))),
        )
    val signature = reader.take(SIGNATURE_BYTES)
    reader.close()
    if (mode != ACTIVE) throw PolicyViolation("the session has no signatures (mode honest), which is for simulations")
    verify(serverKey, signature, "invite", NO_CONTEXT, invite.hash)
    return invite
}

private fun readSegment(reader: Reader): PackedSegment {
    val (size, fieldBits, inBits) = Triple(reader.size(), reader.u8(), reader.u8())
    val weighted = reader.u8()
    if (weighted > 1 || fieldBits == 0) throw Malformed("a segment has a flag or a width that does not exist")
    val (low, high, norm) = Triple(reader.double(), reader.double(), reader.double())
    return PackedSegment(FixedPoint(size, inBits, low, high, norm, weighted == 1, reader.u32()), fieldBits)
}

/** A sum over fewer devices reveals too much about each. */
internal const val LEAST_COHORT = 8
private const val COMPLETE_UP_TO = 64
private const val LARGEST_COHORT = 1 shl 20
private const val MOST_NEIGHBOURS = 1000
private const val SECURITY_BITS = 40

/** Throws [PolicyViolation] if a server can collect both secrets of one of n devices with probability above 2⁻⁴⁰. */
internal fun checkParameters(n: Int, k: Int, t: Int) {
    if (n !in LEAST_COHORT..LARGEST_COHORT) {
        throw PolicyViolation("a cohort of $n devices is refused: it must have $LEAST_COHORT to $LARGEST_COHORT")
    }
    val isRing = n > COMPLETE_UP_TO && k < n - 1 && k <= MOST_NEIGHBOURS && k % 2 == 0
    if (t > k || !(k == n - 1 || isRing) || !isSecure(n, k, t)) {
        throw PolicyViolation("$t shares among $k neighbours are too weak for $n devices")
    }
}

/**
 * The fewest honest devices in a sum of minSum or more, when a roster has up to nMax devices; 0 when all may be corrupt.
 *
 * It assumes that as many devices are corrupt, and survive, as a graph of any size in this range must tolerate.
 */
internal fun leastHonest(minSum: Long, nMax: Long): Long =
    maxOf(0, minSum - maxOf(mostCorrupt(nMax), mostCorrupt(minOf(nMax, COMPLETE_UP_TO.toLong()))))

private fun mostCorrupt(n: Long): Long = if (n <= COMPLETE_UP_TO) maxOf(2, (n + 4) / 5) else n / 10

// Honest neighbours give one share of either secret, corrupt ones both: 2t shares need 2t − k corrupt ones.
private fun isSecure(n: Int, k: Int, t: Int): Boolean =
    2 * t > k && if (k == n - 1) 2 * t - k > mostCorrupt(n.toLong()) else isRare(n, k, 2 * t - k)

/**
 * Whether the expected number of devices with at least `bad` bad neighbours is below 2⁻⁴⁰.
 *
 * A tenth of the n devices is bad, the k neighbours are drawn from the n − 1 others: a hypergeometric tail.
 */
private fun isRare(n: Int, k: Int, bad: Int): Boolean {
    val c = n / 10
    val ways = (bad..minOf(c, k)).map { choose(c, it) * choose(n - 1 - c, k - it) }.fold(BigInteger.ZERO, BigInteger::add)
    return (ways * n.toBigInteger()).shiftLeft(SECURITY_BITS) < choose(n - 1, k)
}

private fun choose(n: Int, k: Int): BigInteger {
    if (k > n) return BigInteger.ZERO
    return (0 until k).fold(BigInteger.ONE) { ways, i -> ways * (n - i).toBigInteger() / (i + 1).toBigInteger() }
}
