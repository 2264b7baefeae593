/** Texts become the tokens that Python makes of them, and what cannot is refused in one line. */
package dev.muster.device.texts

import dev.muster.device.Column
import dev.muster.device.DeadlinePassed
import dev.muster.device.DeviceException
import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.concat
import dev.muster.device.plans.Plan
import dev.muster.device.plans.decodePlan
import dev.muster.device.utf8
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory

private const val WIDTH = 40
private val given = vectors("tokenizers.json")
private val texts = given["texts"].list { it.text() }
private val tokenizers = given["tokenizers"].list { it }
private val wordPiece = Json.write(tokenizers.first()["file"].value)
private val blob = mapOf("sha256" to "0".repeat(64), "size" to 3)
private val small = given["files"]["small"].members()

internal class TextsTest {
    @TestFactory
    fun `the tokens are Python's`(): List<DynamicTest> =
        tokenizers.map { vector ->
            dynamicTest(vector["name"].text()) {
                val tokenizer = Tokenizer(vector["file"])
                val expected = vector["ids"].list { ids -> ids.list { it.size() } }
                texts.zip(expected).forEach { (text, ids) -> assertEquals(ids, tokenizer.encode(text, Work()).whole.asList(), text) }
            }
        }

    @TestFactory
    fun `the pieces of an expression are Python's`(): List<DynamicTest> =
        given["expressions"]["taken"].list { vector ->
            dynamicTest("'${vector["expression"].text()}'") {
                val split = isolated(vector["expression"].text())
                val expected = vector["pieces"].list { pieces -> pieces.list { it.text() } }
                texts.zip(expected).forEach { (text, pieces) -> assertEquals(pieces, split(text, Work()), text) }
            }
        }

    @TestFactory
    fun `an expression that devices do not know is refused`(): List<DynamicTest> =
        given["expressions"]["refused"].list { vector ->
            dynamicTest("'${vector["expression"].text().take(40)}'") {
                val error = assertThrows(PlanRefused::class.java) { tokenizer(split(vector["expression"].text())) }
                assertTrue("its tokenizer has ${vector["what"].text()} in the expression" in error.message!!, error.message)
            }
        }

    @TestFactory
    fun `another file is refused`(): List<DynamicTest> =
        given["files"]["refused"].list { vector ->
            dynamicTest(vector["at"].text()) {
                val error = assertThrows(DeviceException::class.java) { Tokenizer(vector["file"]) }
                assertTrue(Regex("malformed tokenizer|its tokenizer has").containsMatchIn(error.message!!), error.message)
            }
        }

    @Test
    fun `the small file is taken`() {
        tokenizer(small)
    }

    @Test
    fun `an expression of nested groups or of a long class is refused or taken, on a small stack`() {
        var error: Throwable? = null
        val thread =
            Thread(null, {
                runCatching { isolated("[" + "\\n".repeat(990) + "]")("a\nb", Work()) }.onFailure { error = it }
                assertThrows(PlanRefused::class.java) { isolated("(".repeat(990) + "a" + ")".repeat(990)) }
            }, "small", 256 shl 10)
        thread.setUncaughtExceptionHandler { _, thrown -> error = thrown }
        thread.start()
        thread.join()
        assertEquals(null, error)
    }

    @Test
    fun `a text that is too long keeps what is around it, and is counted`() {
        val made = tokenized(plan(), examples("a, b. c! d? e", "a", ""), { utf8(wordPiece) }, { true })
        val tokenizer = Tokenizer(Json.parse(wordPiece, "tokenizer"))
        val (whole, one, dot) = listOf("a, b", "a", ".").map { tokenizer.encode(it, Work()).own }
        val column = made.examples.columns.getValue("text")
        assertEquals(listOf(6), column.shape)
        assertEquals(1, made.cut)
        val first = intArrayOf(2, *whole.copyOf(3), dot[0], 3)
        assertArrayEquals(first + intArrayOf(2, *one, 3, 0, 0, 0) + intArrayOf(2, 3, 0, 0, 0, 0), column.ints)
    }

