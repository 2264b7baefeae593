/**
 * The runner: it loops over batches, runs graphs and concatenates the report. It contains no algorithm.
 *
 * Spec: docs/spec/plan.md §2, §3.
 */
package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.DeadlinePassed
import dev.muster.device.Examples
import dev.muster.device.NonFiniteReport
import dev.muster.device.PlanRefused
import java.util.IdentityHashMap

private const val CARRY = "carry"
private const val NEXT = "next"
private const val KEPT = "kept"
private const val METRICS = "metrics"

/**
 * The unweighted [values] (V) of a report, its [weight], the number of local [examples], and the steps in all.
 *
 * [kept]: what the device keeps from then on, by name; empty for most plans.
 */
internal class TrainingResult(
    val values: FloatArray,
    val weight: Double,
    val examples: Int,
    val steps: Int,
    val kept: Map<String, FloatArray>,
)

/**
 * The work of one assignment: a plan, its loaded graphs by name, and their inputs; at least one example.
 *
 * [kept]: the vectors of `plan.kept`; null before the first round, where a graph makes them. [keepGoing]: asked before every call
 * of a graph of steps; what it throws ends the work, and so does false, with [DeadlinePassed]. [ran] hears how many steps a call ran.
 */
internal data class Work(
    val plan: Plan,
    val graphs: Map<String, Graph>,
    val broadcast: Map<String, FloatArray>,
    val frozen: Map<String, Column>,
    val kept: Map<String, FloatArray>?,
    val examples: Examples,
    val key: StreamKey,
    val ran: (Int) -> Unit = {},
    val keepGoing: () -> Boolean,
)

/**
 * The end of a pass: its last carry, which whoever has it frees, its metric sums and those of its first step, its steps, and the
 * steps before a non-finite sum.
 */
internal class Swept(
    val carry: Map<String, Tensor>,
    val metrics: FloatArray,
    val first: FloatArray,
    val steps: Int,
    val finite: Int,
)

/**
 * Run every pass of the plan and make the report. A graph is freed after its use, before the next pass needs memory.
 *
 * Throws [PlanRefused] when the plan contradicts itself or its graphs, [dev.muster.device.RuntimeFailed] when a graph fails,
 * [DeadlinePassed], and [NonFiniteReport], which says where it began.
 */
internal fun execute(work: Work): TrainingResult {
    checkSums(work.plan)
    val known = HashMap(edgeOf(work.broadcast, work.frozen))
    try {
        if (work.plan.kept.isNotEmpty()) known += prefixed(KEPT, beforeRound(work, known))
        val passes = work.plan.passes.mapIndexed { index, pass -> finished(work, known, pass, index) }
        val means = work.plan.report.segments.filter { it.isMean }.map { VectorSpec(it.name, it.size) }
        val outputs = made(work, REPORT, "", means, known)
        val next = if (work.plan.kept.isEmpty()) emptyMap() else made(work, NEXT_KEPT, "$NEXT.", work.plan.kept, known)
        return resultOf(work, passes, outputs, next)
    } finally {
        letGoOf(known.values)
    }
}

/** Vectors of a broadcast and frozen ones, as tensors under their names at the edge of a graph. */
internal fun edgeOf(broadcast: Map<String, FloatArray>, frozen: Map<String, Column>): Map<String, Tensor> =
    prefixed("broadcast", broadcast.mapValues { flatTensor(it.value) }) + prefixed("frozen", frozen.mapValues { flatTensor(it.value) })

/** What the device keeps before this round: as given, or as the graph for the first round makes it. */
private fun beforeRound(work: Work, known: Map<String, Tensor>): Map<String, Tensor> {
    val vectors = work.kept ?: made(work, FIRST_KEPT, "$NEXT.", work.plan.kept, known)
    work.graphs[FIRST_KEPT]?.close()
    return vectors.mapValues { flatTensor(it.value) }
}

/** The vectors that a graph makes, whose outputs have these names behind a prefix. */
private fun made(work: Work, name: String, prefix: String, specs: List<VectorSpec>, known: Map<String, Tensor>): Map<String, FloatArray> {
    val outputs = specs.associate { it.name to Tensor(DType.FLOAT32, listOf(it.size)) }
    try {
        graphOf(work, name).use { it.run(known, outputs.mapKeys { (output, _) -> prefix + output }) }
        return outputs.mapValues { it.value.floats() }
    } finally {
        letGoOf(outputs.values)
    }
}

