/** Keys of a session: signatures, derivations, boxes, shares, and masks in the domains of SA1. Spec: docs/spec/secagg.md §1, §6. */
package dev.muster.device.secagg

import dev.muster.device.Boxes
import dev.muster.device.FormatException
import dev.muster.device.Keystream
import dev.muster.device.PairKey
import dev.muster.device.SigningKey
import dev.muster.device.concat
import dev.muster.device.fromLittleEndian
import dev.muster.device.hex
import dev.muster.device.hkdf
import dev.muster.device.littleEndian
import dev.muster.device.u32
import dev.muster.device.verifies
import java.math.BigInteger

/** Random bytes, as many as asked for. Secrets are drawn from them; a test replaces them by a fixed sequence. */
internal typealias RandomSource = (Int) -> ByteArray

internal val NO_CONTEXT = ByteArray(32)
private val FIELD_PRIME = BigInteger.ONE.shiftLeft(255) - 19.toBigInteger()

/** A signature (64 bytes) over a domain, a context (32 bytes) and a body. */
internal fun sign(key: SigningKey, what: String, context: ByteArray, body: ByteArray): ByteArray =
    key.sign(concat(tag(what), context, body))

/** Throws [BadSignature] unless `signature` is the signer's (a 32-byte public key) over exactly these values. */
internal fun verify(signer: ByteArray, signature: ByteArray, what: String, context: ByteArray, body: ByteArray) {
    if (!verifies(signer, signature, concat(tag(what), context, body))) {
        throw BadSignature("the $what signature is not that of ${named(signer)}: it was altered, or made for another session")
    }
}

/** A private key of X25519 as the integer that is shared out: clamped as RFC 7748 §5 says. */
internal fun scalarOf(secret: ByteArray): BigInteger {
    val clamped = secret.copyOf()
    clamped[0] = (clamped[0].toInt() and 0xf8).toByte()
    clamped[31] = (clamped[31].toInt() and 0x7f or 0x40).toByte()
    return fromLittleEndian(clamped)
}

/**
 * The shared secret with a peer's public key, 32 bytes.
 *
 * Throws [BadPoint] when that is not the one encoding of its point, or has low order: its sender wants a known secret.
 */
internal fun agree(key: PairKey, peer: ByteArray): ByteArray {
    if (fromLittleEndian(peer) >= FIELD_PRIME) {
        throw BadPoint("public key ${named(peer)} is not reduced: it would have two encodings")
    }
    try {
        return key.agree(peer)
    } catch (_: FormatException) {
        throw BadPoint("public key ${named(peer)} has low order: its sender wants a known secret")
    }
}

private fun named(key: ByteArray) = "${hex(key).take(12)}…"

/** A key of 32 bytes for one purpose between numbered parties in one session. */
internal fun derive(secret: ByteArray, sid: ByteArray, what: String, vararg numbers: Int): ByteArray =
    hkdf(secret, sid, concat(tag(what), u32(*numbers)))

/** Shares in a box that names sender and receiver. A key must seal only one box. */
internal fun Boxes.sealShares(key: ByteArray, shares: ByteArray, sid: ByteArray, sender: Int, receiver: Int): ByteArray =
    seal(key, shares, concat(sid, u32(sender, receiver)))

/** The content of a box. Throws [BadCiphertext], which names the sender. */
internal fun Boxes.openShares(key: ByteArray, box: ByteArray, sid: ByteArray, sender: Int, receiver: Int): ByteArray =
    try {
        open(key, box, concat(sid, u32(sender, receiver)))
    } catch (_: FormatException) {
        throw BadCiphertext("the box from position $sender does not open: it was altered, or sealed for another")
    }

internal val PRIME: BigInteger = BigInteger.ONE.shiftLeft(256) - 189.toBigInteger()

/** A random integer below [PRIME]. */
internal fun randomBelowPrime(random: RandomSource): BigInteger =
    generateSequence { fromLittleEndian(random(SHARE_BYTES)) }.first { it < PRIME }

/** Shares of a secret below [PRIME] for ranks 1 … k. Any t of them recover it; fewer reveal nothing. */
internal fun split(secret: BigInteger, k: Int, t: Int, random: RandomSource): List<BigInteger> {
    val polynomial = listOf(secret) + List(t - 1) { randomBelowPrime(random) }
    return (1..k).map { rank ->
        val x = rank.toBigInteger()
        polynomial.foldRight(BigInteger.ZERO) { coefficient, value -> (value * x + coefficient).mod(PRIME) }
    }
}

/** A stream by its key (32 bytes), which is added to words or subtracted. */
internal class Mask(val key: ByteArray, val isAdded: Boolean)

/** The words of which all streams are added before the next ones: with a stream they stay in a core's second cache. */
private const val CHUNK_WORDS = 1 shl 13

/** Add streams to words, or subtract them, in place, modulo 2⁶⁴. */
internal fun addMasks(words: LongArray, masks: List<Mask>) {
    val streams = masks.map { Keystream(it.key) }
    val bytes = ByteArray(8 * CHUNK_WORDS)
    val (buffer, drawn) = littleEndian(bytes).asLongBuffer() to LongArray(CHUNK_WORDS)
    for (first in words.indices step CHUNK_WORDS) {
        val size = minOf(CHUNK_WORDS, words.size - first)
        for ((place, stream) in streams.withIndex()) {
            stream.fill(bytes, 8 * size)
            buffer.rewind()
            buffer.get(drawn, 0, size)
            if (masks[place].isAdded) add(words, first, drawn, size) else subtract(words, first, drawn, size)
        }
    }
}

private fun add(words: LongArray, first: Int, drawn: LongArray, size: Int) {
    for (place in 0 until size) words[first + place] += drawn[place]
}

private fun subtract(words: LongArray, first: Int, drawn: LongArray, size: Int) {
    for (place in 0 until size) words[first + place] -= drawn[place]
}