    @Test
    fun `texts that are kept as long as they are give the same tokens`() {
        val bytes = listOf("", "a, b. c! d? e", "a").map(::utf8)
        val ragged = Column(listOf(WIDTH), concat(*bytes.toTypedArray()), intArrayOf(0, 13, 14))
        val made = tokenized(plan(), Examples(3, mapOf("text" to ragged)), { utf8(wordPiece) }, { true })
        val dense = tokenized(plan(), examples("", "a, b. c! d? e", "a"), { utf8(wordPiece) }, { true })
        assertArrayEquals(dense.examples.columns.getValue("text").ints, made.examples.columns.getValue("text").ints)
    }

    @Test
    fun `tokens that an app made itself stay as they are`() {
        val own = Examples(1, mapOf("text" to Column(listOf(6), IntArray(6) { 7 })))
        val made = tokenized(plan(), own, { utf8(wordPiece) }, { true })
        assertArrayEquals(IntArray(6) { 7 }, made.examples.columns.getValue("text").ints)
    }

    @Test
    fun `work stops between two texts when there is no time left`() {
        var asked = 0
        assertThrows(DeadlinePassed::class.java) { tokenized(plan(), examples("a", "b", "c"), { utf8(wordPiece) }, { ++asked < 2 }) }
        assertEquals(2, asked)
    }

    @Test
    fun `work stops within a text when there is no time left`() {
        var asked = 0
        val work = Work { ++asked < 3 }
        val tokenizer = Tokenizer(Json.parse(wordPiece, "tokenizer"))
        assertThrows(DeadlinePassed::class.java) { tokenizer.encode("fox ".repeat(100_000), work) }
        assertTrue(work.steps < 500_000)
    }

    @Test
    fun `half a character is refused in a text of an app`() {
        val error =
            assertThrows(PlanRefused::class.java) {
                val tokenizer = Tokenizer(Json.parse(wordPiece, "tokenizer"))
                tokensOf(plan().examples.fields.first(), tokenizer, sequenceOf("a", "b\ud800"), 2, Work())
            }
        assertTrue("fails at the text of example 1: half a character" in error.message!!)
    }

    @TestFactory
    fun `the work grows as the text does`(): List<DynamicTest> =
        hostile().map { (what, text, make) ->
            dynamicTest(what) {
                val tokenizer = make()
                val (once, twice) =
                    listOf(4000, 8000).map { length ->
                        val work = Work()
                        tokenizer.encode(text.repeat(length / text.length), work)
                        work.steps.toDouble() / length
                    }
                assertTrue(twice < 1.2 * once + 1 && twice < 1100, "$once, then $twice steps for each letter")
            }
        }

    @TestFactory
    fun `texts and files that do not fit are refused`(): List<DynamicTest> =
        misfits().map { (what, more, rows, file, words) ->
            dynamicTest(what) {
                val error = assertThrows(DeviceException::class.java) { tokenized(plan(more), rows, { utf8(file) }, { true }) }
                assertTrue(Regex(words).containsMatchIn(error.message!!), error.message)
                assertTrue(error is PlanRefused || error is ExamplesException)
            }
        }

    @Test
    fun `long runs of marks are ordered as short ones are`() {
        val marks = "\u0345\u0334\u0301\u0323\u0300\u0360"
        for (form in java.text.Normalizer.Form.values()) {
            val long = "a" + marks.repeat(20)
            assertEquals(java.text.Normalizer.normalize(long, form), normalised(long, form))
        }
    }
}

private fun plan(more: Map<String, Any?> = emptyMap()): Plan {
    val field = mapOf("name" to "text", "dtype" to "int32", "shape" to listOf(6), "high" to 1000, "tokenizer" to tokenizer()) + more
    val whole = Json.parse(vectors("device.json")["plan"]["text"].text(), "plan").members()
    return decodePlan(utf8(Json.write(whole + ("examples" to mapOf("fields" to listOf(field))))), 1)
}

private fun tokenizer(padding: Int = 0, trial: List<Any> = emptyList()) = mapOf("blob" to blob, "padding" to padding, "trial" to trial)

private fun examples(vararg rows: String) = examples(rows.map(::utf8))

