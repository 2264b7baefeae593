/**
 * Expressions of tokenizers, which may come from a hostile signer: their matches in a time that is linear in the text.
 *
 * The leftmost match, and of several the one that backtracking would find first. Every pair of state and place is tried once (as
 * BitState of RE2 does: Cox, "Regular expression matching: the virtual machine approach", 2009). Nothing that a match remembers
 * can change whether a pair fails, as groups neither repeat nor capture. Spec: plan §1.3.
 */
package dev.muster.device.texts

import dev.muster.device.FormatException

// Classes of platforms' own expressions differ, so none stands here: \d has other digits on Android.

// An escape, a group, an alternative, a repetition, or a letter.
private val TOKEN =
    Regex("""\\[pP]\{[^}]*\}|\\.|\((?:\?(?:i?:|[=!]|.?))?|(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})[*+?]?|.""", RegexOption.DOT_MATCHES_ALL)
private val REPETITION = Regex("""(?:[*+?]|\{([0-9]+)(,?)([0-9]*)\})([*+?]?)""")
private val COUNTED = Regex("""\{([0-9]+),?([0-9]*)\}""")
private const val CATEGORY = """\\[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfnos]?)\}"""
private const val LETTER = """(?:\\[nrtfv]|\\[^A-Za-z0-9]|&(?!&)|[^\[\]\\&-])"""

// What stands for one letter, outside of classes and in them.
private val KNOWN = Regex("""[^$^{\[\\]|\\[sSdDnrtfv]|\\[^A-Za-z0-9]|$CATEGORY""", RegexOption.DOT_MATCHES_ALL)
private val MEMBER = Regex("""$CATEGORY|\\[sd]|$LETTER(?:-$LETTER)?|-""")
private val RANGE = Regex("""($LETTER)(?:-($LETTER))?""")

// What may be in a group that ignores the case, where no two letters are one in another case, such as ß.
private val OF_LETTERS = Regex("""(?!.*(?:[sS][sStT]|[fF][fFiIlL]))[ !"#%&',/0-9:;<=>@A-Z_`a-z~|-]*""")
private val CONTROLS = mapOf('n' to '\n', 'r' to '\r', 't' to '\t', 'f' to '\u000c', 'v' to '\u000b')
private const val LONG_S = 0x17f
private const val KELVINS = 0x212a
private val GROUPS = setOf("(", "(?:", "(?i:")
private const val LONGEST = 2000
private const val MOST_COUNTED = 200
private const val DEEPEST = 100
private const val NO_END = Int.MAX_VALUE
private const val END = 0

/** Which letters a part means. */
private fun interface Letters {
    fun hold(code: Int): Boolean
}

private sealed interface Node {
    class One(val letters: Letters) : Node

    class Look(val letters: Letters, val ahead: Boolean) : Node

    class All(val of: List<Node>) : Node

    class Any(val of: List<Node>) : Node

    class Repeat(val of: Node, val least: Int, val most: Int) : Node
}

/** What to do at a place. */
private sealed interface State {
    /** Take a letter and go on. */
    class Take(val letters: Letters, val next: Int) : State

    /** Look at the next letter and go on. */
    class Look(val letters: Letters, val ahead: Boolean, val next: Int) : State

    /** Try one state and then another. */
    class Fork(val first: Int, val second: Int) : State
}

/** A compiled expression. Throws [FormatException], saying what is not known, and for one that is malformed. */
internal class Expression(source: String) {
    private val states = arrayListOf<State>(State.Fork(END, END)) // in the place of the end, which is no state
    private val start: Int
    private val words: Int

    init {
        val counted = COUNTED.findAll(source).sumOf { (it.groupValues[2].ifEmpty { it.groupValues[1] }).toDouble() }
        if (source.codePointCount(0, source.length) > LONGEST || counted > MOST_COUNTED) refuse("an expression that is too long")
        start = compiled(Parser(source).parsed(), END)
        words = (states.size + 31) / 32
    }

    /**
     * Where matches begin and end, in letters (code points): both of the first, both of the second, and so on; those that are
     * empty only where no other ends.
     */
    fun matches(codes: IntArray, work: Work): IntArray = Search(codes, work).all()

