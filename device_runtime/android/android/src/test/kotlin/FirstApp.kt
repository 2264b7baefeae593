package com.example

import android.app.Application
import dev.muster.device.*

class FirstApp : Application(), MusterProvider {
    override val muster: Muster by lazy {
        Muster.builder(this).coordinator("http://10.0.2.2:8080", "phones").build()
    }

    override fun onCreate() {
        super.onCreate()
        muster.schedule()
    }

    /** Keep a picture of 8 × 8 points with its digit. Not on the main thread: it writes to the disk. */
    fun keep(picture: FloatArray, digit: Int) {
        val fields = listOf(ExampleField("x", DType.FLOAT32, listOf(1, 8, 8)), ExampleField("y", DType.INT64, high = 10))
        muster.examples.declare("default", fields, Retention(maxAgeS = 30 * 86_400.0, most = 1000))
        muster.examples.append("default", mapOf("x" to picture, "y" to digit))
    }

    /** One session now, for a button. */
    suspend fun train(): String = muster.session().run { "$ending $reason" }

    /** The digit in a picture; offline once a version is here. Not on the main thread. */
    fun read(picture: FloatArray): Int {
        val model = muster.model("digits")
        val output = model.predict(mapOf("x" to picture)).floats("output")
        return output.indices.maxBy { output[it] }
    }
}
