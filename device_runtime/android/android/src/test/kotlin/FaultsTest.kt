package dev.muster.device

import android.app.Application
import android.database.sqlite.SQLiteDatabase
import org.junit.Assert.assertEquals
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Assume.assumeTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.annotation.Config
import java.io.File

private const val LOOPS = 8
private val SEALER = Sealer(ByteArray(32))

private fun stateIn(folder: File) = openDatabase(File(folder, "state.db"), listOf(SealedStore.TABLE)) { error(it) }

private fun examplesIn(folder: File) = ExampleStore(File(folder, "examples.db"), { SEALER }) { 2e9 }

private fun ExampleStore.keep(value: Int) = append("default", mapOf("x" to value))

private fun ExampleStore.kept() = counts()["default"] ?: 0

/** Another process of the app, which writes until it is killed: [FaultsTest] starts it. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class OtherProcess {
    @Test
    fun `write until killed`() {
        val folder = System.getProperty("muster.folder")
        assumeTrue(folder != null)
        val examples = examplesIn(File(folder))
        val store = SealedStore(stateIn(File(folder)), SEALER)
        for (number in 1..Int.MAX_VALUE) {
            store.write(mapOf("first" to "$number", "second" to "$number"))
            examples.keep(number)
            println("wrote $number")
        }
    }
}

/** What a phone keeps is whole after a kill and on a full disk, and two processes of an app lose nothing of each other. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class FaultsTest {
    private val context: Application = RuntimeEnvironment.getApplication()
    private val folder = File(context.noBackupFilesDir, "faults")

    @Before
    fun declare() = examplesIn(folder).use { it.declare("default", listOf(ExampleField("x", DType.INT64)), Retention(most = 100_000)) }

    /** The folder as a kill at each statement of `write` leaves it. */
    private fun killedAt(database: SQLiteDatabase, table: String, write: () -> Unit): List<File> {
        val copies = ArrayList<File>()
        database.setCustomScalarFunction("killed") { name ->
            copies += File(context.cacheDir, "$table-${copies.size}").also { folder.copyRecursively(it) }
            name
        }
        for (change in listOf("INSERT", "UPDATE", "DELETE")) {
            database.execSQL("CREATE TEMP TRIGGER at_$change AFTER $change ON $table BEGIN SELECT killed('x'); END")
        }
        write()
        return copies + folder
    }

    @Test
    fun `state is the old or the new after a kill at any statement`() {
        val old = mapOf("a" to "old", "b" to "long ".repeat(1_000_000), "c" to null)
        val new = mapOf("a" to "new ".repeat(1_000_000), "b" to null, "c" to "new")
        val database = stateIn(folder)
        val store = SealedStore(database, SEALER).apply { write(old) }
        val killed = killedAt(database, "kept") { store.write(new) }
        assertTrue("${killed.size}", killed.size > LOOPS)
        val found = killed.map { place -> stateIn(place).use { SealedStore(it, SEALER).run { old.mapValues { (key, _) -> get(key) } } } }
        assertEquals(List(killed.size - 1) { old } + new, found)
    }

    @Test
    fun `examples are the old or the new after a kill at any statement`() {
        examplesIn(folder).use { examples ->
            repeat(3) { examples.keep(it) }
            examples.declare("default", listOf(ExampleField("x", DType.INT64)), Retention(most = 3))
            val killed = killedAt(examples.database, "examples") { examples.keep(3) }
            assertEquals(3, killed.size)
            val found = killed.map { place -> examplesIn(place).use { it.load("default").columns.getValue("x").longs.toList() } }
            assertEquals(listOf(listOf(0L, 1L, 2L), listOf(0L, 1L, 2L), listOf(1L, 2L, 3L)), found)
        }
    }

    @Test
    fun `a full disk is named, and nothing is lost`() {
        examplesIn(folder).use { examples ->
            limit(examples.database, 1) // as many as there are
            var kept = 0
            val error = assertThrows(StateDamaged::class.java) { while (true) examples.keep(++kept) }
            assertTrue(error.message, "full" in error.message!!)
            assertEquals(kept - 1, examples.kept())
            limit(examples.database, 100_000)
            examples.keep(kept)
            assertEquals(kept, examples.kept())
        }
        val database = stateIn(folder)
        val store = SealedStore(database, SEALER).apply { write(mapOf("a" to "old")) }
        limit(database, 1)
        assertThrows(StateDamaged::class.java) { store.write(mapOf("a" to "new ".repeat(100_000))) }
        assertEquals("old", store.get("a"))
    }

    private fun limit(database: SQLiteDatabase, pages: Int) = database.rows("PRAGMA max_page_count = $pages") { it.getInt(0) }

    @Test
    fun `two processes write at the same time, and one that is killed loses nothing`() {
        val settings = listOf("robolectric.offline", "robolectric.dependency.dir").map { "-D$it=${System.getProperty(it)}" }
        val classes = System.getProperty("surefire.test.class.path") ?: System.getProperty("java.class.path")
        val words = listOf("java", "-cp", classes, "-Dmuster.folder=$folder") + settings
        val output = File(context.cacheDir, "output")
        val other = ProcessBuilder(words + listOf("org.junit.runner.JUnitCore", OtherProcess::class.java.name)).redirectOutput(output).start()
        val wrote = { Regex("wrote ([0-9]+)\n").findAll(output.readText()).lastOrNull()?.run { groupValues[1].toInt() } ?: 0 }
        examplesIn(folder).use { examples ->
            var mine = 0
            while (wrote() < LOOPS) {
                examples.keep(--mine)
                Thread.sleep(20) // else the other waits for its turn
            }
            other.destroyForcibly().waitFor()
            assertTrue("${wrote()} and $mine of ${examples.kept()}", examples.kept() + mine in wrote()..wrote() + 1)
        }
        stateIn(folder).use { database ->
            val (first, second) = listOf("first", "second").map { SealedStore(database, SEALER).get(it)!!.toInt() }
            assertEquals(first, second)
            assertTrue("$first", first in wrote()..wrote() + 1)
        }
    }
}
