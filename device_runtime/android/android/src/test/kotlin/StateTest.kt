package dev.muster.device

import android.content.Context
import android.database.sqlite.SQLiteDatabase
import dev.muster.device.kept.journal
import okhttp3.OkHttpClient
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotEquals
import org.junit.Assert.assertNull
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.annotation.Config
import java.io.File
import java.io.RandomAccessFile
import kotlin.concurrent.thread

private const val LOCKING =
    "import fcntl,sys,time; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); print('l',flush=True); time.sleep(60)"

/** SQLite's number for a journal and a database that are written through to the disk. */
private const val FULL = 2

/** What a phone keeps is sealed, whole after any end of the process, and never erased in silence. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class StateTest {
    private val context: Context = RuntimeEnvironment.getApplication()
    private val folder = File(context.noBackupFilesDir, "muster")
    private val file = File(folder, "state.db")

    private fun <T> phone(work: (Phone) -> T): T = Phone(context, folder, null, OkHttpClient()).use(work)

    private fun outcomes(phone: Phone) = journal(phone.store).map { it.kind }

    private fun <T> database(work: (SQLiteDatabase) -> T): T = SQLiteDatabase.openDatabase(file.path, null, 0).use(work)

    @Before
    fun install() = FakeKeystore.install()

    @Test
    fun `texts survive, long ones too, and none is readable in the file`() {
        val long = "a secret ".repeat(500_000)
        phone { it.store.write(mapOf("short" to "a secret here", "long" to long, "gone" to "x")) }
        phone { it.store.write(mapOf("gone" to null, "short" to "another secret")) }
        phone { phone ->
            assertEquals("another secret", phone.store.get("short"))
            assertEquals(long, phone.store.get("long"))
            assertNull(phone.store.get("gone"))
        }
        assertFalse("secret" in file.readBytes().toString(Charsets.ISO_8859_1))
    }

    @Test
    fun `a write is on the disk when it returns`() {
        openDatabase(file, listOf(SealedStore.TABLE)) { }.use { database ->
            assertEquals(listOf(FULL), database.rows("PRAGMA synchronous") { it.getInt(0) })
            assertEquals(listOf("truncate"), database.rows("PRAGMA journal_mode") { it.getString(0) })
        }
    }

    @Test
    fun `without the key of this installation the device begins anew, with another identity, and says so`() {
        val before =
            phone {
                it.store.write(mapOf("a" to "b"))
                it.signingKey("device").text
            }
        FakeKeystore.lose()
        phone { phone ->
            assertNull(phone.store.get("a"))
            assertEquals(listOf(Entry.Kind.STATE_REPLACED), outcomes(phone))
            assertNotEquals(before, phone.signingKey("device").text)
        }
        phone { assertEquals(1, outcomes(it).size) }
    }

    @Test
    fun `a text under another name does not open`() {
        phone { it.store.write(mapOf("a" to "b", "c" to "d")) }
        database { it.execSQL("UPDATE kept SET key = 'e' WHERE key = 'a'") }
        phone { phone ->
            assertThrows(StateDamaged::class.java) { phone.store.get("e") }
            assertEquals("d", phone.store.get("c"))
        }
    }

    @Test
    fun `a damaged file is put aside, and the journal names it`() {
        phone { it.store.write(mapOf("a" to "b")) }
        RandomAccessFile(file, "rw").use { it.write(ByteArray(200) { 7 }) }
        phone { phone ->
            assertNull(phone.store.get("a"))
            assertEquals(listOf(Entry.Kind.STATE_REPLACED), outcomes(phone))
        }
        assertEquals(1, folder.list { _, name -> "damaged" in name }!!.size)
    }

    @Test
    fun `the state of a newer version of the library is refused by name, and stays`() {
        phone { it.store.write(mapOf("a" to "b")) }
        database { it.version = 2 }
        val error = assertThrows(StateDamaged::class.java) { phone { it.store.get("a") } }
        assertTrue(error.message, "state.db is of a newer version of this library" in error.message!!)
        database { it.version = 1 }
        phone { assertEquals("b", it.store.get("a")) }
    }

    @Test
    fun `nothing is left after all is erased`() {
        phone { phone ->
            phone.store.write(mapOf("a" to "b"))
            phone.erase()
        }
        assertFalse(folder.exists())
        phone { assertNull(it.store.get("a")) }
    }

    @Test
    fun `a state that is damaged or closed meanwhile is named`() {
        phone { phone ->
            phone.store.write(mapOf("a" to "b"))
            database { it.execSQL("DROP TABLE kept") }
            assertThrows(StateDamaged::class.java) { phone.store.get("a") }
            assertThrows(StateDamaged::class.java) { phone.store.write(mapOf("a" to "c")) }
        }
        phone { phone ->
            phone.store.get("a")
            phone.examples.counts()
            phone.close()
            assertThrows(StateDamaged::class.java) { phone.store.get("a") }
            assertThrows(StateDamaged::class.java) { phone.store.write(mapOf("a" to "c")) }
            assertThrows(StateDamaged::class.java) { phone.examples.counts() }
        }
    }

    @Test
    fun `two devices of one process take turns`() {
        val found = ArrayList<Int>()
        val first = thread { TurnsOfApp(folder).take { Thread.sleep(300).also { found += 1 } } }
        Thread.sleep(100)
        TurnsOfApp(folder).take { found += 2 }
        first.join()
        assertEquals(listOf(1, 2), found)
    }

    @Test
    fun `a folder that cannot be is named`() {
        folder.parentFile!!.mkdirs()
        folder.writeText("a file")
        assertThrows(StateDamaged::class.java) { TurnsOfApp(folder).take { } }
    }

    @Test
    fun `another process at work is told from one that is over`() {
        val turns = TurnsOfApp(folder)
        assertEquals(1, turns.take { 1 })
        val other = ProcessBuilder("python3", "-c", LOCKING, File(folder, "lock").path).start()
        try {
            assertEquals('l'.code, other.inputStream.read())
            assertThrows(StateInUse::class.java) { turns.take { } }
            thread { Thread.sleep(200).also { other.destroyForcibly() } }
            assertEquals(2, turns.taken(10_000) { 2 })
        } finally {
            other.destroyForcibly().waitFor()
        }
        assertEquals(1, turns.take { 1 })
    }
}
