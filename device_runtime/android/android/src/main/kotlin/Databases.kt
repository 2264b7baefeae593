/** Databases of this library, and texts by key in one of them, sealed under a key that this installation alone has. */
package dev.muster.device

import android.content.ContentValues
import android.database.Cursor
import android.database.sqlite.SQLiteDatabase
import android.database.sqlite.SQLiteException
import java.io.File
import java.io.IOException
import java.nio.file.Files
import java.nio.file.attribute.BasicFileAttributes

/** Rows of a cursor hold two mebibytes at most. */
private const val PART_BYTES = 1 shl 20
private const val SALT_BYTES = 16
private const val VERSION = 1

/**
 * A database of the library, made where there is none. [onDamage] hears of a damaged file, which is kept beside.
 *
 * Throws [StateDamaged] for one of a newer version of the library, which is left as it is.
 */
internal fun openDatabase(file: File, tables: List<String>, onDamage: (String) -> Unit): SQLiteDatabase {
    file.parentFile?.mkdirs()
    return try {
        opened(file, tables)
    } catch (error: SQLiteException) {
        if (!isDamaged(file)) throw StateDamaged("${file.name} cannot be opened: ${error.message}")
        val kept = File(file.path + ".damaged-${System.currentTimeMillis()}")
        if (!file.renameTo(kept)) throw StateDamaged("${file.name} is damaged, and cannot be put aside: ${error.message}")
        onDamage("${file.name} was damaged: it is kept as ${kept.name}, and a new one takes its place")
        opened(file, tables)
    }
}

private fun opened(file: File, tables: List<String>): SQLiteDatabase {
    // The platform's own handler of damage removes the file.
    val database = SQLiteDatabase.openOrCreateDatabase(file.path, null) { }
    try {
        // A write is whole, and what is committed is on the disk. How a phone sets these is its maker's choice.
        database.disableWriteAheadLogging()
        database.rows("PRAGMA journal_mode = TRUNCATE") { }
        database.execSQL("PRAGMA synchronous = FULL")
        if (database.version > VERSION) {
            throw StateDamaged("${file.name} is of a newer version of this library: update the app, or erase what Muster keeps")
        }
        database.transact {
            tables.forEach(database::execSQL)
            database.version = VERSION
        }
        return database
    } catch (error: Exception) {
        database.close()
        throw error
    }
}

/** Whether a file is no database any more, so that to open it again is useless. */
private fun isDamaged(file: File): Boolean =
    try {
        SQLiteDatabase.openDatabase(file.path, null, SQLiteDatabase.OPEN_READONLY) { }.use { !it.isDatabaseIntegrityOk }
    } catch (error: SQLiteException) {
        error is android.database.sqlite.SQLiteDatabaseCorruptException || "not a database" in error.message.orEmpty()
    }

/** What tells a file from another that takes its place, while it is open; null when there is none. */
internal fun identityOf(file: File): Any? =
    try {
        Files.readAttributes(file.toPath(), BasicFileAttributes::class.java).fileKey()
    } catch (_: IOException) {
        null
    }

/** Do work in a transaction, all of it or none. */
internal inline fun <T> SQLiteDatabase.transact(work: () -> T): T {
    beginTransaction()
    val done =
        try {
            work()
        } catch (error: Throwable) {
            runCatching(::endTransaction) // fails where SQLite ended it by itself, as on a full disk
            throw error
        }
    setTransactionSuccessful()
    endTransaction()
    return done
}

/** What `read` makes of the rows of a query. */
internal fun <T> SQLiteDatabase.rows(sql: String, vararg given: String, read: (Cursor) -> T): List<T> =
    rawQuery(sql, given).use { cursor -> List(cursor.count) { cursor.moveToPosition(it).let { read(cursor) } } }

/** Seals bytes by AES-256-GCM, each under a key of its own, derived from a secret. */
internal class Sealer(private val secret: ByteArray) {
    /** about: what the bytes are, without which they do not open. */
    fun seal(content: ByteArray, about: String): ByteArray {
        val salt = platformRandom(SALT_BYTES)
        return concat(salt, Boxes().seal(keyOf(salt), content, utf8(about)))
    }

    /** Throws [FormatException] when it does not open. */
    fun open(sealed: ByteArray, about: String): ByteArray {
        if (sealed.size < SALT_BYTES) throw FormatException("too few bytes to open")
        return Boxes().open(keyOf(sealed.copyOf(SALT_BYTES)), sealed.copyOfRange(SALT_BYTES, sealed.size), utf8(about))
    }

    private fun keyOf(salt: ByteArray) = hkdf(secret, salt, utf8("muster.store.v1"))
}

/** Texts in the table `kept`, sealed. A long text is in several rows. */
internal class SealedStore(private val database: SQLiteDatabase, private val sealer: Sealer) : Store {
    override fun get(key: String): String? {
        val parts = usable { database.rows("SELECT value FROM kept WHERE key = ? ORDER BY part", key) { it.getBlob(0) } }
        if (parts.isEmpty()) return null
        try {
            return text(sealer.open(concat(*parts.toTypedArray()), key))
        } catch (_: FormatException) {
            throw StateDamaged("$key does not open: it was changed")
        }
    }

    override fun write(changes: Map<String, String?>) {
        val sealed = changes.mapValues { (key, value) -> value?.let { sealer.seal(utf8(it), key) } }
        usable { database.transact { sealed.forEach { (key, value) -> put(key, value) } } }
    }

    private fun <T> usable(work: () -> T): T =
        try {
            work()
        } catch (error: SQLiteException) {
            throw StateDamaged("the state cannot be read or written: ${error.message}")
        } catch (_: IllegalStateException) {
            throw StateDamaged("the state is closed")
        }

    private fun put(key: String, value: ByteArray?) {
        database.delete("kept", "key = ?", arrayOf(key))
        if (value == null) return
        for (begin in value.indices step PART_BYTES) {
            val row = ContentValues()
            row.put("key", key)
            row.put("part", begin / PART_BYTES)
            row.put("value", value.copyOfRange(begin, minOf(begin + PART_BYTES, value.size)))
            database.insertOrThrow("kept", null, row)
        }
    }

    companion object {
        const val TABLE =
            "CREATE TABLE IF NOT EXISTS kept (key TEXT NOT NULL, part INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (key, part))"
    }
}
