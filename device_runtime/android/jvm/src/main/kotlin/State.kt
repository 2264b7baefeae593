/** The state of a device in a folder: one SQLite file, whole after a kill or a power cut. */
package dev.muster.device.jvm

import dev.muster.device.StateDamaged
import dev.muster.device.StateInUse
import dev.muster.device.Store
import java.io.File
import java.io.IOException
import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions
import java.sql.Connection
import java.sql.DriverManager
import java.sql.PreparedStatement
import java.sql.SQLException

/** "MsKt", so that no other program's database is taken for one of this. */
private const val APPLICATION = 0x4d734b74

private const val FILE = "state.db"

/** Texts by key in the file `state.db`, which only its owner can read, for one process at a time. */
internal class SqliteStore(folder: File) : Store, AutoCloseable {
    private val database: Connection
    private val statements = HashMap<String, PreparedStatement>()

    /** What was done with a damaged file, in words; null without one. */
    var putAside: String? = null
        private set

    /** Throws [StateInUse] when another process has the folder, [StateDamaged] when it cannot be used. */
    init {
        try {
            database =
                try {
                    opened(folder)
                } catch (error: SQLException) {
                    if (!isDamage(error)) throw error
                    putAside(File(folder, FILE))
                    opened(folder)
                }
        } catch (error: SQLException) {
            val isInUse = "SQLITE_BUSY" in error.toString() || "locked" in error.toString()
            throw if (isInUse) StateInUse("another process runs a session with the state in $folder") else unusable(folder, error)
        } catch (error: IOException) {
            throw unusable(folder, error)
        }
    }

    /** Whether the file is no database any more, so that to open it again is useless. */
    private fun isDamage(error: SQLException) = "SQLITE_NOTADB" in error.toString() || "SQLITE_CORRUPT" in error.toString()

    private fun putAside(file: File) {
        val kept = File("$file.damaged-${System.currentTimeMillis()}")
        Files.move(file.toPath(), kept.toPath())
        File("$file-wal").delete()
        putAside = "$FILE was damaged: it is kept as ${kept.name}, and a new one takes its place"
    }

    private fun opened(folder: File): Connection {
        val path = folder.toPath()
        if (!folder.isDirectory) Files.createDirectories(path, only("rwx------"))
        val file = path.resolve(FILE)
        if (Files.notExists(file)) Files.createFile(file, only("rw-------"))
        val opened = DriverManager.getConnection("jdbc:sqlite:$file")
        try {
            take(opened)
        } catch (error: SQLException) {
            opened.close()
            throw error
        }
        return opened
    }

    private fun only(permissions: String) = PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString(permissions))

    /** Make the table under the lock that the process then keeps. */
    private fun take(opened: Connection) {
        opened.createStatement().use { statement ->
            statement.execute("PRAGMA locking_mode = EXCLUSIVE")
            statement.execute("PRAGMA synchronous = FULL")
            statement.execute("BEGIN EXCLUSIVE")
            val owner = statement.executeQuery("PRAGMA application_id").use { it.getInt(1) }
            val tables = statement.executeQuery("SELECT count(*) FROM sqlite_master").use { it.getInt(1) }
            if (owner != APPLICATION && (owner != 0 || tables > 0)) {
                throw SQLException("it is of another program, such as the device in Python; name another folder")
            }
            val damage = statement.executeQuery("PRAGMA quick_check(1)").use { it.getString(1) }
            if (damage != "ok") throw SQLException("SQLITE_CORRUPT: $damage")
            if (owner != APPLICATION) statement.execute("PRAGMA application_id = $APPLICATION")
            statement.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
            statement.execute("COMMIT")
            statement.execute("PRAGMA journal_mode = WAL") // one write to the disk for each commit
        }
        opened.autoCommit = false
    }

    @Synchronized
    override fun get(key: String): String? =
        usable {
            val statement = prepared("SELECT value FROM kept WHERE key = ?")
            statement.setString(1, key)
            statement.executeQuery().use { if (it.next()) it.getString(1) else null }
        }

    @Synchronized
    override fun write(changes: Map<String, String?>): Unit =
        usable {
            try {
                for ((key, value) in changes) change(key, value)
                database.commit()
            } catch (error: SQLException) {
                database.rollback()
                throw error
            }
        }

    private fun <T> usable(work: () -> T): T =
        try {
            work()
        } catch (error: SQLException) {
            throw StateDamaged("the state cannot be read or written: ${error.message}")
        }

    private fun change(key: String, value: String?) {
        val sql = if (value == null) "DELETE FROM kept WHERE key = ?" else "INSERT OR REPLACE INTO kept VALUES (?, ?)"
        val statement = prepared(sql)
        statement.setString(1, key)
        if (value != null) statement.setString(2, value)
        statement.execute()
    }

    private fun prepared(sql: String) = statements.getOrPut(sql) { database.prepareStatement(sql) }

    override fun close() = database.close()

    private fun unusable(folder: File, error: Exception) = StateDamaged("the state in $folder cannot be used: ${error.message}")
}
