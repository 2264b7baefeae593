/**
 * Blocks of work for Python's tests and benchmarks: a request a line, an answer a line, both in JSON.
 *
 * `{"load": FOLDER}` reads the work in a folder, `{"graphs": null}` loads its graphs, and `{"train": null}` trains with them, once.
 * `{"digests": null}` answers what came of it: the steps, and digests of the weighed report and of what the device keeps. The files
 * are those of `device_runtime/js/bench/blocks.ts`, and `kept.safetensors` where a device has kept vectors.
 *
 * `{"secure": FOLDER}` reads a recorded secure session, and `{"replay": null}` takes part in it.
 */
package dev.muster.device.jvm

import dev.muster.device.Json
import dev.muster.device.hex
import dev.muster.device.plans.FORMAT
import dev.muster.device.plans.Graph
import dev.muster.device.plans.StreamKey
import dev.muster.device.plans.TrainingResult
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

private fun graphsIn(folder: File, work: Work): Map<String, Graph> =
    work.plan.graphs.getValue(FORMAT).keys.associateWith { Graph.load(File(folder, "graphs/$it").readBytes(), it) }

private fun digests(work: Work, result: TrainingResult): Map<String, Any> {
    val report = encodeReport(work.plan.report, weigh(work.plan.report, result.values, result.weight), work.key)
    val kept = result.kept.mapValues { vectorDigest(it.value) }
    return mapOf("steps" to result.steps, "report" to hex(sha256(report)), "kept" to kept)
}

private class Blocks {
    private var folder = File("")
    private lateinit var work: Work
    private lateinit var trained: TrainingResult
    private lateinit var secure: SecureBlock

    fun answer(asked: Json): Map<String, Any> {
        when (asked.members().keys.singleOrNull()) {
            "load" -> {
                folder = File(asked["load"].text())
                work = workIn(folder)
            }
            "graphs" -> work = work.copy(graphs = graphsIn(folder, work))
            "train" -> trained = execute(work)
            "digests" -> return digests(work, trained)
            "secure" -> secure = SecureBlock(File(asked["secure"].text()))
            "replay" -> secure.replay()
        }
        return mapOf("engine" to engineName())
    }
}

/** Answer requests until there are no more. */
public fun main() {
    val blocks = Blocks()
    for (line in generateSequence(::readlnOrNull)) println(Json.write(blocks.answer(Json.parse(line, "request"))))
}
