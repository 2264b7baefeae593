package dev.muster.device.jvm

import dev.muster.device.Entry
import dev.muster.device.FileBlobs
import dev.muster.device.StateDamaged
import dev.muster.device.StateInUse
import dev.muster.device.kept.journal
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import org.junit.jupiter.api.io.TempDir
import java.io.File
import java.sql.DriverManager

/** State is the old or the new, and never another's; what is damaged is put aside and said. */
class StateTest {
    @TempDir
    lateinit var folder: File

    private val file get() = File(folder, "state.db")

    @Test
    fun `a write is whole, although the process is killed in it`() {
        var last = 0
        repeat(KILLS) { kill ->
            val writer = ProcessBuilder(javaCommand("dev.muster.device.jvm.StateTestKt", folder.path)).start()
            while (writer.inputStream.read() < 0 && writer.isAlive) Thread.sleep(1)
            Thread.sleep(10L + 7 * kill)
            writer.destroyForcibly().waitFor()
            val (first, second) = SqliteStore(folder).use { it.get("a") to it.get("b") }
            assertEquals(first, second)
            assertTrue(first!!.toInt() >= last)
            last = first.toInt()
        }
        assertTrue(last > KILLS)
    }

    @Test
    fun `a damaged file is put aside, and a new one says so`() {
        SqliteStore(folder).use { it.write(mapOf("a" to "x".repeat(20_000))) }
        val whole = file.readBytes()
        val damages = listOf(whole.copyOf(5000), ByteArray(whole.size) { 7 }, "another file".toByteArray(), flipped(whole))
        for (damage in damages) {
            file.writeBytes(damage)
            JvmPlatform(folder, NpzExamples(folder)).use { platform ->
                assertNull(platform.store.get("a"))
                assertEquals(listOf(Entry.Kind.STATE_REPLACED), journal(platform.store).map { it.kind })
            }
        }
        val kept = folder.listFiles { file -> ".damaged-" in file.name }!!.map { it.readBytes().toList() }
        assertEquals(damages.map { it.toList() }.toSet(), kept.toSet())
    }

    /** The same with another length of the tree's first page. */
    private fun flipped(whole: ByteArray) = whole.copyOf().also { for (place in 4096 until 4200) it[place] = (it[place] + 99).toByte() }

    @Test
    fun `damage that comes while the state is open is named`() {
        SqliteStore(folder).use { store ->
            store.write((0 until ROWS).associate { "$it" to "x".repeat(1000) })
            file.outputStream().use { it.write(ByteArray(1000 * ROWS) { 9 }) }
            assertThrows<StateDamaged> { for (key in 0 until ROWS) store.get("$key") }
            assertThrows<StateDamaged> { for (key in 0 until ROWS) store.write(mapOf("$key" to null)) }
        }
    }

    @Test
    fun `a full disk is named, and the state stays the old one until there is room`() {
        val words = javaCommand("dev.muster.device.jvm.StateTestKt", folder.path).joinToString(" ") { "'$it'" }
        val writer = ProcessBuilder("bash", "-c", "ulimit -f 4000; exec $words fill").redirectErrorStream(true).start()
        val said = writer.inputStream.reader().readText()
        assertTrue(said.endsWith("the state cannot be read or written\nold\nold\n"), said)
        SqliteStore(folder).use { store ->
            assertEquals(listOf("old", "old"), listOf(store.get("a"), store.get("b")))
            store.write(mapOf("a" to "x".repeat(9_000_000)))
        }
    }

    @Test
    fun `the database of another program is left as it is`() {
        DriverManager.getConnection("jdbc:sqlite:$file").use { it.createStatement().execute("CREATE TABLE theirs (a)") }
        val theirs = file.readBytes()
        assertTrue("another program" in assertThrows<StateDamaged> { SqliteStore(folder) }.message!!)
        assertArrayEquals(theirs, file.readBytes())
    }

    @Test
    fun `one process at a time has a folder`() {
        SqliteStore(folder).use { assertThrows<StateInUse> { SqliteStore(folder) } }
        SqliteStore(folder).close()
    }

    @Test
    fun `what a killed process left of a blob is removed`() {
        FileBlobs(folder).put("ab", byteArrayOf(1))
        File(folder, "blobs/cd.part").writeBytes(ByteArray(9))
        FileBlobs(folder).trim(1 shl 20, emptySet())
        assertEquals(listOf("ab"), File(folder, "blobs").list()!!.toList())
    }

    private companion object {
        const val KILLS = 8
        const val ROWS = 5000 // more than the cache holds
    }
}

private fun javaCommand(main: String, vararg words: String): List<String> {
    val java = File(System.getProperty("java.home"), "bin/java").path
    return listOf(java, "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", System.getProperty("java.class.path"), main) + words
}

/** Write one number under two keys, and then the next, until it is killed. */
internal fun main(words: Array<String>) {
    val store = SqliteStore(File(words[0]))
    if (words.size > 1) return fill(store)
    generateSequence((store.get("a") ?: "0").toInt()) { it + 1 }.forEach { number ->
        store.write(mapOf("a" to "$number", "b" to "$number"))
        if (number % 10 == 1) println(number)
    }
}

private fun fill(store: SqliteStore) {
    store.write(mapOf("a" to "old", "b" to "old"))
    try {
        store.write(mapOf("a" to "x".repeat(9_000_000), "b" to "new"))
    } catch (error: StateDamaged) {
        println(error.message!!.substringBefore(':'))
    }
    println("${store.get("a")}\n${store.get("b")}")
}
