/**
 * Characters as the library of tokenizers has them, whatever version of Unicode a platform knows, and the steps that work on
 * them takes. Spec: plan §1.3.
 */
package dev.muster.device.texts

import dev.muster.device.DeadlinePassed
import java.text.Normalizer

/** What a character is beside its general category. The first three are BERT's; the last is of one that has no normal form. */
internal enum class Mark(val sign: Char) { PUNCTUATION('p'), HIDDEN('h'), ACCENT('a'), NUMBER('n'), FORMLESS('x') }

private const val CAPITAL_I = 0x130
private const val LONG_RUN = 50

// Marks of the lowest and the highest class of all that move.
private const val FIRST_MARK = 0x334
private const val LAST_MARK = 0x345

// White space beyond ASCII and the block of spaces.
private const val SPACES = "\u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000"

/** The tables of `Unicode.kt`, unpacked: by code the place of its kind, and by kind a bit for its category and bits for its marks. */
private object Tables {
    private val names = KINDS.split(' ')
    val categoryNames = names.map { it.take(2) }.distinct()
    val categories = IntArray(names.size) { 1 shl categoryNames.indexOf(names[it].take(2)) }
    val marks = IntArray(names.size) { kind -> Mark.entries.filter { it.sign in names[kind].drop(2) }.sumOf(::bitOf) }
    val kinds = kindsOf(RUNS)
    val capitals: IntArray
    val steps: IntArray

    init {
        val (found, far) = Ints() to Ints()
        var start = 0
        for (run in LOWER.trim().split(Regex("[ \n]+"))) {
            val (after, count, apart, step) = run.split('.').map { it.toInt(36) }
            start += after
            for (one in 0 until count) {
                found.add(start + one * apart)
                far.add(step)
            }
        }
        capitals = found.toArray()
        steps = far.toArray()
    }

    private fun kindsOf(runs: String): ByteArray {
        val kinds = ByteArray(Character.MAX_CODE_POINT + 1)
        var from = 0
        for (run in Regex("([^0-9])([0-9]*)").findAll(runs.replace("\n", ""))) {
            val (sign, count) = run.destructured
            val to = from + if (count.isEmpty()) 1 else count.toInt()
            kinds.fill(SIGNS.indexOf(sign).toByte(), from, to)
            from = to
        }
        return kinds
    }
}

private fun bitOf(mark: Mark) = 1 shl mark.ordinal

/** Bits for the general categories that a name means, such as Lu or L; 0 if there is none. */
internal fun bitsOf(name: String): Int =
    Tables.categoryNames.foldIndexed(0) { place, bits, category -> if (category.startsWith(name)) bits or (1 shl place) else bits }

private val MARKS by lazy { bitsOf("M") }

/** Whether a character's category is among those of the bits. */
internal fun isOf(code: Int, bits: Int): Boolean = Tables.categories[Tables.kinds[code].toInt()] and bits != 0

/** Whether a character has a mark. */
internal fun has(code: Int, mark: Mark): Boolean = Tables.marks[Tables.kinds[code].toInt()] and bitOf(mark) != 0

/** Whether a character is white space. */
internal fun isSpace(code: Int): Boolean =
    if (code < 0x80) code == 0x20 || code in 0x9..0xd else code in 0x2000..0x200a || SPACES.indexOf(code.toChar()) >= 0 && code < 0x10000

/** The characters of a text. */
internal fun codesOf(text: String): IntArray {
    val codes = IntArray(text.codePointCount(0, text.length))
    var at = 0
    for (place in codes.indices) {
        codes[place] = text.codePointAt(at)
        at += Character.charCount(codes[place])
    }
    return codes
}

/** The text of characters from one place to another. */
internal fun textOf(codes: IntArray, from: Int = 0, to: Int = codes.size): String = String(codes, from, to - from)

/** A text with every character replaced by what `change` appends for it. */
internal inline fun changed(text: String, change: StringBuilder.(code: Int) -> Unit): String {
    val made = StringBuilder(text.length)
    var at = 0
    while (at < text.length) {
        val code = text.codePointAt(at)
        at += Character.charCount(code)
        made.change(code)
    }
    return made.toString()
}

