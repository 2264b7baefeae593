package dev.muster.device

import android.app.Application
import android.app.job.JobParameters
import org.junit.Assert.assertEquals
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

    override val muster: Muster by lazy {
        Muster.builder(this)
            .coordinator(coordinator, "phones")
            .attester(KeyAttestation())
            .policy(Policy(labels = setOf("app_version")))
            .labels(mapOf("app_version" to "3.10", "region" to "eu"))
            .allowMainThread()
            .requirements(Requirements(charging = false, idle = false, unmetered = false, minFreeStorageBytes = 0))
            .build()
    }
}

/**
 * The system's job takes part in a round of a real coordinator, which takes attested phones with new enough an app only, with examples
 * of the app and keys of the keystore.
 */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35], application = DigitsApp::class)
class RoundTest {
    private val app = RuntimeEnvironment.getApplication() as DigitsApp
    private val root = generateSequence(File("").absoluteFile) { it.parentFile }.first { File(it, "tests/device_runtime").isDirectory }
    private val python = File(root, ".venv/bin/python")

    @Before
    fun install() {
        assumeTrue("there is no $python: `make install` makes it", python.exists())
        FakeKeystore.install()
    }

    @Test
    fun `its report is in the committed round`() {
        val folder = File(app.cacheDir, "coordinator").apply { mkdirs() }
        File(folder, "roots.pem").writeText(ROOT_PEM)
        File(folder, "android.toml").writeText("roots = 'roots.pem'\npackage = '$PACKAGE'\nsigner = '${hex(SIGNER)}'\n")
        val process =
            ProcessBuilder(python.path, "-m", "tests.device_runtime.one_round", folder.path)
                .directory(root)
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start()
        try {
            val output = process.inputStream.bufferedReader()
            app.coordinator = output.readLine()
            collect(app.muster.examples)
            val service = Robolectric.buildService(SessionJob::class.java).create().get()
            assertTrue(service.onStartJob(Shadow.newInstanceOf(JobParameters::class.java)))
            while (app.muster.journal().isEmpty()) Thread.sleep(20)
            val entry = app.muster.journal().single()
            assertEquals(entry.toString(), Ending.REPORTED, entry.outcome?.ending)
            assertEquals("app_version >= 3.2", entry.outcome?.target)
            process.outputStream.close()
            val committed = Json.parse(output.readLine(), "rounds").list { it }.single()
            assertEquals(1, committed["reported"].size())
            assertTrue(committed["train.loss"].number() > 0)
        } finally {
            process.outputStream.close() // upon which it ends the coordinator
            if (!process.waitFor(1, TimeUnit.MINUTES)) process.destroy()
        }
    }

    private fun collect(examples: ExampleStore) {
        examples.declare("default", listOf(ExampleField("x", DType.FLOAT32, listOf(1, 8, 8)), ExampleField("y", DType.INT64, high = 10)))
        repeat(EXAMPLES) { row -> examples.append("default", mapOf("x" to FloatArray(64) { ((row + it) % 7) / 7f }, "y" to row % 10)) }
    }
}