private fun examples(rows: List<ByteArray>) =
    Examples(rows.size, mapOf("text" to Column(listOf(WIDTH), concat(*rows.map { it.copyOf(WIDTH) }.toTypedArray()))))

private fun tokenizer(file: Map<String, Any?>) = Tokenizer(Json.parse(Json.write(file), "tokenizer"))

private fun small(more: Map<String, Any?>, model: Map<String, Any?> = emptyMap()) =
    tokenizer(small + more + ("model" to given["files"]["small"]["model"].members() + model))

private fun split(expression: String): Map<String, Any?> {
    val pattern = mapOf("Regex" to expression)
    return small + ("pre_tokenizer" to mapOf("type" to "Split", "pattern" to pattern, "behavior" to "Isolated", "invert" to false))
}

/** A vocabulary of runs of a, up to so many, and of b. */
private fun runsOfA(most: Int) = (1..most).associate { "a".repeat(it) to it - 1 } + ("b" to most)

private fun hostile(): List<Triple<String, String, () -> Tokenizer>> {
    val added =
        List(10_000) {
            mapOf(
                "id" to 9 + it, "content" to "a".repeat(250) + "b$it", "single_word" to false, "lstrip" to true, "rstrip" to true,
                "normalized" to false, "special" to true,
            )
        }
    val doubled = List(6) { k -> List(2) { "a".repeat(1 shl k) } }
    val pieces =
        mapOf(
            "type" to "WordPiece", "unk_token" to "b", "continuing_subword_prefix" to "", "max_input_chars_per_word" to 1000,
            "vocab" to runsOfA(1) + ("a".repeat(999) + "c" to 2),
        )
    val bert = small + mapOf("pre_tokenizer" to mapOf("type" to "BertPreTokenizer"), "model" to pieces)
    return listOf(
        Triple("pieces of long words", "a".repeat(999) + " ") { tokenizer(bert) },
        Triple("merges of a word without end", "a") { small(emptyMap(), mapOf("vocab" to runsOfA(64), "merges" to doubled)) },
        Triple("many added tokens", "a ") { small(mapOf("added_tokens" to added)) },
        Triple("added tokens that nearly are there", "a") { small(mapOf("added_tokens" to added)) },
        Triple("alternatives that overlap", "a") { tokenizer(split("(?:a|a|aa)".repeat(40) + "b")) },
        Triple("repetitions in a row", "a") { tokenizer(split("a*".repeat(100) + "b")) },
        Triple("what may be there in a row", "a") { tokenizer(split("a?".repeat(100) + "b")) },
        Triple("a look at every letter", "a") { tokenizer(split("a*(?!a)(?=b)|a")) },
    )
}

private data class Misfit(val what: String, val more: Map<String, Any?>, val rows: Examples, val file: String, val words: String)

private fun misfits() =
    listOf(
        Misfit("no UTF-8", emptyMap(), examples(listOf(utf8("a"), byteArrayOf(-1, 0x41))), wordPiece, "example 1 is not text in UTF-8"),
        Misfit("another vocabulary", mapOf("high" to 4), examples("a b"), wordPiece, "gives token [0-9]+; the model knows those below 4"),
        Misfit(
            "padding that a text has", mapOf("tokenizer" to tokenizer(padding = 2)), examples("a b"), wordPiece,
            "gives token 2, which is the field's padding",
        ),
        Misfit("no room", mapOf("shape" to listOf(2)), examples("a b"), wordPiece, "room for 2 tokens, and its tokenizer adds 2"),
        Misfit(
            "a trial with other tokens", mapOf("tokenizer" to tokenizer(trial = listOf(listOf("fox", listOf(2, 3))))), examples("a"),
            wordPiece, "does not load: \"fox\" has other tokens here than where the plan was exported",
        ),
        Misfit("no file", emptyMap(), examples("a"), """{"version":1}""", "the tokenizer of field text does not load: malformed tokenizer"),
        Misfit(
            "an unknown kind", emptyMap(), examples("a"),
            Json.write(Json.parse(wordPiece, "file").members() + ("normalizer" to mapOf("type" to "Precompiled"))),
            "malformed tokenizer: .*\"Precompiled\" at normalizer.type",
        ),
    )
