/**
 * JSON, read strictly: no name twice, nothing beyond the standard, integers of up to 64 bits exact.
 *
 * Libraries for Kotlin take duplicate names, quoted numbers and more, which Python's devices and TypeScript's refuse.
 */
package dev.muster.device

import java.math.BigInteger

private const val DEEPEST = 200
private const val EXACT_DIGITS = 20
private const val MOST_COUNT = (1L shl 53) - 1
// What is escaped by a letter, and the letters.
private const val SHORT = "\"\\\b\u000c\n\r\t"
private const val LETTERS = "\"\\bfnrt"
private val NUMBER = Regex("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?")
private val HALVES = 0xD800..0xDFFF
private val DIGEST = Regex("[0-9a-f]{64}")

/** A value in a JSON text, called `noun` in errors, at a path from its top. Every reader throws [FormatException]. */
internal class Json(val value: Any?, private val noun: String, private val path: String = "") {
    /** A member that must be there. */
    operator fun get(name: String): Json {
        val members = members()
        if (name !in members) at(name, null).wrong("a member")
        return at(name, members[name])
    }

    /** A member that may be missing; null then, and not where it is null. */
    fun optional(name: String): Json? = members().let { if (name in it) at(name, it[name]) else null }

    /** A member that may be missing or null. */
    fun nullable(name: String): Json? = members()[name]?.let { at(name, it) }

    /** The members of an object. */
    @Suppress("UNCHECKED_CAST") // `parse` makes no others
    fun members(): Map<String, Any?> = value as? Map<String, Any?> ?: wrong("an object")

    fun text(): String = value as? String ?: wrong("a text")

    /** A text that matches a pattern as a whole. */
    fun text(pattern: Regex): String = text().also { if (!pattern.matches(it)) wrong("a text like $pattern") }

    fun flag(): Boolean = value as? Boolean ?: wrong("true or false")

    /** A finite number. */
    fun number(): Double {
        val found = (value as? Number)?.toDouble() ?: wrong("a number")
        return if (found.isInfinite()) wrong("a finite number") else found
    }

    /** An integer from `range`. 1.0 is none. */
    fun whole(range: LongRange): Long =
        (value as? Long)?.takeIf { it in range } ?: wrong("an integer from ${range.first} to ${range.last}")

    /** A size or a count. */
    fun count(): Long = whole(0..MOST_COUNT)

    /** A size or a count that fits an array. */
    fun size(from: Int = 0): Int = whole(from.toLong()..Int.MAX_VALUE).toInt()

    /** An integer from 0 to 2⁶³ − 1. */
    fun wide(): Long = whole(0..Long.MAX_VALUE)

    /** A SHA-256 in hex. */
    fun digest(): String = text(DIGEST)

    /** Bytes in base64, of a fixed size where one is given. */
    fun bytes(size: Int? = null): ByteArray {
        val found =
            try {
                fromBase64(text())
            } catch (error: FormatException) {
                wrong("bytes in base64: ${error.message}")
            }
        return if (size == null || found.size == size) found else wrong("$size bytes")
    }

    fun <T> list(read: (Json) -> T): List<T> {
        val values = value as? List<*> ?: wrong("a list")
        return values.mapIndexed { place, one -> read(at(place.toString(), one)) }
    }

    /** The members of an object whose names are free. */
    fun <T> map(read: (Json) -> T): Map<String, T> = members().mapValues { (name, one) -> read(at(name, one)) }

    /** Refuse this value. */
    fun wrong(wanted: String): Nothing =
        throw FormatException("malformed $noun: wanted $wanted at ${path.ifEmpty { "the top" }}")

    private fun at(name: String, value: Any?) = Json(value, noun, if (path.isEmpty()) name else "$path.$name")

