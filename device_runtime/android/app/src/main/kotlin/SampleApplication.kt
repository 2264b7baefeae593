/** The sample: digits that are drawn here, kept here, trained on here, and read with the model that all devices made. */
package dev.muster.sample

import ai.onnxruntime.OrtEnvironment
import android.app.Application
import dev.muster.device.DType
import dev.muster.device.ExampleField
import dev.muster.device.Muster
import dev.muster.device.MusterProvider
import dev.muster.device.Retention

internal const val COLLECTION = "default"
private const val MONTH_S = 30 * 86_400.0
private const val MOST = 1000

/** One device for each process of this app. */
class SampleApplication :
    Application(),
    MusterProvider {
    private val fields = listOf(ExampleField("x", DType.FLOAT32, listOf(1, SIDE, SIDE)), ExampleField("y", DType.INT64, emptyList(), 10))

    override val muster: Muster by lazy {
        Muster.builder(this).coordinator(getString(R.string.coordinator), getString(R.string.population)).build()
    }

    /** Keep a digit that was drawn, with its label. */
    fun keep(drawn: FloatArray, digit: Int) {
        muster.examples.declare(COLLECTION, fields, Retention(MONTH_S, MOST))
        muster.examples.append(COLLECTION, mapOf("x" to drawn, "y" to digit))
    }

    /** Whether this build can run graphs on this phone. */
    val hasEngine: Boolean by lazy {
        try {
            OrtEnvironment.getEnvironment()
            true
        } catch (_: LinkageError) {
            false
        }
    }
}
