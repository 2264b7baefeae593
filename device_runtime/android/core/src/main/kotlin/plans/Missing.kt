package dev.muster.device.plans
import dev.muster.device.Examples
internal class StreamKey(val seed: Long, val round: Int, val slot: Long, val secret: ByteArray)
internal class TrainingResult(val values: FloatArray, val weight: Double, val examples: Int, val steps: Int, val kept: Map<String, FloatArray>)
internal class Graph
internal class Work(val plan: Plan, val graphs: Map<String, Graph>, val broadcast: Map<String, FloatArray>, val frozen: Map<String, dev.muster.device.Column>, val kept: Map<String, FloatArray>?, val examples: Examples, val key: StreamKey, val keepGoing: () -> Boolean)
internal fun execute(work: Work): TrainingResult = TODO("$work")
internal fun <T> withGraphs(refs: Map<String, BlobRef>, blob: (BlobRef) -> ByteArray, work: (Map<String, Graph>) -> T): T = TODO("$refs $blob $work")
internal fun onSide(plan: Plan, all: Examples, least: Long): Examples = TODO("$plan $all $least")
internal fun checkExamples(plan: Plan, all: Examples): Unit = TODO("$plan $all")
