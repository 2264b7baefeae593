package dev.muster.device

import org.jetbrains.kotlin.abi.tools.AbiFilters
import org.jetbrains.kotlin.abi.tools.AbiTools
import org.junit.Assert.assertEquals
import org.junit.Test
import java.io.File

/** What apps may call, in `api`. A change of it is seen in review. */
class ApiTest {
    @Test
    fun `the public API is what the files say, in one package`() {
        val made = listOf("core", "android").map { module -> dump(module) }
        for (file in made) {
            assertEquals("$HOW ${file.name}", File("../api", file.name).readText(), file.readText())
            val names = Regex("^public .*(?:class|interface) (\\S+)", RegexOption.MULTILINE).findAll(file.readText()).map { it.groupValues[1] }
            assertEquals(emptyList<String>(), names.filter { it.substringBeforeLast('/') != "dev/muster/device" }.toList())
        }
    }

    private fun dump(module: String): File {
        val file = File("target/api/$module.api").also { it.parentFile.mkdirs() }
        val classes = File("../$module/target/classes").walk().filter { it.extension == "class" }.asIterable()
        file.writer().use { AbiTools.getInstance().printJvmDump(it, classes, AbiFilters.EMPTY) }
        return file
    }

    private companion object {
        const val HOW = "if the change is meant: cp device_runtime/android/android/target/api/* device_runtime/android/api ;"
    }
}
