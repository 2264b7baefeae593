package dev.muster.device

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.ValueSource
import java.math.BigInteger

/** JSON is read strictly, and written so that it is read again. */
class JsonTest {
    @ParameterizedTest
    @ValueSource(
        strings = [
            "", " ", "{", "[1,]", "{\"a\":1,}", "{\"a\":1,\"a\":1}", "NaN", "Infinity", "-", "01", "1.", ".5", "+1", "1e", "tru",
            "'a'", "\"\u0009\"", "\"\\x\"", "\"\\u12g4\"", "\"\\u12\"", "[1] 2", "{a:1}", "\ufeff1", "[1 2]", "{\"a\" 1}", "//\n1",
        ],
    )
    fun `a text that is no JSON is refused`(text: String) {
        assertThrows(FormatException::class.java) { Json.parse(text, "text") }
    }

    @Test
    fun `values nested beyond any message are refused, and do not end the process`() {
        assertThrows(FormatException::class.java) { Json.parse("[".repeat(100_000), "text") }
    }

    @Test
    fun `integers of up to 64 bits are exact`() {
        val json = Json.parse("[9223372036854775807, 99999999999999999999, 5.0, 1e3, -0]", "list")
        assertEquals(listOf(Long.MAX_VALUE, BigInteger("9".repeat(20)), 5.0, 1000.0, 0L), json.list { it.value })
        for (place in 1..3) assertThrows(FormatException::class.java) { json.list { it }[place].wide() }
    }

    @Test
    fun `an error names the member that is wrong`() {
        val json = Json.parse("""{"a": [{"b": "x"}]}""", "message")
        val error = assertThrows(FormatException::class.java) { json["a"].list { it["b"].count() } }
        assertEquals("malformed message: wanted an integer from 0 to 9007199254740991 at a.0.b", error.message)
    }

    @Test
    fun `what is written is read again`() {
        val value = linkedMapOf("\"\\\u0001é\ud83d\ude00" to listOf(1L, 0.1, 1e300, true, null, "x"), "b" to Long.MIN_VALUE)
        assertEquals(value, Json.parse(Json.write(value), "text").value)
        for (none in listOf(Double.NaN, "\ud800", "\ude00\ud83d")) {
            assertThrows(FormatException::class.java) { Json.parse(Json.write(listOf(none)), "text") }
        }
    }

    @Test
    fun `a foreign text is shown on one line, without letters that nobody sees`() {
        assertEquals("a\\u000ab\\u202ec\\u00ad \ud83d\ude00é", visible("a\nb\u202ec\u00ad \ud83d\ude00é"))
        assertEquals(500, plain("\u0000".repeat(1000)).length)
    }

    @ParameterizedTest
    @ValueSource(strings = ["QUJDRA", "QUJDRB==", "QUJDRA=", "QUJDRA \n", "QUJD RA=", "QU JD", "QUJD=", "QUJDR", "=", "-_-_"])
    fun `base64 in another spelling is refused`(letters: String) {
        assertThrows(FormatException::class.java) { fromBase64(letters) }
    }
}
