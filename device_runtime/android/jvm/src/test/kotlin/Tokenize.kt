/**
 * The tokens of texts, for comparison with Python's: `{"files", "texts"}` on standard input, for each file the ids of each text on
 * output.
 */
package dev.muster.device.jvm

import dev.muster.device.Json
import dev.muster.device.texts.Tokenizer
import dev.muster.device.texts.Work

internal fun main() {
    val given = Json.parse(System.`in`.readBytes(), "input")
    val texts = given["texts"].list { it.text() }
    val ids =
        given["files"].list { file ->
            val tokenizer = Tokenizer(file)
            texts.map { tokenizer.encode(it, Work()).whole.asList() }
        }
    print(Json.write(ids))
}