    companion object {
        /** A JSON text. Throws [FormatException], calling it `noun`. */
        fun parse(text: String, noun: String): Json =
            try {
                Json(Reader(text).document(), noun)
            } catch (error: FormatException) {
                throw FormatException("malformed $noun: ${error.message}")
            }

        /** The same of UTF-8 bytes. */
        fun parse(data: ByteArray, noun: String): Json {
            val text =
                try {
                    text(data)
                } catch (error: FormatException) {
                    throw FormatException("malformed $noun: ${error.message}")
                }
            return parse(text, noun)
        }

        /** The JSON text of maps, lists, texts, numbers, flags and null; bytes are written in base64. */
        fun write(value: Any?): String = StringBuilder().also { append(it, value) }.toString()

        private fun append(to: StringBuilder, value: Any?) {
            when (value) {
                null, is Boolean, is Int, is Long, is BigInteger -> to.append(value)
                is Double -> to.append(if (value == Math.rint(value) && Math.abs(value) < MOST_COUNT) value.toLong() else value)
                is ByteArray -> to.append('"').append(base64(value)).append('"')
                is Map<*, *> -> appendAll(to, '{', '}', value.entries) { (name, one) ->
                    quote(to, name as String)
                    to.append(':')
                    append(to, one)
                }
                is Collection<*> -> appendAll(to, '[', ']', value) { append(to, it) }
                else -> quote(to, value as String)
            }
        }

        private fun <T> appendAll(to: StringBuilder, open: Char, close: Char, all: Iterable<T>, one: (T) -> Unit) {
            to.append(open)
            all.forEachIndexed { place, item ->
                if (place > 0) to.append(',')
                one(item)
            }
            to.append(close)
        }

        // As JSON.stringify and msgspec write it, since layouts are hashed as they are written.
        private fun quote(to: StringBuilder, text: String) {
            to.append('"')
            for ((at, unit) in text.withIndex()) {
                val short = SHORT.indexOf(unit)
                when {
                    short >= 0 -> to.append('\\').append(LETTERS[short])
                    unit < ' ' || isLone(text, at) -> to.append("\\u").append(unit.code.toString(16).padStart(4, '0'))
                    else -> to.append(unit)
                }
            }
            to.append('"')
        }

        /** Whether half of a surrogate pair stands alone. */
        private fun isLone(text: String, at: Int): Boolean =
            when {
                text[at].isHighSurrogate() -> text.getOrNull(at + 1)?.isLowSurrogate() != true
                text[at].isLowSurrogate() -> text.getOrNull(at - 1)?.isHighSurrogate() != true
                else -> false
            }
    }
}

/** One pass over a text. Objects become maps in their order, integers Long or BigInteger, other numbers Double. */
private class Reader(private val text: String) {
    private var at = 0

    fun document(): Any? {
        val value = value(0)
        space()
        return if (at == text.length) value else wrong("something follows the value")
    }

    private fun value(depth: Int): Any? {
        if (depth > DEEPEST) wrong("values are nested too deeply")
        space()
        return when (peek()) {
            '{' -> members(depth)
            '[' -> list(depth)
            '"' -> string()
            't' -> word("true", true)
            'f' -> word("false", false)
            'n' -> word("null", null)
            else -> number()
        }
    }

    private fun members(depth: Int): Map<String, Any?> {
        val found = LinkedHashMap<String, Any?>()
        at++
        if (isNext('}')) return found
        do {
            space()
            if (peek() != '"') wrong("a name is missing")
            val name = string()
            if (!isNext(':')) wrong("a colon is missing")
            if (name in found) wrong("the name ${plain(name)} is there twice")
            found[name] = value(depth + 1)
        } while (isNext(','))
        return if (isNext('}')) found else wrong("an object does not end")
    }

    private fun list(depth: Int): List<Any?> {
        val found = ArrayList<Any?>()
        at++
        if (isNext(']')) return found
        do found += value(depth + 1) while (isNext(','))
        return if (isNext(']')) found else wrong("a list does not end")
    }

    private fun string(): String {
        val begin = ++at
        while (at < text.length && text[at] != '"' && text[at] != '\\' && text[at] >= ' ') at++
        if (peek() == '"') return text.substring(begin, at++)
        val found = StringBuilder(text.substring(begin, at))
        while (true) {
            val unit = peek() ?: wrong("a text does not end")
            at++
            when {
                unit == '"' -> return found.toString().also { if (it.codePoints().anyMatch(HALVES::contains)) wrong("half of a character") }
                unit == '\\' -> found.append(escape())
                unit < ' ' -> wrong("a text holds a control character")
                else -> found.append(unit)
            }
        }
    }

    private fun escape(): Char {
        val unit = peek() ?: wrong("a text does not end")
        at++
        if (unit == 'u') {
            val digits = text.substring(at, minOf(at + 4, text.length))
            if (digits.length < 4 || digits.any { Character.digit(it, 16) < 0 || it > 'f' }) wrong("a malformed \\u")
            at += 4
            return digits.toInt(16).toChar()
        }
        val place = "\"\\/bfnrt".indexOf(unit)
        return if (place < 0) wrong("an unknown escape") else "\"\\/\b\u000c\n\r\t"[place]
    }

    private fun number(): Any {
        val match = NUMBER.matchAt(text, at) ?: wrong("a value is missing")
        at = match.range.last + 1
        val isWhole = match.groupValues[2].isEmpty() && match.groupValues[3].isEmpty()
        if (!isWhole || match.value.length > EXACT_DIGITS + 1) return match.value.toDouble()
        return match.value.toLongOrNull() ?: BigInteger(match.value)
    }

    private fun <T> word(word: String, value: T): T {
        if (!text.startsWith(word, at)) wrong("a value is missing")
        at += word.length
        return value
    }

    private fun isNext(unit: Char): Boolean {
        space()
        return (peek() == unit).also { if (it) at++ }
    }

    private fun space() {
        while (at < text.length && text[at] in " \t\n\r") at++
    }

    private fun peek(): Char? = text.getOrNull(at)

    private fun wrong(why: String): Nothing = throw FormatException("$why at character $at")
}
