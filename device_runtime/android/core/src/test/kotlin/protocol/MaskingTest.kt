package dev.muster.device.protocol

import dev.muster.device.Json
import dev.muster.device.bytesOf
import dev.muster.device.floatsOf
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.ReportLayout
import dev.muster.device.plans.decodePlan
import dev.muster.device.secagg.FixedPoint
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.values
import dev.muster.device.vectors
import dev.muster.device.wire.SumBounds
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test

/** What both ends of a secure round derive is Python's. */
class MaskingTest {
    private val device = vectors("device.json")
    private val masking = device["masking"]
    private val seed = device["messages"]["seed"].text().toLong()
    private val bounds = SumBounds.of(masking["bounds"])
    private val noisy = SumBounds.of(masking["noisy"])

    private fun layout(json: Json) = ReportLayout.of(json["layout"])

    /** The formats in a vector; noise is another part of the vectors. */
    private fun formats(json: Json) =
        json.items().map { row ->
            val (size, bits, low, high, norm) = row.items()
            FixedPoint(size.size(), bits.size(), low.number(), high.number(), norm.number(), row.items()[5].flag())
        }

    private fun quiet(layout: ReportLayout, bounds: SumBounds) = fixedPoints(layout, bounds).map { it.copy(noise = 0) }

    @Test
    fun `formats of values are Python's`() {
        assertEquals(formats(masking["fixed_points"]), fixedPoints(layout(masking), bounds))
        assertEquals(formats(masking["noisy_fixed_points"]), quiet(layout(masking), noisy))
        val rotated = ReportLayout.of(masking["rotated"])
        assertEquals(formats(masking["rotated_fixed_points"]), fixedPoints(rotated, bounds))
        assertEquals(formats(masking["rotated_noisy_fixed_points"]), quiet(rotated, noisy))
    }

    @Test
    fun `noise of a device is Python's`() {
        for (row in masking["noise_shares"].items()) {
            val (format, multiplier, honest, noise) = row.items()
            val (size, bits, low, high, norm) = format.items()
            val quiet = FixedPoint(size.size(), bits.size(), low.number(), high.number(), norm.number(), weighted = true)
            assertEquals(noise.count(), quiet.withNoise(multiplier.number(), honest.count()).noise)
        }
        val (format) = fixedPoints(layout(masking), noisy)
        assertEquals(format, format.copy(noise = 0).withNoise(noisy.noiseMultiplier, noisy.honest))
    }

    @Test
    fun `what is summed of a report with ranges is Python's`() {
        val ranged = masking["ranged"]
        val layout = layout(ranged)
        assertEquals(formats(ranged["fixed_points"]), fixedPoints(layout, bounds))
        assertEquals(formats(ranged["noisy_fixed_points"]), quiet(layout, noisy))
        val given = floatsOf(fromHex(ranged["values"].text()))
        assertEquals(ranged["summed"].text(), hex(bytesOf(summedValues(layout, bounds, given))))
        assertEquals(ranged["noisy_summed"].text(), hex(bytesOf(summedValues(layout, noisy, given))))
        assertEquals(ranged["layout_hash"].text(), hex(layoutHash(layout, seed)))
    }

    @Test
    fun `what is summed with noise is Python's`() {
        val layout = layout(masking)
        assertEquals(masking["noisy_values"].text(), hex(bytesOf(summedValues(layout, noisy, values(layout.size - 1)))))
    }

    @Test
    fun `hashes and numbers of a session are Python's`() {
        val layout = layout(masking)
        assertEquals(masking["greatest_weight"].count(), greatestWeight(layout, bounds))
        assertEquals(masking["layout_hash"].text(), hex(layoutHash(layout, seed)))
        assertEquals(masking["task_hash"].text(), hex(taskHash("tâche-1")))
        val (plan, checkpoint) = listOf("plan", "checkpoint").map { BlobRef(masking[it].text(), 0) }
        assertEquals(masking["model_hash"].text(), hex(modelHash(plan, checkpoint)))
        assertEquals(masking["session_number"].text().toLong(), sessionNumber(Int.MAX_VALUE, 5))
        assertEquals(masking["last_session_number"].text().toLong(), lastSessionNumber(7))
    }

    @Test
    fun `the layouts of a plan's rounds have Python's hashes`() {
        for ((round, hash) in device["plan"]["layout_hash"].map { it.text() }) {
            val plan = decodePlan(utf8(device["plan"]["text"].text()), round.toInt())
            assertEquals(hash, hex(layoutHash(plan.report, 7)))
        }
    }

    @Test
    fun `every kind of codec is hashed as Python writes it, and texts too`() {
        val codecs =
            """{"codec":"count_sketch","rows":2,"columns":3},""" +
                """{"codec":"low_rank","rank":1,"matrices":[[2,3]]},{"codec":"subsample","kept":2}"""
        val names = """"labels":["\"\\\b\f\n\r\t\u0001/ é😀"]"""
        val text =
            """{"segments":[{"name":"a","size":6,"reduction":"mean","labels":[],"codecs":[$codecs]},""" +
                """{"name":"weight","size":1,"reduction":"sum",$names,"codecs":[]}],"weighting":"uniform","bounded":false,"bits":0}"""
        val expected = sha256(utf8(text), byteArrayOf(1, 0, 0, 0, 0, 0, 0, 0))
        assertEquals(hex(expected), hex(layoutHash(ReportLayout.of(Json.parse(text, "layout")), 1)))
    }

    @Test
    fun `a report without means has no noise to hide behind`() {
        val sums = """{"segments":[{"name":"weight","size":1,"reduction":"sum"}],"weighting":"uniform"}"""
        assertEquals(listOf(0), fixedPoints(ReportLayout.of(Json.parse(sums, "layout")), noisy).map { it.size })
    }
}
