package dev.muster.device

import android.app.Application
import android.app.job.JobParameters
import android.content.ComponentCallbacks2.TRIM_MEMORY_BACKGROUND
import android.content.ComponentCallbacks2.TRIM_MEMORY_COMPLETE
import android.content.ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW
import android.content.ComponentCallbacks2.TRIM_MEMORY_UI_HIDDEN
import org.junit.Assert.assertEquals
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Assume.assumeTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.annotation.Config
import org.robolectric.shadow.api.Shadow
import java.io.File
import java.util.concurrent.TimeUnit

private const val EXAMPLES = 30

/** An app that draws digits, as far as a coordinator knows. */
class DigitsApp : Application(), MusterProvider {
    lateinit var coordinator: String
    var policy = Policy(labels = setOf("app_version"))
    var evidence: Attester? = null

    override val muster: Muster by lazy {
        Muster.builder(this)
            .coordinator(coordinator, "phones")
            .policy(policy)
            .labels(mapOf("app_version" to "3.10", "region" to "eu"))
            .apply { evidence?.let(::attester) }
            .allowMainThread()
            .requirements(Requirements(charging = false, idle = false, unmetered = false, minFreeStorageBytes = 0))
            .build()
    }
}

/** The system's job takes part in a round of a real coordinator, with examples of the app and keys of the keystore. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35], application = DigitsApp::class)
class RoundTest {
    private val app = RuntimeEnvironment.getApplication() as DigitsApp
    private val root = generateSequence(File("").absoluteFile) { it.parentFile }.first { File(it, "tests/device_runtime").isDirectory }
    private val python = File(root, ".venv/bin/python")
    private val folder = File(app.cacheDir, "coordinator").apply { mkdirs() }

    @Before
    fun install() {
        assumeTrue("there is no $python: `make install` makes it", python.exists())
        FakeKeystore.install()
    }

    @Test
    fun `the report of an attested phone with new enough an app is in the committed round of a coordinator that takes no others`() {
        File(folder, "roots.pem").writeText(ROOT_PEM)
        File(folder, "android.toml").writeText("roots = 'roots.pem'\npackage = '$PACKAGE'\nsigner = '${hex(SIGNER)}'\n")
        app.evidence = KeyAttestation()
        withCoordinator(reports = 1) { _, _ -> assertEquals("app_version >= 3.2", takePart()?.target) }
    }

    @Suppress("DEPRECATION") // Android 14 and later send fewer of these levels
    @Test
    fun `a phone takes part in a secure round, and its model gives memory back when Android asks for it`() {
        File(folder, "secure").createNewFile()
        withCoordinator(reports = 8) { key, release ->
            app.policy = Policy(signers = setOf(key))
            takePart()
            release()
            val model = app.muster.model("digits")
            assertTrue(model.refresh())
            val seen = { model.predict(mapOf("x" to FloatArray(64) { it / 64f })).floats("output").toList() }
            val before = seen()
            val (kept, away) = listOf("muster/blobs", "away").map { File(app.noBackupFilesDir, it) }
            assertTrue(kept.renameTo(away))
            app.onTrimMemory(TRIM_MEMORY_UI_HIDDEN)
            assertEquals(before, seen())
            for (level in listOf(TRIM_MEMORY_RUNNING_LOW, TRIM_MEMORY_BACKGROUND, TRIM_MEMORY_COMPLETE)) {
                app.onTrimMemory(level)
                assertThrows(ModelRefused::class.java) { seen() }
                assertEquals(1, model.version)
                assertTrue(away.renameTo(kept))
                assertEquals(before, seen())
                assertTrue(kept.renameTo(away))
            }
        }
    }

    /** Work with a coordinator, the key that signs there, and what releases the model; its committed round has so many reports then. */
    private fun withCoordinator(reports: Int, work: (key: String, release: () -> Unit) -> Unit) {
        val process =
            ProcessBuilder(python.path, "-m", "tests.device_runtime.one_round", folder.path)
                .directory(root)
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start()
        try {
            val output = process.inputStream.bufferedReader()
            app.coordinator = output.readLine()
            work(output.readLine()) {
                process.outputStream.write(byteArrayOf('\n'.code.toByte()))
                process.outputStream.flush()
                assertEquals("released", output.readLine())
            }
            process.outputStream.close()
            val committed = Json.parse(output.readLine(), "rounds").list { it }.single()
            assertEquals(reports, committed["reported"].size())
            assertTrue(committed["train.loss"].number() > 0)
        } finally {
            process.outputStream.close() // upon which it ends the coordinator
            if (!process.waitFor(1, TimeUnit.MINUTES)) process.destroy()
        }
    }

    /** Take part in the one round by a job of the system. */
    private fun takePart(): Outcome? {
        collect(app.muster.examples)
        val service = Robolectric.buildService(SessionJob::class.java).create().get()
        assertTrue(service.onStartJob(Shadow.newInstanceOf(JobParameters::class.java)))
        while (app.muster.journal().isEmpty()) Thread.sleep(20)
        val entry = app.muster.journal().single()
        assertEquals(entry.toString(), Ending.REPORTED, entry.outcome?.ending)
        return entry.outcome
    }

    private fun collect(examples: ExampleStore) {
        examples.declare("default", listOf(ExampleField("x", DType.FLOAT32, listOf(1, 8, 8)), ExampleField("y", DType.INT64, high = 10)))
        repeat(EXAMPLES) { row -> examples.append("default", mapOf("x" to FloatArray(64) { ((row + it) % 7) / 7f }, "y" to row % 10)) }
    }
}
