package dev.muster.device.jvm

import java.io.File

private val ENGINE = mapOf("amd64" to "linux-x64", "aarch64" to "linux-aarch64")
private val SQLITE = mapOf("amd64" to "x86_64", "aarch64" to "aarch64")

/**
 * Use the native libraries that the build unpacked beside the program's jar, if they are for this machine.
 *
 * Those within jars are copied to a temporary folder at every start. To be called before anything loads one.
 */
internal fun useUnpackedLibraries() {
    val arch = System.getProperty("os.arch")
    val unpacked = File(File(SqliteStore::class.java.protectionDomain.codeSource.location.toURI()).parentFile, "native")
    prefer("onnxruntime.native.path", File(unpacked, "ai/onnxruntime/native/${ENGINE[arch]}"))
    prefer("org.sqlite.lib.path", File(unpacked, "org/sqlite/native/Linux/${SQLITE[arch]}"))
}

private fun prefer(property: String, folder: File) {
    if (System.getProperty("os.name") == "Linux" && System.getProperty(property) == null && folder.isDirectory) {
        System.setProperty(property, folder.path)
    }
}
