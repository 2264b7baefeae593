/**
 * The file of a tokenizer, member by member: what has the same meaning for devices in every language, and nothing else.
 * `device_runtime/texts.py` is the same table. Spec: plan §1.3.
 */
package dev.muster.device.texts

import dev.muster.device.Json
import dev.muster.device.PlanRefused
import java.text.Normalizer.Form

private const val MOST_PARTS = 16
private const val LONGEST_WORD = 1000L
private const val LONGEST_ADDED = 256

/** Tokens are below this. */
internal const val TOKENS = 1 shl 24

/** A token that is found in texts before anything else is. */
internal class Added(
    val id: Int,
    val content: String,
    val lstrip: Boolean,
    val rstrip: Boolean,
    val normalized: Boolean,
)

/** A change of texts before they become words. */
internal sealed interface Change {
    object Lower : Change

    class Normal(val form: Form) : Change

    /** What BERT does. [accents] is whether they are removed. */
    class Bert(val clean: Boolean, val spacesHan: Boolean, val accents: Boolean, val lower: Boolean) : Change
}

/** A way to cut texts into words. */
internal sealed interface Cut {
    object Bert : Cut

    class ByteLevel(val addsSpace: Boolean, val usesExpression: Boolean) : Cut

    class Digits(val alone: Boolean) : Cut

    class Split(val expression: String) : Cut
}

/** The ids before and after any text. */
internal class Around(val before: IntArray, val after: IntArray)

/** What makes words into tokens. */
internal sealed interface WordModel {
    val vocab: Map<String, Int>

    class BytePairs(
        override val vocab: Map<String, Int>,
        val merges: List<Pair<String, String>>,
        val unknown: String?,
        val fusesUnknown: Boolean,
        val ignoresMerges: Boolean,
    ) : WordModel

    class WordPiece(
        override val vocab: Map<String, Int>,
        val unknown: String,
        val prefix: String,
        val longest: Int,
    ) : WordModel
}

/**
 * The members of a file, checked. Throws [dev.muster.device.FormatException] or [PlanRefused], naming what devices do not know.
 */
internal class TokenizerFile(json: Json) {
    val added: List<Added>
    val changes: List<Change>
    val cuts: List<Cut>
    val around: Around
    val model: WordModel

    init {
        json.only(
            "version", "truncation", "padding", "decoder", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model",
        )
        json["version"].literal("1.0")
        for (name in listOf("truncation", "padding", "decoder")) json[name].literal(null)
        added = json["added_tokens"].list(::added)
        changes = json["normalizer"].parts("normalizers", ::change)
        cuts = json["pre_tokenizer"].parts("pretokenizers", ::cut)
        if (cuts.count { it is Cut.ByteLevel } > 1) throw unknown("two pre-tokenizers ByteLevel")
        val processors = json["post_processor"].parts("processors", ::processor).filterNotNull()
        if (processors.size > 1) throw unknown("two post-processors")
        around = processors.singleOrNull() ?: Around(IntArray(0), IntArray(0))
        model = model(json["model"])
        checkAdded(added, model.vocab)
    }
}

/** What is refused. */
internal fun unknown(what: String): PlanRefused = PlanRefused("its tokenizer has $what, which devices do not know")

/** A text in quotation marks, as errors show it. */
internal fun quoted(text: String): String = Json.write(text)

/** Refuse an object with other members than these. */
private fun Json.only(vararg names: String) {
    val others = members().keys - names.toSet()
    if (others.isNotEmpty()) wrong("no member ${quoted(others.first())}")
    for (name in names) get(name)
}

private fun Json.literal(wanted: Any?) {
    if (value != wanted) wrong(Json.write(wanted))
}

private fun Json.unknown(kind: String): Nothing = wrong("a known $kind, not ${Json.write(value)}")

private fun Json.id(): Int = whole(0L until TOKENS).toInt()

/** A part, a sequence of some, or none, as a list. */
private fun <T> Json.parts(name: String, read: (Json) -> T): List<T> {
    if (value == null) return emptyList()
    if (get("type").value != "Sequence") return listOf(read(this))
    only("type", name)
    return get(name).list(read).also { if (it.size > MOST_PARTS) get(name).wrong("at most $MOST_PARTS parts") }
}

