/**
 * Blocks of work for Python's tests and benchmarks: a request a line, an answer a line, both in JSON.
 *
 * `{"load": FOLDER}` reads the work in a folder, and `{"train": null}` trains on it, with graphs that are loaded afresh: it answers
 * the CPU seconds of this process from the first step to the report, and digests of the weighed report and of what the device
 * keeps. The files are those of `device_runtime/js/bench/blocks.ts`, and `kept.safetensors` where a device has kept vectors.
 *
 * `{"secure": FOLDER, "times": N}` takes part in a recorded secure session so many times, and answers the CPU seconds of all.
 */
package dev.muster.device.jvm

import com.sun.management.OperatingSystemMXBean
import dev.muster.device.Json
import dev.muster.device.hex
import dev.muster.device.plans.FORMAT
import dev.muster.device.plans.Graph
import dev.muster.device.plans.StreamKey
import dev.muster.device.plans.Work
import dev.muster.device.plans.checkExamples
import dev.muster.device.plans.decodePlan
import dev.muster.device.plans.decodeVectors
import dev.muster.device.plans.encodeReport
import dev.muster.device.plans.engineName
import dev.muster.device.plans.execute
import dev.muster.device.plans.frozenOf
import dev.muster.device.plans.vectorDigest
import dev.muster.device.plans.weigh
import dev.muster.device.sha256
import java.io.File
import java.lang.management.ManagementFactory

private val machine = ManagementFactory.getOperatingSystemMXBean() as OperatingSystemMXBean

/** The work in a folder, but its graphs. */
private fun workIn(folder: File): Work {
    val given = Json.parse(File(folder, "key.json").readBytes(), "key")
    val key = StreamKey(given["seed"].text().toLong(), given["round"].text().toInt(), given["slot"].text().toLong())
    val plan = decodePlan(File(folder, "plan.json").readBytes(), key.round)
    val examples = NpzExamples(File(folder, "examples.npz")).load("default")
    checkExamples(plan, examples)
    val broadcast = decodeVectors(File(folder, "checkpoint.safetensors").readBytes(), plan.broadcast)
    val frozen = frozenOf(plan) { File(folder, "frozen.safetensors").readBytes() }
    val kept = File(folder, "kept.safetensors").takeIf { it.exists() }?.let { decodeVectors(it.readBytes(), plan.kept) }
    return Work(plan, emptyMap(), broadcast, frozen, kept, examples, key) { true }
}

private fun train(folder: File, work: Work): Map<String, Any> {
    val names = work.plan.graphs.getValue(FORMAT).keys
    val graphs = names.associateWith { Graph.load(File(folder, "graphs/$it").readBytes(), it) }
    val before = machine.processCpuTime
    val result = execute(work.copy(graphs = graphs))
    val spent = (machine.processCpuTime - before) / 1e9
    val report = encodeReport(work.plan.report, weigh(work.plan.report, result.values, result.weight), work.key)
    val kept = result.kept.mapValues { vectorDigest(it.value) }
    return mapOf("cpu_s" to spent, "steps" to result.steps, "report" to hex(sha256(report)), "kept" to kept)
}

private fun secure(folder: File, times: Int): Map<String, Any> {
    val block = SecureBlock(folder)
    val before = machine.processCpuTime
    repeat(times) { block.replay() }
    return mapOf("cpu_s" to (machine.processCpuTime - before) / 1e9)
}

/** Answer requests until there are no more. */
public fun main() {
    var folder = File("")
    lateinit var work: Work
    for (line in generateSequence(::readlnOrNull)) {
        val asked = Json.parse(line, "request")
        val load = asked.optional("load")
        if (load != null) {
            folder = File(load.text())
            work = workIn(folder)
        }
        val answer =
            when {
                "secure" in asked.members() -> secure(File(asked["secure"].text()), asked["times"].size())
                "train" in asked.members() -> train(folder, work)
                else -> mapOf("engine" to engineName())
            }
        println(Json.write(answer))
    }
}