    private inner class Search(private val codes: IntArray, private val work: Work) {
        private val tried = IntArray(words * (codes.size + 1))
        private val waiting = Ints() // states, each with a place

        fun all(): IntArray {
            val found = Ints()
            var last = -1
            var from = 0
            while (from < codes.size) {
                val end = endOf(from)
                // What was tried beyond the end failed, and fails again; at the end the match itself may have been.
                if (end >= 0) tried.fill(0, end * words, (end + 1) * words)
                if (end > from || end == from && from > last) {
                    found.add(from)
                    found.add(end)
                    last = end
                }
                from = maxOf(end, from + 1)
            }
            return found.toArray()
        }

        /** Where the match from a place ends; -1 if there is none. */
        private fun endOf(from: Int): Int {
            waiting.clear()
            wait(start, from)
            while (waiting.size > 0) {
                work.spend(1)
                val place = waiting.removeLast()
                val number = waiting.removeLast()
                if (number == END) return place
                if (!wasTried(number, place)) advance(states[number], place)
            }
            return -1
        }

        private fun advance(state: State, place: Int) {
            when (state) {
                is State.Fork -> {
                    wait(state.second, place)
                    wait(state.first, place)
                }
                is State.Look -> if (holds(state.letters, place) == state.ahead) wait(state.next, place)
                is State.Take -> if (holds(state.letters, place)) wait(state.next, place + 1)
            }
        }

        private fun holds(letters: Letters, place: Int) = place < codes.size && letters.hold(codes[place])

        private fun wasTried(number: Int, place: Int): Boolean {
            val word = place * words + (number ushr 5)
            val before = tried[word]
            tried[word] = before or (1 shl (number and 31))
            return tried[word] == before
        }

        private fun wait(number: Int, place: Int) {
            waiting.add(number)
            waiting.add(place)
        }
    }

    private fun added(state: State): Int {
        states += state
        return states.size - 1
    }

    /** The state that matches a node and goes on with `next`. */
    private fun compiled(node: Node, next: Int): Int =
        when (node) {
            is Node.One -> added(State.Take(node.letters, next))
            is Node.Look -> added(State.Look(node.letters, node.ahead, next))
            is Node.All -> node.of.foldRight(next, ::compiled)
            is Node.Any -> node.of.map { compiled(it, next) }.reduceRight { first, second -> added(State.Fork(first, second)) }
            is Node.Repeat -> repeated(node, next)
        }

    private fun repeated(node: Node.Repeat, next: Int): Int {
        var start = next
        if (node.most == NO_END) {
            start = added(State.Fork(next, next)) // until its first is known
            states[start] = State.Fork(compiled(node.of, start), next)
        } else {
            repeat(node.most - node.least) { start = added(State.Fork(compiled(node.of, start), next)) }
        }
        repeat(node.least) { start = compiled(node.of, start) }
        return start
    }
}

private class Parser(source: String) {
    private val tokens = tokensOf(source)
    private var at = 0
    private var depth = 0

    fun parsed(): Node {
        val whole = alternatives(false)
        if (at < tokens.size) refuse("a group that does not begin")
        return whole
    }

    /** Alternatives, up to the end of their group. */
    private fun alternatives(ignoresCase: Boolean): Node {
        val of = arrayListOf(arrayListOf<Node>())
        while (at < tokens.size && tokens[at] != ")") {
            if (tokens[at] != "|") {
                of.last() += repeated(ignoresCase)
            } else {
                at++
                of += arrayListOf<Node>()
            }
        }
        if (of.any { it.singleOrNull() is Node.Look }) refuse("a look alone")
        return Node.Any(of.map { Node.All(it) })
    }

    private fun repeated(ignoresCase: Boolean): Node {
        val of = atom(ignoresCase)
        val token = tokens.getOrElse(at) { "" }
        val (least, comma, most, more) = REPETITION.matchEntire(token)?.destructured ?: return of
        at++
        if (more.isNotEmpty()) refuse("a repetition that is lazy or possessive")
        if (of is Node.Look || of !is Node.One && token != "?") refuse("a group that repeats")
        return when (token) {
            "?" -> Node.Repeat(of, 0, 1)
            "*" -> Node.Repeat(of, 0, NO_END)
            "+" -> Node.Repeat(of, 1, NO_END)
            else -> {
                val last = if (comma.isEmpty()) least.toInt() else if (most.isEmpty()) NO_END else most.toInt()
                if (last < least.toInt()) refuse("a repetition that ends before it begins")
                Node.Repeat(of, least.toInt(), last)
            }
        }
    }