/** Run a pass, add its last carry to what is known, and free its graphs. */
private fun finished(work: Work, known: MutableMap<String, Tensor>, pass: PassPlan, index: Int): Swept {
    val swept = sweep(work, known, pass, index)
    known += prefixed("${pass.name}.$CARRY", swept.carry)
    for (name in listOf("${pass.name}.begin", loopGraph(work.graphs.keys, pass.name))) graphOf(work, name).close()
    return swept
}

private fun resultOf(work: Work, passes: List<Swept>, means: Map<String, FloatArray>, kept: Map<String, FloatArray>): TrainingResult {
    val layout = work.plan.report
    val parts = HashMap(encodeMeans(layout, means, RoundKey(work.key.seed, work.key.round)))
    work.plan.passes.zip(passes) { pass, swept -> parts[metricsSegment(pass.name)] = swept.metrics }
    if (layout.segments.any(::countsLosses)) parts[LOSSES] = countLosses(passes.first().first, passes.last().metrics)
    val weight = weightOf(layout, work.examples.count)
    val clip = if (layout.bounded) work.broadcast.getValue(CLIP)[0].toDouble() else Double.POSITIVE_INFINITY
    try {
        val values = concatenate(layout, parts, weight, clip)
        if (!kept.values.all { vector -> vector.all { it.isFinite() } }) throw NonFiniteReport("the vectors to keep are not finite")
        return TrainingResult(values, weight, work.examples.count, passes.sumOf { it.steps }, kept)
    } catch (error: NonFiniteReport) {
        throw NonFiniteReport("${error.message}: ${cause(passes)}")
    }
}

/** Run all steps of a pass. */
internal fun sweep(work: Work, known: Map<String, Tensor>, pass: PassPlan, index: Int): Swept =
    Sweep(work, known, pass, index).use(Sweep::run)

/** One pass over the examples. The carry lives in two sets of tensors, read and written in turns: no graph writes what it reads. */
private class Sweep(
    private val work: Work,
    private val known: Map<String, Tensor>,
    private val pass: PassPlan,
    private val index: Int,
) : AutoCloseable {
    private val graph = graphOf(work, loopGraph(work.graphs.keys, pass.name))
    private val isMany = stepsGraph(pass.name) in work.graphs
    private val most = if (isMany) stepsOfACall(work.plan, pass) else 1
    private var now = emptyCarry()
    private var after = emptyCarry()
    private val calls = HashMap<Int, Steps>()
    private val totals = DoubleArray(pass.metrics.size)
    private var first = FloatArray(totals.size)
    private var steps = 0
    private var finite = 0

    private fun emptyCarry() = pass.carry.associate { it.name to Tensor(DType.FLOAT32, listOf(it.size)) }

    fun run(): Swept {
        graphOf(work, "${pass.name}.begin").run(known, prefixed(NEXT, now))
        for (batches in batches(pass.loop, work.examples.count, work.key, index, most)) call(batches)
        val carry = now
        now = emptyMap()
        return Swept(carry, FloatArray(totals.size) { totals[it].toFloat() }, first, steps, finite)
    }

    private fun call(batches: Batches) {
        if (!work.keepGoing()) {
            throw DeadlinePassed("stopped in pass ${pass.name} after $steps steps: the report would come too late")
        }
        val count = batches.mask.size / pass.loop.batchSize
        val call = calls[count] ?: stepsOf(count)
        call.fill(batches, if (pass.noise) drawn(count) else null)
        call.run(now, after)
        add(call.metrics, count)
        steps += count
        work.ran(count)
        now = after.also { after = now }
    }

    private fun stepsOf(count: Int): Steps {
        if (calls.size == CALLS_HELD) letGo()
        val lead = if (isMany) listOf(count) else emptyList()
        return Steps(work, graph, pass, lead, known).also { calls[count] = it }
    }

    /** The noise of the next steps. */
    private fun drawn(count: Int): IntArray {
        val size = pass.loop.batchSize
        val values = IntArray(count * size)
        for (step in 0 until count) noise(work.key, index, steps + step, size).copyInto(values, step * size)
        return values
    }

    /** Add the sums of each step, one by one, for any steps in a call. */
    private fun add(metrics: Tensor, count: Int) {
        val isFiniteSoFar = finite == steps
        for (step in 0 until count) {
            var isFinite = true
            for (place in totals.indices) {
                val value = metrics.float(step * totals.size + place)
                totals[place] += value
                isFinite = isFinite && value.isFinite()
                if (steps + step == 0) first[place] = value
            }
            if (isFiniteSoFar && isFinite && finite == steps + step) finite++
        }
    }

    private fun letGo() {
        calls.values.forEach(Steps::close)
        calls.clear()
    }

    override fun close() {
        letGo()
        letGoOf(now.values + after.values)
    }
}

