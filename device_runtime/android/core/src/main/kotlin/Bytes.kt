/** Bytes and texts: joined, compared, encoded, and what comes from others made safe to show. */
package dev.muster.device

import java.math.BigInteger
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.charset.CharacterCodingException
import java.util.Base64

/** UTF-8 bytes of a text. */
internal fun utf8(text: String): ByteArray = text.toByteArray(Charsets.UTF_8)

/** The text of UTF-8 bytes. Throws [FormatException] when they are not UTF-8. */
internal fun text(data: ByteArray): String =
    try {
        Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(data)).toString()
    } catch (_: CharacterCodingException) {
        throw FormatException("bytes that are not UTF-8")
    }

/** All parts, one after the other. */
internal fun concat(vararg parts: ByteArray): ByteArray = joined(parts.asList())

/** The same of a list. */
internal fun joined(parts: List<ByteArray>): ByteArray {
    val whole = ByteArray(parts.sumOf { it.size })
    var at = 0
    for (part in parts) {
        part.copyInto(whole, at)
        at += part.size
    }
    return whole
}

/** A buffer over bytes, in the byte order of every format here. */
internal fun littleEndian(data: ByteArray): ByteBuffer = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)

/** An unsigned integer in `size` bytes, the lowest first. */
internal fun littleEndian(value: Long, size: Int): ByteArray = ByteArray(size) { if (it < 8) (value ushr 8 * it).toByte() else 0 }

/** The same of an integer of any length. */
internal fun littleEndian(value: BigInteger, size: Int): ByteArray =
    ByteArray(size) { value.shiftRight(8 * it).toByte() }

/** The unsigned integer in bytes whose lowest come first. */
internal fun fromLittleEndian(data: ByteArray): BigInteger = BigInteger(1, data.reversedArray())

/** Unsigned 32-bit little-endian integers, joined. */
internal fun u32(vararg values: Int): ByteArray {
    val buffer = littleEndian(ByteArray(4 * values.size))
    for (value in values) buffer.putInt(value)
    return buffer.array()
}

/** Unsigned 64-bit little-endian integers, joined. */
internal fun u64(vararg values: Long): ByteArray {
    val buffer = littleEndian(ByteArray(8 * values.size))
    for (value in values) buffer.putLong(value)
    return buffer.array()
}

/** Little-endian float32 values. */
internal fun bytesOf(values: FloatArray): ByteArray {
    val buffer = littleEndian(ByteArray(4 * values.size))
    buffer.asFloatBuffer().put(values)
    return buffer.array()
}

/** The inverse of `bytesOf`. */
internal fun floatsOf(data: ByteArray): FloatArray =
    FloatArray(data.size / 4).also { littleEndian(data).asFloatBuffer().get(it) }

private const val DIGITS = "0123456789abcdef"

/** Bytes in hex, in lower case. */
internal fun hex(data: ByteArray): String =
    CharArray(2 * data.size) { DIGITS[data[it / 2].toInt() shr 4 * (1 - it % 2) and 15] }.concatToString()

/** The inverse of `hex`. Throws [FormatException]. */
internal fun fromHex(letters: String): ByteArray {
    if (letters.length % 2 != 0 || !letters.all { it in DIGITS }) throw FormatException("not bytes in hex")
    return ByteArray(letters.length / 2) { (DIGITS.indexOf(letters[2 * it]) shl 4 or DIGITS.indexOf(letters[2 * it + 1])).toByte() }
}

/** Base64 with padding (RFC 4648 §4). */
internal fun base64(data: ByteArray): String = Base64.getEncoder().encodeToString(data)

/** The inverse of `base64`. It accepts only what `base64` writes: one value has one spelling. Throws [FormatException]. */
internal fun fromBase64(letters: String): ByteArray = decoded(letters, Base64.getDecoder(), Base64.getEncoder())

/** Base64url without padding (RFC 4648 §5), as keys and signatures are written. */
internal fun base64url(data: ByteArray): String = Base64.getUrlEncoder().withoutPadding().encodeToString(data)

/** The inverse of `base64url`, and of nothing else. Throws [FormatException]. */
internal fun fromBase64url(letters: String): ByteArray =
    decoded(letters, Base64.getUrlDecoder(), Base64.getUrlEncoder().withoutPadding())

private fun decoded(letters: String, decoder: Base64.Decoder, encoder: Base64.Encoder): ByteArray {
    val data =
        try {
            decoder.decode(letters)
        } catch (_: IllegalArgumentException) {
            throw FormatException("not base64")
        }
    if (encoder.encodeToString(data) != letters) throw FormatException("base64 that is not in its one spelling")
    return data
}

/** The number of bits of an unsigned integer, without leading zeros. */
internal fun bitLength(value: Int): Int = 32 - Integer.numberOfLeadingZeros(value)

// Letters and marks that have no width or no ink.
private val INKLESS =
    setOf(0x115f, 0x1160, 0x2800, 0x3164, 0xffa0, 0x034f, 0x17b4, 0x17b5, 0x180f) +
        (0x180b..0x180d) + (0xfe00..0xfe0f) + (0xe0100..0xe01ef)

// Controls, formats, what is unassigned or private, and spaces but the plain one.
private val UNSEEN =
    setOf(
        Character.CONTROL, Character.FORMAT, Character.SURROGATE, Character.PRIVATE_USE, Character.UNASSIGNED,
        Character.SPACE_SEPARATOR, Character.LINE_SEPARATOR, Character.PARAGRAPH_SEPARATOR,
    ).map { it.toInt() }

/**
 * A text as one line that is safe to show: all but letters, marks, numbers, signs and plain spaces is escaped as in JSON.
 *
 * A JSON document keeps its meaning.
 */
internal fun visible(text: String): String =
    buildString(text.length) {
        var at = 0
        while (at < text.length) {
            val point = text.codePointAt(at)
            val units = text.substring(at, at + Character.charCount(point))
            val isSeen = point == ' '.code || (Character.getType(point) !in UNSEEN && point !in INKLESS)
            if (isSeen) append(units) else units.forEach { append("\\u").append(it.code.toString(16).padStart(4, '0')) }
            at += units.length
        }
    }

private const val MOST_SHOWN = 500

/** A foreign text that is safe to keep and print: made visible, and not too long. */
internal fun plain(text: String): String = visible(text.take(MOST_SHOWN)).take(MOST_SHOWN)
