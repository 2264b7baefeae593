/** Pieces of every encoding of SA1: fields taken from the front, bitmaps, heads. Spec: docs/spec/secagg.md §1, §4. */
package dev.muster.device.secagg

import dev.muster.device.concat
import dev.muster.device.fromLittleEndian
import dev.muster.device.littleEndian
import dev.muster.device.utf8
import java.math.BigInteger
import java.util.BitSet

private const val VERSION = 1
internal const val DIGEST_BYTES = 32
internal const val SHARE_BYTES = 32
internal const val SIGNATURE_BYTES = 64

/** The number of a message, which is its first byte. Devices send the odd ones, and the server the others. */
internal object M {
    const val INVITE = 0
    const val ADVERTISE = 1
    const val ROSTER = 2
    const val SHARES = 3
    const val DELIVER = 4
    const val COMPLAINTS = 5
    const val INCLUDED = 6
    const val MASKED = 7
    const val SURVIVORS = 8
    const val CONFIRM = 9
    const val CONFIRMATIONS = 10
    const val UNMASK = 11
    const val RESULT = 12
}

/** The number of a message. Throws [Malformed] when there is none. */
internal fun numberOf(message: ByteArray): Int {
    val number = message.firstOrNull()?.toInt()
    return number?.takeIf { it in M.INVITE..M.RESULT }
        ?: throw Malformed("a message that begins with ${number ?: "nothing"} does not exist")
}

/** The domain of a hash, key or signature, so that none can be used as another. */
internal fun tag(what: String): ByteArray = utf8("muster.secagg.v1.$what\u0000")

/** Takes fields from the front of a message, called `name`. Bytes that are missing or left over are [Malformed]. */
internal class Reader(private val data: ByteArray, private val name: String) {
    private var at = 0

    /** The next bytes, as a copy. */
    fun take(size: Int): ByteArray {
        if (size > data.size - at) {
            throw Malformed("$name ends after ${data.size} bytes, in a field of $size that begins at $at")
        }
        at += size
        return data.copyOfRange(at - size, at)
    }

    fun u8(): Int = take(1)[0].toInt() and 0xff

    fun u16(): Int = u8() or (u8() shl 8)

    fun u32(): Long = littleEndian(take(4)).int.toLong() and 0xffff_ffff

    fun u64(): ULong = littleEndian(take(8)).long.toULong()

    /** A u32 that counts or places something, none of which there are 2³¹ of. */
    fun size(): Int {
        val found = u32()
        return if (found <= Int.MAX_VALUE) found.toInt() else throw Malformed("$name counts up to $found")
    }

    /** An integer below 2²⁵⁶. */
    fun share(): BigInteger = fromLittleEndian(take(SHARE_BYTES))

    /** A double, which must be finite. */
    fun double(): Double {
        val found = littleEndian(take(8)).double
        if (found.isNaN() || found.isInfinite()) throw Malformed("$name holds a number that is not finite")
        return found
    }

    /** The positions below n whose bits are set. */
    fun bitmap(n: Int): BitSet {
        val found = BitSet.valueOf(take(bitmapBytes(n)))
        if (found.length() > n) throw Malformed("a bitmap of $n positions names others")
        return found
    }

    /** The entries of a list by their positions, which must ascend; `read` takes what follows a position. */
    fun <T> entries(count: Int, read: () -> T): Map<Int, T> {
        val found = LinkedHashMap<Int, T>()
        var last = -1
        repeat(count) {
            val position = size()
            if (position <= last) throw Malformed("positions do not ascend")
            last = position
            found[position] = read()
        }
        return found
    }

    fun close() {
        if (at != data.size) throw Malformed("$name has ${data.size - at} bytes too many")
    }
}

/** A set of positions below n as bits, the least significant first. */
internal fun bitmap(positions: BitSet, n: Int): ByteArray = positions.toByteArray().copyOf(bitmapBytes(n))

private fun bitmapBytes(n: Int): Int = ((n + 7L) / 8).toInt()

/** Whether all positions of a set are in another. */
internal fun BitSet.isWithin(other: BitSet): Boolean = (clone() as BitSet).apply { andNot(other) }.isEmpty

/** A reader behind the head of a message. Throws [Malformed], [UnsupportedSuite] or [WrongSession]. */
internal fun openMessage(data: ByteArray, number: Int, name: String, session: ByteArray? = null): Reader {
    val reader = Reader(data, name)
    val (found, version) = reader.u8() to reader.u8()
    if (found != number) throw Malformed("message M$found came instead of M$number, $name")
    if (version != VERSION) {
        throw UnsupportedSuite("$name has version $version; this end speaks $VERSION: update the older end")
    }
    if (session != null && !reader.take(DIGEST_BYTES).contentEquals(session)) {
        throw WrongSession("$name belongs to another session: it is late, or the other end holds another roster")
    }
    return reader
}

/** A message: its head, the session that it belongs to, and its fields. */
internal fun message(number: Int, session: ByteArray, vararg fields: ByteArray): ByteArray =
    concat(byteArrayOf(number.toByte(), VERSION.toByte()), session, *fields)

/** The positions in a message that is a set of them, and nothing else. */
internal fun readSet(data: ByteArray, number: Int, name: String, sid: ByteArray, n: Int): BitSet {
    val reader = openMessage(data, number, name, sid)
    return reader.bitmap(n).also { reader.close() }
}