private fun added(json: Json): Added {
    json.only("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
    json["single_word"].literal(false)
    json["special"].flag()
    val content = json["content"].text()
    if (content.codePointCount(0, content.length) !in 1..LONGEST_ADDED) json["content"].wrong("1 to $LONGEST_ADDED letters")
    return Added(json["id"].id(), content, json["lstrip"].flag(), json["rstrip"].flag(), json["normalized"].flag())
}

private fun change(json: Json): Change {
    val type = json["type"]
    if (type.value == "BertNormalizer") return bert(json)
    json.only("type")
    if (type.value == "Lowercase") return Change.Lower
    return Change.Normal(Form.values().find { it.name == type.value } ?: type.unknown("normalizer"))
}

private fun bert(json: Json): Change {
    json.only("type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    val lower = json["lowercase"].flag()
    val accents = json.nullable("strip_accents")?.flag() ?: lower
    return Change.Bert(json["clean_text"].flag(), json["handle_chinese_chars"].flag(), accents, lower)
}

private fun cut(json: Json): Cut {
    val type = json["type"]
    return when (type.value) {
        "BertPreTokenizer" -> Cut.Bert.also { json.only("type") }
        "ByteLevel" -> byteLevel(json)
        "Digits" -> {
            json.only("type", "individual_digits")
            Cut.Digits(json["individual_digits"].flag())
        }
        "Split" -> split(json)
        else -> type.unknown("pre-tokenizer")
    }
}

private fun byteLevel(json: Json): Cut {
    json.only("type", "add_prefix_space", "trim_offsets", "use_regex")
    json["trim_offsets"].flag()
    return Cut.ByteLevel(json["add_prefix_space"].flag(), json["use_regex"].flag())
}

private fun split(json: Json): Cut {
    json.only("type", "pattern", "behavior", "invert")
    json["behavior"].literal("Isolated")
    json["invert"].literal(false)
    json["pattern"].only("Regex")
    return Cut.Split(json["pattern"]["Regex"].text())
}

/** What a post-processor adds; null for one that adds nothing. */
private fun processor(json: Json): Around? {
    val type = json["type"]
    when (type.value) {
        "ByteLevel" -> return null.also { byteLevel(json) }
        "BertProcessing" -> json.only("type", "cls", "sep")
        "RobertaProcessing" -> {
            json.only("type", "cls", "sep", "trim_offsets", "add_prefix_space")
            for (name in listOf("trim_offsets", "add_prefix_space")) json[name].flag()
        }
        "TemplateProcessing" -> return template(json)
        else -> type.unknown("post-processor")
    }
    return Around(intArrayOf(namedId(json["cls"])), intArrayOf(namedId(json["sep"])))
}

private fun namedId(json: Json): Int {
    val pair = json.list { it }
    if (pair.size != 2) json.wrong("a token and its id")
    pair[0].text()
    return pair[1].id()
}

private fun template(json: Json): Around {
    json.only("type", "single", "pair", "special_tokens")
    json["pair"].list { }
    val special = json["special_tokens"].map(::specialIds)
    val pieces = json["single"].list(::piece)
    if (pieces.count { it == null } != 1) throw unknown("a template without one \$A")
    val ids =
        pieces.map { name ->
            if (name == null) intArrayOf() else special[name] ?: throw unknown("a template with an unknown ${quoted(name)}")
        }
    val middle = pieces.indexOf(null)
    return Around(joined(ids.take(middle)), joined(ids.drop(middle + 1)))
}

private fun joined(all: List<IntArray>): IntArray = Ints().also { all.forEach(it::addAll) }.toArray()

private fun specialIds(json: Json): IntArray {
    json.only("id", "ids", "tokens")
    json["id"].text()
    json["tokens"].list { it.text() }
    return json["ids"].list { it.id() }.toIntArray()
}

/** The name of a special token; null for the text itself. */
private fun piece(json: Json): String? {
    val isText = "Sequence" in json.members()
    val name = if (isText) "Sequence" else "SpecialToken"
    json.only(name)
    json[name].only("id", "type_id")
    json[name]["type_id"].id()
    if (!isText) return json[name]["id"].text()
    json[name]["id"].literal("A")
    return null
}

private fun model(json: Json): WordModel {
    val type = json["type"]
    return when (type.value) {
        "BPE" -> bytePairs(json)
        "WordPiece" -> wordPiece(json)
        else -> type.unknown("model")
    }
}

private fun bytePairs(json: Json): WordModel {
    json.only(
        "type", "vocab", "merges", "unk_token", "fuse_unk", "ignore_merges", "byte_fallback", "dropout",
        "continuing_subword_prefix", "end_of_word_suffix",
    )
    json["byte_fallback"].literal(false)
    if ((json.nullable("dropout")?.number() ?: 0.0) != 0.0) json["dropout"].wrong("0")
    for (name in listOf("continuing_subword_prefix", "end_of_word_suffix")) json.nullable(name)?.literal("")
    return WordModel.BytePairs(
        vocab(json["vocab"]),
        merges(json["merges"]),
        json.nullable("unk_token")?.text(),
        json["fuse_unk"].flag(),
        json["ignore_merges"].flag(),
    )
}

private fun wordPiece(json: Json): WordModel {
    json.only("type", "vocab", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word")
    val (vocab, unknown) = vocab(json["vocab"]) to json["unk_token"].text()
    if (unknown !in vocab) throw unknown("a vocabulary without its unknown token")
    val longest = json["max_input_chars_per_word"].whole(0..LONGEST_WORD).toInt()
    return WordModel.WordPiece(vocab, unknown, json["continuing_subword_prefix"].text(), longest)
}

private fun vocab(json: Json): Map<String, Int> =
    json.map { it.id() }.also { if (it.values.toSet().size < it.size) json.wrong("words, each with an id of its own") }

private fun merges(json: Json): List<Pair<String, String>> =
    json.list { pair ->
        val parts = pair.list(Json::text)
        if (parts.size != 2) pair.wrong("two texts")
        parts[0] to parts[1]
    }

/** Refuse ids that the library would not give: those of the vocabulary, then one after the other beyond it. */
private fun checkAdded(added: List<Added>, vocab: Map<String, Int>) {
    if (added.distinctBy { it.content }.size < added.size) throw unknown("an added token twice")
    if (added.any { it.lstrip || it.rstrip }) {
        added.map { it.content }.find { isSpace(it.codePointAt(0)) || isSpace(it.codePointBefore(it.length)) }?.let {
            throw unknown("the added token ${quoted(it)} beside one that takes the spaces around it")
        }
    }
    var next = vocab.size
    for (one in added) {
        val expected = vocab[one.content] ?: next++
        if (one.id != expected) throw unknown("the added token ${quoted(one.content)} as ${one.id} in place of $expected")
    }
}
