/**
 * Personal models: a plan's own local steps from a released model, measured on examples that they leave out.
 *
 * A plan that trains has no graph that only measures, but each step tells the loss of its batch at the parameters that it starts
 * from. So one step from given parameters measures them, and what it makes of them is dropped.
 */
package dev.muster.device.models

import dev.muster.device.Examples
import dev.muster.device.ExamplesException
import dev.muster.device.NonFiniteReport
import dev.muster.device.PlanRefused
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.HoldOut
import dev.muster.device.plans.Loop
import dev.muster.device.plans.PassPlan
import dev.muster.device.plans.Plan
import dev.muster.device.plans.StreamKey
import dev.muster.device.plans.Tensor
import dev.muster.device.plans.VectorSpec
import dev.muster.device.plans.Work
import dev.muster.device.plans.checkExamples
import dev.muster.device.plans.decodeVectors
import dev.muster.device.plans.edgeOf
import dev.muster.device.plans.frozenOf
import dev.muster.device.plans.letGoOf
import dev.muster.device.plans.loopGraph
import dev.muster.device.plans.only
import dev.muster.device.plans.places
import dev.muster.device.plans.runGraphs
import dev.muster.device.plans.sweep
import dev.muster.device.plans.withGraphs
import dev.muster.device.protocol.Visit
import dev.muster.device.texts.tokenized
import dev.muster.device.wire.ModelRelease
import kotlin.math.max
import kotlin.math.min
import kotlin.math.sqrt

/** The share of examples that are left out, where the plan holds out no larger one. */
private const val SHARE = 0.2

/** The fewest examples to train on, and to measure on. */
private const val LEAST = 10

/** Into how many groups the examples to measure on are divided, unless there are fewer, or a batch holds less. */
private const val PAIRS = 32

/** How many of its own standard errors the mean gain must exceed: chance alone does so 4 times in 100 at most. */
private const val CERTAIN = 2
private const val PARAMS = "params"

/**
 * The personal parameters, and the mean losses of all examples left out, at the released and at the personal ones.
 *
 * isBetter: whether the mean of the differences, of groups of examples, is above 0 by enough of its standard errors.
 */
internal class Measured(
    val params: FloatArray,
    val before: Double,
    val after: Double,
    val steps: Int,
    val examples: Int,
    val leftOut: Int,
    val isBetter: Boolean,
)

/** What a training needs. mine: a blob of the version. keep: notes graphs that stay. keepGoing: asked between steps. */
internal class Means(
    val visit: Visit,
    val mine: (BlobRef) -> ByteArray,
    val keep: (Collection<BlobRef>) -> Unit,
    val keepGoing: () -> Boolean,
)

/** The local steps of a version's plan, measured. Throws as `execute`, and [ExamplesException] when examples are too few. */
internal fun trained(release: ModelRelease, plan: Plan, means: Means): Measured {
    val visit = means.visit
    val refs = localGraphs(plan)
    val source = visit.platform.examples
    val count = source.counts()[plan.examples.collection] ?: 0
    visit.guard.checkPlan(release.plan, release.parameters, plan, count)
    val all = tokenized(plan, source.load(plan.examples.collection), means.mine, means.keepGoing).examples
    checkExamples(plan, all)
    val (train, leftOut) = divided(plan, all)
    val released = decodeVectors(means.mine(release.parameters), listOf(VectorSpec(PARAMS, plan.parameters)))
    val frozen = frozenOf(plan, means.mine)
    return withGraphs(refs, visit::blob, visit.transport.stopping) { graphs ->
        means.keep(refs.values)
        // The order of examples is always the same, so that nobody tries until chance says that a training helps.
        val work = Work(plan, graphs, released, frozen, null, train, StreamKey(0, 0, 0), keepGoing = means.keepGoing)
        Personalising(work, leftOut).measured()
    }
}

/** The graphs that local steps need, by name. Throws [PlanRefused] where there is no local model, or not this format. */
private fun localGraphs(plan: Plan): Map<String, BlobRef> {
    val name = plan.passes[localPass(plan)].name
    val graphs = runGraphs(plan)
    return listOf("$name.begin", loopGraph(graphs.keys, name)).associateWith(graphs::getValue)
}

/** The index of the pass whose last carry `params` is a local model. Throws [PlanRefused] when there is none. */
private fun localPass(plan: Plan): Int {
    if (plan.trips > 1) {
        throw PlanRefused(
            "plan ${plan.name} has two trips, and the steps of the second need what devices sent in the first: only models of " +
                "plans with one trip become personal",
        )
    }
    val index = plan.passes.indexOfFirst { VectorSpec(PARAMS, plan.parameters) in it.carry }
    if (index < 0) {
        throw PlanRefused("no pass of plan ${plan.name} makes a local model: none of ${plan.passes.map { it.name }} carries $PARAMS")
    }
    val pass = plan.passes[index]
    if ("loss" !in pass.metrics || "examples" !in pass.metrics) {
        throw PlanRefused("pass ${pass.name} of plan ${plan.name} measures ${pass.metrics}, no loss")
    }
    return index
}

