/** Blobs as files, for platforms that have a file system. */
package dev.muster.device

import java.io.File
import java.io.IOException
import java.nio.file.Files
import java.nio.file.StandardCopyOption.ATOMIC_MOVE
import java.nio.file.StandardCopyOption.REPLACE_EXISTING

private const val AHEAD_MS = 60_000L
private const val PART = ".part"

/** Blobs by digest, as files in the folder `blobs`. */
internal class FileBlobs(state: File) : BlobCache {
    private val folder = File(state, "blobs")

    override fun get(sha256: String): ByteArray? {
        val file = File(folder, sha256)
        try {
            return file.readBytes().also { file.setLastModified(System.currentTimeMillis()) }
        } catch (_: IOException) {
            return null // it is fetched
        }
    }

    override fun put(sha256: String, data: ByteArray) {
        val part = File(folder, "$sha256$PART")
        try {
            folder.mkdirs()
            part.writeBytes(data)
            Files.move(part.toPath(), File(folder, sha256).toPath(), ATOMIC_MOVE, REPLACE_EXISTING)
        } catch (error: IOException) {
            part.delete() // on a full disk
            throw StateDamaged("a blob cannot be kept: ${error.message}")
        }
    }

    override fun trim(most: Long, keep: Set<String>) {
        val files = folder.listFiles { file -> file.name !in keep } ?: return
        var total = 0L
        for (file in files.sortedByDescending(::usedMs)) {
            total += file.length()
            // A part is of a process that was killed. Where it fails, the next session tries again.
            if (total > most || file.name.endsWith(PART)) file.delete()
        }
    }

    /** When a blob was used last, in milliseconds since 1970: 0 where the clock was ahead, so that nobody knows. */
    private fun usedMs(file: File): Long = file.lastModified().let { if (it <= System.currentTimeMillis() + AHEAD_MS) it else 0 }
}