/** Lower case letter by letter, so that a sigma at the end of a word is like any other. */
internal fun lowered(text: String): String =
    changed(text) { code -> if (code == CAPITAL_I) append("i\u0307") else appendCodePoint(lowered(code)) }

private fun lowered(code: Int): Int {
    if (code < 0x80) return if (code in 'A'.code..'Z'.code) code + 0x20 else code
    val place = Tables.capitals.binarySearch(code)
    return if (place < 0) code else code + Tables.steps[place]
}

/**
 * The normal form of a text: of Unicode 9.0, which has none for newer characters and lets none of them move.
 *
 * Platforms agree on the forms of all others, as these never change.
 */
internal fun normalised(text: String, form: Normalizer.Form): String {
    val made = StringBuilder(text.length)
    var from = 0
    var at = 0
    while (at < text.length) {
        val code = text.codePointAt(at)
        val next = at + Character.charCount(code)
        if (has(code, Mark.FORMLESS)) {
            made.append(Normalizer.normalize(ordered(text.substring(from, at)), form)).append(text, at, next)
            from = next
        }
        at = next
    }
    return made.append(Normalizer.normalize(ordered(text.substring(from)), form)).toString()
}

/** A text with the marks of long runs in canonical order, for which platforms take the square of a run's length. */
private fun ordered(text: String): String {
    val made = StringBuilder(text.length)
    var from = 0
    while (from < text.length) {
        val isMarks = isOf(text.codePointAt(from), MARKS)
        var to = from
        while (to < text.length && isOf(text.codePointAt(to), MARKS) == isMarks) to += Character.charCount(text.codePointAt(to))
        val run = text.substring(from, to)
        made.append(if (isMarks && run.length >= LONG_RUN) inOrder(run) else run)
        from = to
    }
    return made.toString()
}

private class Placed(val mark: Int, val part: Int, val rank: Int)

private fun inOrder(run: String): String {
    val marks = codesOf(run).flatMap { codesOf(decomposed(it)).asList() }
    val ranks = ranksOf(marks.distinct())
    var part = 0
    val placed =
        marks.map { mark ->
            val rank = ranks[mark]
            if (rank != null) Placed(mark, part, rank) else Placed(mark, part + 1, 0).also { part += 2 }
        }
    return textOf(placed.sortedWith(compareBy({ it.part }, { it.rank })).map { it.mark }.toIntArray())
}

/** The places of marks in canonical order, of those that move at all. */
private fun ranksOf(marks: List<Int>): Map<Int, Int> {
    val moving = marks.filter { goesAfter(LAST_MARK, it) || goesAfter(it, FIRST_MARK) }
    val sorted = moving.sortedWith { one, other -> if (goesAfter(one, other)) 1 else if (goesAfter(other, one)) -1 else 0 }
    var rank = 0
    return sorted.withIndex().associate { (place, mark) ->
        if (place > 0 && goesAfter(mark, sorted[place - 1])) rank++
        mark to rank
    }
}

private fun goesAfter(one: Int, other: Int) = one != other && decomposed(one, other) == textOf(intArrayOf(other, one))

private fun decomposed(vararg codes: Int): String = Normalizer.normalize(textOf(codes), Normalizer.Form.NFD)

// Steps between two questions whether to go on.
private const val STEPS = 1 shl 14

/** A count of steps. [keepGoing] is asked now and then; false ends the work with [DeadlinePassed]. */
internal class Work(private val keepGoing: () -> Boolean = { true }) {
    var steps = 0L
        private set
    private var next = STEPS.toLong()

    fun spend(more: Int) {
        steps += more
        if (steps >= next) {
            next = steps + STEPS
            ask()
        }
    }

    /** Ask whether to go on. */
    fun ask() {
        if (!keepGoing()) throw DeadlinePassed("stopped while texts became tokens: the report would come too late")
    }
}