/** The most steps of one call. */
private fun stepsOfACall(plan: Plan, pass: PassPlan): Int =
    (MOST_CALL_BYTES / (pass.loop.batchSize * exampleBytes(plan))).toInt().coerceIn(1, MOST_STEPS)

/** Calls of so many steps: their tensors, filled again and again. lead: the axis of steps, of a graph that has one. */
private class Steps(work: Work, private val graph: Graph, pass: PassPlan, lead: List<Int>, private val known: Map<String, Tensor>) :
    AutoCloseable {
    private val batch = lead + pass.loop.batchSize
    private val columns = work.plan.examples.fields.associateWith { work.examples.columns.getValue(it.name) }
    private val fields = columns.keys.associateWith { Tensor(it.dtype, batch + it.shape) }
    private val mask = Tensor(DType.FLOAT32, batch)
    private val noise = Tensor(DType.INT32, batch)
    private val fed = fields.mapKeys { "example.${it.key.name}" } + mapOf("mask" to mask, "noise" to noise)
    private val bound = IdentityHashMap<Any, Call>(2)

    /** The sums of each step. */
    val metrics = Tensor(DType.FLOAT32, lead + pass.metrics.size)

    fun fill(batches: Batches, drawn: IntArray?) {
        for ((field, tensor) in fields) tensor.writeRows(columns.getValue(field), field.width, batches.indices)
        mask.write(batches.mask)
        if (drawn != null) noise.write(drawn)
    }

    /** Run the steps from one carry to another. */
    fun run(from: Map<String, Tensor>, to: Map<String, Tensor>) {
        val call = bound.getOrPut(from) { graph.bind(known + fed + prefixed(CARRY, from), prefixed(NEXT, to) + (METRICS to metrics)) }
        call.run()
    }

    override fun close() = letGoOf(fed.values + metrics)
}

private fun graphOf(work: Work, name: String): Graph =
    work.graphs[name] ?: throw PlanRefused("plan ${work.plan.name} has no graph $name")

/** The reason for a report that is not finite. */
private fun cause(passes: List<Swept>): String {
    val steps = passes.sumOf { it.steps }
    val whole = passes.takeWhile { it.finite == it.steps }
    val finite = whole.sumOf { it.steps } + (passes.getOrNull(whole.size)?.finite ?: 0)
    return when {
        finite == 0 -> "the loss was not finite in the first step, before any training here, though the examples are"
        finite == 1 && steps > 1 -> "after one step the loss was not finite: the gradient is not, or the learning rate is far too large"
        finite < steps -> "the loss left the finite numbers in later steps: training diverged, a lower client_lr is the remedy"
        else -> "every loss was finite: the last gradient is not, or training diverged in the last step"
    }
}

/** Refuse a plan whose report cannot be filled from its passes. */
private fun checkSums(plan: Plan) {
    if (plan.examples.fields.isEmpty()) throw PlanRefused("plan ${plan.name} names no example field, so there is nothing to count")
    if (plan.report.bounded && VectorSpec(CLIP, 1) !in plan.broadcast) {
        throw PlanRefused("plan ${plan.name} bounds the report, and its broadcast has no $CLIP: the bound")
    }
    val sums = plan.passes.associate { metricsSegment(it.name) to it.metrics.size }.toMutableMap()
    val isMeasured = plan.passes.isNotEmpty() && plan.passes.all { it.metrics.size >= 2 }
    if (isMeasured && plan.report.segments.any(::countsLosses)) sums[LOSSES] = LOSSES_SIZE
    for (segment in unweighted(plan.report)) {
        if (!segment.isMean && sums[segment.name] != segment.size) {
            throw PlanRefused("plan ${plan.name} wants ${segment.size} sums in segment ${segment.name}, which no pass makes")
        }
    }
}