/**
 * The examples to train on, and those to measure on, by the hash that holds out examples; they must fit the plan.
 *
 * What the plan holds out is among the latter. Throws [ExamplesException] when either are too few.
 */
private fun divided(plan: Plan, all: Examples): Pair<Examples, Examples> {
    val share = max(SHARE, plan.examples.holdOut?.share ?: 0.0)
    val kept = places(plan.examples, HoldOut(share, isHeldOut = false), all)
    val rest = places(plan.examples, HoldOut(share, isHeldOut = true), all)
    if (min(kept.size, rest.size) < LEAST) {
        throw ExamplesException.tooFew(
            "of ${all.count} examples of collection ${plan.examples.collection}, ${rest.size} are left out to measure on and " +
                "${kept.size} remain to train on; a personal model needs $LEAST of each",
        )
    }
    return only(plan, all, kept) to only(plan, all, rest)
}

/**
 * One training from released parameters.
 *
 * work: with `localGraphs`, the broadcast `params` alone, and the examples to train on.
 */
private class Personalising(private val work: Work, private val leftOut: Examples) {
    private val plan = work.plan
    private val index = localPass(plan)
    private val pass = plan.passes[index]
    private val groups = groups(leftOut.count, pass.loop.batchSize)

    /** Measure the released parameters, take the plan's local steps from them, and measure again. */
    fun measured(): Measured {
        val released = work.broadcast.getValue(PARAMS)
        val before =
            try {
                losses(released)
            } catch (error: PlanRefused) {
                val words = "the steps of plan ${plan.name} do not run on $PARAMS alone, which is all that a release holds"
                throw PlanRefused("$words: ${error.message}")
            }
        val (params, steps) = steps(released)
        val after = losses(params)
        if (!(before + after).all { it.isFinite() } || !params.all { it.isFinite() }) {
            throw NonFiniteReport("the loss is not finite, or training on this device's examples diverged")
        }
        val isBetter = exceeds(DoubleArray(before.size) { before[it] - after[it] })
        return Measured(params, mean(before), mean(after), steps, work.examples.count, leftOut.count, isBetter)
    }

    /** What the steps of the pass make of parameters, and the number of steps. */
    private fun steps(params: FloatArray): Pair<FloatArray, Int> =
        from(params) { known ->
            val swept = sweep(work, known, pass, index)
            (swept.carry.getValue(PARAMS).floats() to swept.steps).also { letGoOf(swept.carry.values) }
        }

    /** The mean loss of each group of examples. Noise, such as dropout's, is the same for any parameters. */
    private fun losses(params: FloatArray): DoubleArray {
        val once = pass.copy(loop = Loop(pass.loop.batchSize, epochs = 1, steps = 1, shuffle = false))
        return from(params) { known ->
            DoubleArray(groups.size) { number ->
                val group = work.copy(examples = only(plan, leftOut, groups[number]), key = StreamKey(0, 0, number.toLong()))
                lossOf(group, known, once)
            }
        }
    }

    private fun lossOf(group: Work, known: Map<String, Tensor>, once: PassPlan): Double {
        val swept = sweep(group, known, once, index)
        letGoOf(swept.carry.values)
        return swept.metrics[pass.metrics.indexOf("loss")].toDouble() / swept.metrics[pass.metrics.indexOf("examples")]
    }

    private fun <T> from(params: FloatArray, run: (Map<String, Tensor>) -> T): T {
        val known = edgeOf(mapOf(PARAMS to params), work.frozen)
        try {
            return run(known)
        } finally {
            letGoOf(known.values)
        }
    }

    private fun mean(losses: DoubleArray) = losses.indices.sumOf { losses[it] * groups[it].size } / leftOut.count
}

/** The places of each group of `count` examples: all equally many, or one more, and none more than a batch. */
private fun groups(count: Int, size: Int): List<IntArray> {
    val number = max((count + size - 1) / size, min(count, PAIRS))
    val (least, more) = count / number to count % number
    return List(number) { group ->
        val start = group * least + min(group, more)
        IntArray(least + if (group < more) 1 else 0) { start + it }
    }
}

/** Whether the mean of the gains exceeds 0 by more than [CERTAIN] of its standard errors. */
private fun exceeds(gains: DoubleArray): Boolean {
    val mean = gains.average()
    val squares = gains.sumOf { (it - mean) * (it - mean) }
    return mean > CERTAIN * sqrt(squares / (gains.size - 1) / gains.size)
}
