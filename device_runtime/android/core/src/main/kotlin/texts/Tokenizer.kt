/**
 * Hugging Face's `tokenizer.json`: WordPiece as of BERT, and BPE as of GPT-2, and texts of examples as tokens.
 *
 * The ids are those of Python's library of that name, which tests hold. No platform's own idea of white space, case or class is
 * used. Spec: plan §1.3.
 */
package dev.muster.device.texts

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.DeadlinePassed
import dev.muster.device.DeviceException
import dev.muster.device.Examples
import dev.muster.device.ExamplesException.Companion.invalid
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.Field
import dev.muster.device.plans.Plan
import dev.muster.device.plans.lineOf
import dev.muster.device.plans.padded
import dev.muster.device.text
import dev.muster.device.utf8
import java.text.Normalizer.Form

private const val GPT2 = """'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
private const val SHOWN = 60

// What BERT takes for Chinese.
private val HAN =
    arrayOf(
        0x4e00..0x9fff, 0x3400..0x4dbf, 0x20000..0x2a6df, 0x2a700..0x2b73f, 0x2b740..0x2b81f, 0x2b920..0x2ceaf,
        0xf900..0xfaff, 0x2f800..0x2fa1f,
    )

/** The ids of a text: its own, and those that the tokenizer puts before and after any text. */
internal class Encoded(val before: IntArray, val own: IntArray, val after: IntArray) {
    val whole: IntArray get() = before + own + after
}

private typealias Split = (text: String, work: Work) -> List<String>

/** A loaded tokenizer, for any thread. Throws [FormatException] or [PlanRefused] for what is not known here. */
internal class Tokenizer(json: Json) {
    private val changes: List<Change>
    private val raw: AddedTokens
    private val normalized: AddedTokens
    private val splits: List<Split>
    private val words: Words
    private val around: Around

    init {
        val file = TokenizerFile(json)
        changes = file.changes
        raw = AddedTokens(file.added.filter { !it.normalized }.map { it to it.content })
        normalized = AddedTokens(file.added.filter { it.normalized }.map { it to changed(it.content) })
        splits = file.cuts.map(::splitOf)
        words =
            when (val model = file.model) {
                is WordModel.WordPiece -> wordPieces(model)
                is WordModel.BytePairs -> bytePairs(model)
            }
        around = file.around
    }

    /** The ids of a text. Throws [PlanRefused] for one that the vocabulary has no token for, and as `work`. */
    fun encode(text: String, work: Work): Encoded {
        val own = Ints()
        for (piece in raw.parted(text, work)) {
            if (piece is Part.Token) own.add(piece.id)
            if (piece is Part.Text) appendChanged(piece.text, own, work)
        }
        return Encoded(around.before, own.toArray(), around.after)
    }

    private fun appendChanged(text: String, own: Ints, work: Work) {
        work.spend(text.length)
        for (piece in normalized.parted(changed(text), work)) {
            if (piece is Part.Token) own.add(piece.id)
            if (piece is Part.Text) for (word in split(piece.text, work)) words.append(word, own, work)
        }
    }

    private fun changed(text: String) = changes.fold(text, ::changedBy)

    private fun split(text: String, work: Work) =
        splits.fold(listOf(text)) { pieces, split -> pieces.flatMap { split(it, work) } }
}

/** A part of a text: an added token, or what is between two. */
private sealed interface Part {
    class Token(val id: Int) : Part

    class Text(val text: String) : Part
}

/** Tokens that are found in texts before anything else is, each with what is looked for. */
private class AddedTokens(private val all: List<Pair<Added, String>>) {
    private val trie = Trie()

    init {
        for ((place, one) in all.withIndex()) {
            if (one.second.isEmpty() || !trie.add(one.second, place)) {
                throw unknown("an added token that normalises to nothing or to another one")
            }
        }
    }

    /**
     * The text between added tokens, and their ids: leftmost first, and the longest of several. As in the library, one that takes
     * the spaces after it leaves them to be found again.
     */
    fun parted(text: String, work: Work): List<Part> {
        if (all.isEmpty()) return if (text.isEmpty()) emptyList() else listOf(Part.Text(text))
        val codes = codesOf(text)
        val parts = ArrayList<Part>()
        var from = 0
        var spaces = 0
        var place = 0
        while (place < codes.size) {
            val found = trie.longest(codes, place, work)
            if (found < 0) {
                place++
                continue
            }
            val added = all[found.toInt()].first
            var start = place
            while (added.lstrip && start > from && isSpace(codes[start - 1])) start--
            if (start > from) parts += Part.Text(textOf(codes, from, start))
            parts += Part.Token(added.id)
            place = (found ushr 32).toInt()
            from = place
            if (added.rstrip) {
                spaces = maxOf(spaces, from)
                while (spaces < codes.size && isSpace(codes[spaces])) spaces++
                from = spaces
            }
        }
        if (from < codes.size) parts += Part.Text(textOf(codes, from))
        return parts
    }
}

private fun changedBy(text: String, change: Change): String =
    when (change) {
        Change.Lower -> lowered(text)
        is Change.Normal -> normalised(text, change.form)
        is Change.Bert -> changedByBert(text, change)
    }

private fun changedByBert(text: String, change: Change.Bert): String {
    var made = text
    if (change.clean) {
        made = changed(made) { code -> if (!has(code, Mark.HIDDEN)) appendCodePoint(if (isSpace(code)) ' '.code else code) }
    }
    if (change.spacesHan) {
        made = changed(made) { code -> if (isHan(code)) append(' ').appendCodePoint(code).append(' ') else appendCodePoint(code) }
    }
    if (change.accents) made = changed(normalised(made, Form.NFD)) { code -> if (!has(code, Mark.ACCENT)) appendCodePoint(code) }
    return if (change.lower) lowered(made) else made
}

private fun isHan(code: Int) = code >= HAN[1].first && HAN.any { code in it }

private fun splitOf(cut: Cut): Split =
    when (cut) {
        Cut.Bert -> ::bertWords
        is Cut.ByteLevel -> byteLevel(cut)
        is Cut.Digits -> { text, work -> digits(text, cut.alone, work) }
        is Cut.Split -> isolated(cut.expression)
    }

/** Words between white space, and punctuation. */
private fun bertWords(text: String, work: Work): List<String> {
    work.spend(text.length)
    val words = ArrayList<String>()
    var from = 0
    var at = 0
    while (at < text.length) {
        val code = text.codePointAt(at)
        val next = at + Character.charCount(code)
        val isMark = has(code, Mark.PUNCTUATION)
        if (isMark || isSpace(code)) {
            if (at > from) words += text.substring(from, at)
            if (isMark) words += text.substring(at, next)
            from = next
        }
        at = next
    }
    if (from < text.length) words += text.substring(from)
    return words
}

/** Numbers, each character of them alone or as long as they are, and what is between them. */
private fun digits(text: String, alone: Boolean, work: Work): List<String> {
    work.spend(text.length)
    val words = ArrayList<String>()
    var from = 0
    var at = 0
    var wasNumber = false
    while (at < text.length) {
        val code = text.codePointAt(at)
        val isNumber = has(code, Mark.NUMBER)
        if (at > from && (isNumber != wasNumber || isNumber && alone)) {
            words += text.substring(from, at)
            from = at
        }
        wasNumber = isNumber
        at += Character.charCount(code)
    }
    if (from < text.length) words += text.substring(from)
    return words
}

private fun byteLevel(cut: Cut.ByteLevel): Split {
    val split: Split = if (cut.usesExpression) isolated(GPT2) else { text, _ -> listOf(text) }
    val letters = bytesAsLetters()
    return { text, work ->
        work.spend(text.length)
        val prefixed = if (cut.addsSpace && !text.startsWith(" ")) " $text" else text
        split(prefixed, work).map { piece ->
            val bytes = utf8(piece)
            String(CharArray(bytes.size) { letters[bytes[it].toInt() and 0xff] })
        }
    }
}

/** GPT-2's letter for every byte: printable bytes are themselves. */
private fun bytesAsLetters(): CharArray {
    var next = 256
    return CharArray(256) { byte -> (if (byte in 33..126 || byte > 160 && byte != 173) byte else next++).toChar() }
}

/** Matches of an expression and what is between them. Throws [PlanRefused] for one that is not known. */
internal fun isolated(source: String): (text: String, work: Work) -> List<String> {
    val expression =
        try {
            Expression(source)
        } catch (error: FormatException) {
            throw unknown("${error.message} in the expression ${quoted(source.take(SHOWN))}")
        }
    return { text, work ->
        val codes = codesOf(text)
        val pieces = ArrayList<String>()
        var from = 0
        for (edge in expression.matches(codes, work) + codes.size) {
            if (edge > from) pieces += textOf(codes, from, edge)
            from = edge
        }
        pieces
    }
}

/** Examples whose texts are tokens, and the number of texts that were cut. */
internal data class Tokenized(val examples: Examples, val cut: Int)

/**
 * The examples with texts, uint8 `[bytes]`, as tokens, and other lines of bytes as long as their shape says.
 *
 * keepGoing: asked before every text and within long ones; false ends the work with [DeadlinePassed]. Throws [PlanRefused] for a
 * tokenizer that does not load or fit the field, and `ExamplesException` for what is no UTF-8.
 */
internal fun tokenized(plan: Plan, examples: Examples, blob: (BlobRef) -> ByteArray, keepGoing: () -> Boolean): Tokenized {
    val columns = examples.columns.toMutableMap()
    val work = Work(keepGoing)
    var cut = 0
    for (field in plan.examples.fields) {
        val column = columns[field.name] ?: continue
        val tokenizer = field.tokenizer
        if (tokenizer == null || column.dtype != DType.UINT8 || column.shape.size != 1) {
            columns[field.name] = padded(field.name, column, examples.count)
            continue
        }
        val loaded = loadedTokenizer(field, blob(tokenizer.blob), work)
        val texts = (0 until examples.count).asSequence().map { place -> rowText(field, lineOf(column, place), place) }
        val made = tokensOf(field, loaded, texts, examples.count, work)
        columns[field.name] = Column(field.shape, made.ids)
        cut += made.cut
    }
    return Tokenized(Examples(examples.count, columns), cut)
}

/** Tokens, T of each text, and the number of texts that were cut. */
internal class Tokens(val ids: IntArray, val cut: Int)

/**
 * The tokens of so many texts, one text after the other. Throws [PlanRefused], and as `work`, which is asked before every text.
 */
internal fun tokensOf(field: Field, tokenizer: Tokenizer, texts: Sequence<String>, count: Int, work: Work): Tokens {
    val length = field.shape.first()
    val padding = field.tokenizer!!.padding
    val ids = IntArray(count * length).also { it.fill(padding) }
    var cut = 0
    for ((place, text) in texts.withIndex()) {
        work.ask()
        if (hasHalf(text)) {
            throw PlanRefused("the tokenizer of field ${field.name} fails at the text of example $place: half a character")
        }
        val found = tokenizer.encode(text, work)
        val own = fitting(field, found)
        if (own !== found.own) cut++
        val whole = found.before + own + found.after
        checkTokens(field, whole, padding)
        whole.copyInto(ids, place * length)
    }
    return Tokens(ids, cut)
}

/** The tokens of a text itself that there is room for. */
private fun fitting(field: Field, found: Encoded): IntArray {
    val added = found.before.size + found.after.size
    val room = field.shape.first() - added
    if (found.own.size <= room) return found.own
    if (room > 0) return found.own.copyOf(room)
    throw PlanRefused(
        "field ${field.name} has room for ${field.shape.first()} tokens, and its tokenizer adds $added to every text: export it " +
            "with more tokens",
    )
}

private fun checkTokens(field: Field, ids: IntArray, padding: Int) {
    if (padding in ids) {
        throw PlanRefused(
            "the tokenizer of field ${field.name} gives token $padding, which is the field's padding: export it with one that no " +
                "text has",
        )
    }
    val most = ids.fold(-1) { highest, id -> maxOf(highest, id) }
    if (most >= field.high!!) {
        throw PlanRefused(
            "the tokenizer of field ${field.name} gives token $most; the model knows those below ${field.high}: export it with the " +
                "tokenizer that it was trained with",
        )
    }
}

/** Whether a text, as of an app, has a surrogate without its other half, which UTF-8 has not. */
private fun hasHalf(text: String): Boolean {
    var at = 0
    while (at < text.length) {
        val code = text.codePointAt(at)
        if (code in 0xd800..0xdfff) return true
        at += Character.charCount(code)
    }
    return false
}

private fun rowText(field: Field, row: ByteArray, place: Int): String {
    val end = row.indexOfLast { it != 0.toByte() } + 1
    return try {
        text(row.copyOf(end))
    } catch (_: FormatException) {
        throw invalid("field ${field.name} of example $place is not text in UTF-8")
    }
}

/**
 * The tokenizer of a field, from its file. Throws [PlanRefused], also where it has other tokens for the plan's trial of it; and as
 * `work`.
 */
internal fun loadedTokenizer(field: Field, data: ByteArray, work: Work): Tokenizer =
    try {
        Tokenizer(Json.parse(data, "tokenizer")).also { tokenizer ->
            for ((text, expected) in field.tokenizer!!.trial) {
                if (tokenizer.encode(text, work).whole.asList() != expected) {
                    throw PlanRefused("${quoted(text)} has other tokens here than where the plan was exported")
                }
            }
        }
    } catch (error: DeadlinePassed) {
        throw error
    } catch (error: DeviceException) {
        throw PlanRefused("the tokenizer of field ${field.name} does not load: ${error.message}")
    }
