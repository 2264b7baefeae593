/** Words as tokens: the longest pieces of a vocabulary as of BERT, and merged pairs as of GPT-2. Spec: plan §1.3. */
package dev.muster.device.texts

private const val CODES = Character.MAX_CODE_POINT + 1L

// In place of a letter that was merged into the one before.
private const val GONE = -1

/** Appends the tokens of a word to others. */
internal fun interface Words {
    fun append(word: String, to: Ints, work: Work)
}

/** Words with a number each, from 0 on, to be found in texts letter by letter. */
internal class Trie {
    private val edges = LongMap()
    private val ends = LongMap()
    private var nodes = 1

    /** Whether the word is new. */
    fun add(word: String, value: Int): Boolean {
        val end = walked(word).toLong()
        return (ends[end] < 0).also { ends[end] = value }
    }

    /** The node of a word, made where there is none. */
    fun walked(word: String): Int =
        codesOf(word).fold(0) { node, code ->
            val edge = node * CODES + code
            if (edges[edge] < 0) edges[edge] = nodes++
            edges[edge]
        }

    /** The longest word that begins at a place: its value, and above 32 bits its end; -1 if none does. */
    fun longest(codes: IntArray, start: Int, work: Work, from: Int = 0): Long {
        var found = -1L
        var node = from
        for (at in start until codes.size) {
            work.spend(1)
            node = edges[node * CODES + codes[at]]
            if (node < 0) break
            val value = ends[node.toLong()]
            if (value >= 0) found = (at + 1L shl 32) + value
        }
        return found
    }
}

/** The words of WordPiece. */
internal fun wordPieces(model: WordModel.WordPiece): Words {
    val trie = Trie()
    for ((word, id) in model.vocab) trie.add(word, id)
    val unknown = model.vocab.getValue(model.unknown)
    val after = trie.walked(model.prefix)
    return Words { word, to, work ->
        val codes = codesOf(word)
        work.spend(codes.size)
        val ids = if (codes.size > model.longest) null else pieces(codes, trie, after, work)
        if (ids == null) to.add(unknown) else to.addAll(ids)
    }
}

/** The longest pieces of a word; null where there is none. after: the node of what pieces begin with but the first. */
private fun pieces(codes: IntArray, trie: Trie, after: Int, work: Work): IntArray? {
    val ids = Ints()
    var start = 0
    while (start < codes.size) {
        val found = trie.longest(codes, start, work, if (start > 0) after else 0)
        if (found < 0) return null
        ids.add(found.toInt())
        start = (found ushr 32).toInt()
    }
    return ids.toArray()
}

/** The words of byte pairs. Throws [dev.muster.device.PlanRefused] for merges beyond the vocabulary. */
internal fun bytePairs(model: WordModel.BytePairs): Words {
    val merges = Merges(model)
    return Words { word, to, work ->
        work.spend(word.length)
        val whole = if (model.ignoresMerges) model.vocab[word] else null
        if (whole != null) to.add(whole) else merges.append(lettersOf(word, model), to, work)
    }
}

/** The ids of a word's letters; one that the vocabulary lacks is unknown, or left out where there is no such token. */
private fun lettersOf(word: String, model: WordModel.BytePairs): IntArray {
    val found = Ints()
    var wasUnknown = false
    var at = 0
    while (at < word.length) {
        val end = word.offsetByCodePoints(at, 1)
        val id = model.vocab[word.substring(at, end)]
        if (id != null) {
            found.add(id)
        } else if (model.unknown != null) {
            val unknownId = model.vocab[model.unknown] ?: throw unknown("a vocabulary without its unknown token")
            if (!(wasUnknown && model.fusesUnknown)) found.add(unknownId)
        }
        wasUnknown = id == null
        at = end
    }
    return found.toArray()
}

/** Pairs of tokens that are merged, each with its rank and the token that it becomes. */
private class Merges(model: WordModel.BytePairs) {
    private val ranks = LongMap()
    private val ids = IntArray(model.merges.size)

    init {
        for ((rank, pair) in model.merges.withIndex()) {
            val (first, second) = pair
            val (left, right, id) = listOf(model.vocab[first], model.vocab[second], model.vocab[first + second])
            if (left == null || right == null || id == null) {
                throw unknown("the merge of [${quoted(first)},${quoted(second)}], beyond its vocabulary")
            }
            ranks[pairOf(left, right)] = rank
            ids[rank] = id
        }
    }

    private fun pairOf(left: Int, right: Int) = left.toLong() * TOKENS + right

    /** Append letters with their pairs merged, the lowest rank first, and of equal ones the leftmost. */
    fun append(letters: IntArray, to: Ints, work: Work) {
        val next = IntArray(letters.size) { it + 1 }
        val before = IntArray(letters.size) { it - 1 }
        val waiting = Heap(work)

        fun rankAt(place: Int) = if (next[place] < letters.size) ranks[pairOf(letters[place], letters[next[place]])] else -1

        fun offer(place: Int) {
            val rank = rankAt(place)
            if (rank >= 0) waiting.push((rank.toLong() shl 32) + place)
        }
        for (place in letters.indices) offer(place)
        while (true) {
            val top = waiting.pop()
            if (top < 0) break
            val place = top.toInt()
            val id = ids[(top ushr 32).toInt()]
            val rank = if (letters[place] == GONE) -1 else rankAt(place)
            if (rank < 0 || ids[rank] != id) continue
            letters[place] = id
            letters[next[place]] = GONE
            next[place] = next[next[place]]
            if (next[place] < letters.size) before[next[place]] = place
            if (before[place] >= 0) offer(before[place])
            offer(place)
        }
        for (id in letters) if (id != GONE) to.add(id)
    }
}