    private fun atom(ignoresCase: Boolean): Node {
        val token = tokens[at++]
        if (REPETITION.matches(token)) refuse("a repetition of nothing")
        if (!token.startsWith("(")) return Node.One(lettersOf(token, ignoresCase))
        if (token == "(?=" || token == "(?!") return look(token == "(?=", ignoresCase)
        return group(token)
    }

    private fun look(ahead: Boolean, ignoresCase: Boolean): Node {
        val inside = tokens.getOrElse(at++) { "" }
        val isOne = inside.isNotEmpty() && inside[0] !in "()|" && !REPETITION.matches(inside)
        if (!isOne || tokens.getOrNull(at++) != ")") refuse("a look at more than the next letter")
        return Node.Look(lettersOf(inside, ignoresCase), ahead)
    }

    private fun group(token: String): Node {
        if (token !in GROUPS) refuse("a group that begins with $token")
        if (++depth > DEEPEST) refuse("groups within more than $DEEPEST others")
        val from = at
        val ignoresCase = token == "(?i:"
        val inside = alternatives(ignoresCase)
        if (ignoresCase && !OF_LETTERS.matches(tokens.subList(from, at).joinToString(""))) {
            refuse("a group that ignores the case of more than letters")
        }
        if (tokens.getOrNull(at++) != ")") refuse("a group that does not end")
        depth--
        return inside
    }
}

private fun tokensOf(source: String): List<String> {
    val tokens = ArrayList<String>()
    var at = 0
    while (at < source.length) {
        tokens += classAt(source, at) ?: TOKEN.matchAt(source, at)!!.value
        at += tokens.last().length
    }
    return tokens
}

/** The class that begins at a place; null if none does, or it does not end. */
private fun classAt(source: String, at: Int): String? {
    if (source[at] != '[') return null
    var end = at + 1
    while (end < source.length && source[end] != ']') end += if (source[end] == '\\') 2 else 1
    return if (end < source.length) source.substring(at, end + 1) else null
}

/** The letters that a token means. */
private fun lettersOf(token: String, ignoresCase: Boolean): Letters {
    if (token.length > 1 && token.startsWith("[")) return classOf(token)
    if (!KNOWN.matches(token)) refuse("the part $token")
    if (token == ".") return Letters { it != '\n'.code }
    if (!ignoresCase) return memberOf(token)
    val wanted = folded(token.codePointAt(0))
    return Letters { folded(it) == wanted }
}

/** A letter of ASCII in any case. Two others differ only in case from one of these. */
private fun folded(code: Int): Int =
    when (code) {
        in 'A'.code..'Z'.code -> code + 0x20
        LONG_S -> 's'.code
        KELVINS -> 'k'.code
        else -> code
    }

private fun classOf(token: String): Letters {
    val isNegated = token.startsWith("[^")
    val inside = token.substring(if (isNegated) 2 else 1, token.length - 1)
    val members = ArrayList<Letters>()
    var at = 0
    while (at < inside.length) {
        val member = MEMBER.matchAt(inside, at)?.value
        at += member?.length ?: 0
        if (member == null || member == "-" && at > 1 && at < inside.length) refuse("the part $token")
        members += memberOf(member)
    }
    if (members.isEmpty()) refuse("the part $token")
    val all = members.toTypedArray()
    return Letters { code -> all.any { it.hold(code) } != isNegated }
}

/** What an escape, a letter, or a range of letters means. */
private fun memberOf(member: String): Letters {
    val sign = member.getOrElse(1) { ' ' }
    if (member[0] != '\\' || sign !in "sSdDpP") return rangeOf(member)
    val isMeant = sign in 'a'..'z'
    if (sign == 's' || sign == 'S') return Letters { isSpace(it) == isMeant }
    val bits = bitsOf(if (member.length > 2) member.substring(3, member.length - 1) else "Nd")
    return Letters { isOf(it, bits) == isMeant }
}

private fun rangeOf(member: String): Letters {
    val ends = RANGE.matchEntire(member)?.groupValues?.drop(1) ?: listOf(member)
    val (first, last) = ends.filter(String::isNotEmpty).map(::letterOf).let { it.first() to it.last() }
    if (last < first) refuse("the part $member")
    return Letters { it in first..last }
}

private fun letterOf(member: String): Int =
    if (member.length > 1 && member[0] == '\\') CONTROLS[member[1]]?.code ?: member.codePointAt(1) else member.codePointAt(0)

private fun refuse(what: String): Nothing = throw FormatException(what)
