/** The vectors that the tests of every language hold (tests/vectors). */
package dev.muster.device

import java.io.File

private const val FOLDER = "tests/vectors"

private val folder: File by lazy {
    val given = System.getProperty("muster.vectors")?.let(::File)
    val above = generateSequence(File("").absoluteFile) { it.parentFile }.map { File(it, FOLDER) }
    given ?: above.first { it.isDirectory }
}

/** A file of vectors, read anew. */
internal fun vectors(name: String): Json = Json.parse(File(folder, name).readBytes(), name)

/** Float32 values as Python's maker makes them: (i · 40503 mod 65537) / 8192 − 4. */
internal fun values(size: Int, seed: Int = 5): FloatArray =
    FloatArray(size) { ((it + seed) * 40503L % 65537) / 8192f - 4 }

/** A list of vectors. */
internal fun Json.items(): List<Json> = list { it }
