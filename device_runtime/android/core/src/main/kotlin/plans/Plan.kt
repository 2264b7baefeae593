/**
 * A plan: the loops, graphs by digest, examples and report of a device, as data. Spec: docs/spec/plan.md.
 *
 * A plan names no algorithm, so a device runs new algorithms without new code. The names of graphs, and of their inputs and
 * outputs, are those of §2.
 */
package dev.muster.device.plans

import dev.muster.device.DType
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.PlanRefused
import dev.muster.device.hex
import dev.muster.device.sha256

private const val PLAN_VERSION = 1L

/** The format of graphs that this runtime runs. */
internal const val FORMAT = "onnx"

/** The longest plan, in bytes of JSON. */
internal const val MOST_PLAN_BYTES = 4 shl 20

/** The name of the graph that makes the mean segments of the report. */
internal const val REPORT = "report"

/** The names of the graphs that make what a device keeps: before its first round, and after each. */
internal const val FIRST_KEPT = "kept.first"
internal const val NEXT_KEPT = "kept.next"

/** The name of the graph that gives the model's outputs for examples. */
internal const val PREDICT = "predict"

/**
 * The steps of one call, if a graph takes many: enough to make the cost of the call small, and few enough to ask `keepGoing`
 * often.
 */
internal const val MOST_STEPS = 64
internal const val MOST_CALL_BYTES = 1 shl 19

/** The kinds of calls that keep their buffers: a full one, and the last of an epoch. */
internal const val CALLS_HELD = 2

private const val LONGEST_QUESTION = 4000

/** Immutable bytes, named by their SHA-256 in hex. */
internal data class BlobRef(val sha256: String, val size: Long) {
    companion object {
        fun of(json: Json): BlobRef = BlobRef(json["sha256"].digest(), json["size"].count())
    }
}

/** A flat vector of float32 values. */
internal data class VectorSpec(val name: String, val size: Int) {
    companion object {
        fun of(json: Json): VectorSpec = VectorSpec(json["name"].text(), json["size"].size())
    }
}

/** A vector that no round changes, of float32 or uint8: codes of weights in few bits. */
internal data class FrozenVector(val name: String, val size: Int, val dtype: DType) {
    companion object {
        fun of(json: Json): FrozenVector {
            val dtype = json.optional("dtype")?.let { DType.of(it) } ?: DType.FLOAT32
            if (dtype != DType.FLOAT32 && dtype != DType.UINT8) json["dtype"].wrong("float32 or uint8")
            return FrozenVector(json["name"].text(), json["size"].size(), dtype)
        }
    }
}

/** The vectors that no round changes, and the blob that holds them. */
internal class Frozen(val blob: BlobRef, val vectors: List<FrozenVector>) {
    companion object {
        fun of(json: Json): Frozen = Frozen(BlobRef.of(json["blob"]), json["vectors"].list(FrozenVector::of))
    }
}

/** The sweeps of a pass over the examples. [steps] limits the steps of all epochs together. */
internal data class Loop(val batchSize: Int, val epochs: Int = 1, val steps: Int? = null, val shuffle: Boolean = true) {
    companion object {
        fun of(json: Json): Loop =
            Loop(
                json["batch_size"].size(1),
                json.optional("epochs")?.size(1) ?: 1,
                json.nullable("steps")?.size(1),
                json.optional("shuffle")?.flag() ?: true,
            )
    }
}

/** One pass. [metrics] names the sums of each step; [noise] says that its steps read random integers. */
internal data class PassPlan(
    val name: String,
    val loop: Loop,
    val carry: List<VectorSpec>,
    val metrics: List<String>,
    val noise: Boolean = false,
) {
    companion object {
        fun of(json: Json): PassPlan =
            PassPlan(
                json["name"].text(),
                Loop.of(json["loop"]),
                json["carry"].list(VectorSpec::of),
                json["metrics"].list(Json::text),
                json.optional("noise")?.flag() ?: false,
            )
    }
}

/** How texts become tokens. [padding] fills short ones; [trial] has texts with the tokens that a device must make of them. */
internal class TokenizerPlan(val blob: BlobRef, val padding: Int, val trial: List<Pair<String, List<Int>>>) {
    companion object {
        fun of(json: Json): TokenizerPlan =
            TokenizerPlan(
                BlobRef.of(json["blob"]),
                json.optional("padding")?.size() ?: 0,
                json.optional("trial")?.list(::tried) ?: emptyList(),
            )

        private fun tried(json: Json): Pair<String, List<Int>> {
            val parts = json.list { it }
            if (parts.size != 2) json.wrong("a text and its tokens")
            return parts[0].text() to parts[1].list { it.size() }
        }
    }
}

/**
 * One array of an example, of that shape. [high] bounds integers to 0 … high − 1; [ignored] is a label that does not count.
 *
 * [tokenizer]: of an int32 field (T) that a device may hold as text instead.
 */
internal data class Field(
    val name: String,
    val dtype: DType,
    val shape: List<Int> = emptyList(),
    val high: Long? = null,
    val tokenizer: TokenizerPlan? = null,
    val ignored: Long? = null,
) {
    /** Values of one example. */
    val width: Int = product(shape)

    init {
        val isLabel = (dtype == DType.INT32 || dtype == DType.INT64) && high != null
        if (ignored != null && !isLabel) {
            throw FormatException("field $name ignores $ignored: it must be int32 or int64, and have a high")
        }
        if (tokenizer != null) checkText(tokenizer)
    }

    private fun checkText(tokenizer: TokenizerPlan) {
        if (dtype != DType.INT32 || shape.size != 1 || shape[0] == 0 || high == null) {
            throw FormatException(
                "field $name has a tokenizer and is ${dtype.text}$shape; tokens are int32[length], with the size of the vocabulary " +
                    "as high",
            )
        }
        if (tokenizer.padding >= high) {
            throw FormatException("field $name is padded with ${tokenizer.padding}; tokens are below $high, its high")
        }
    }

    companion object {
        fun of(json: Json): Field =
            Field(
                json["name"].text(),
                DType.of(json["dtype"]),
                json.optional("shape")?.list { it.size() } ?: emptyList(),
                json.nullable("high")?.whole(Long.MIN_VALUE..Long.MAX_VALUE),
                json.optional("tokenizer")?.let(TokenizerPlan::of),
                json.optional("ignored")?.whole(-(1L shl 31)..-1),
            )
    }
}

/** The share of a collection that is held out, and the side on which a plan runs. */
internal data class HoldOut(val share: Double, val isHeldOut: Boolean) {
    companion object {
        fun of(json: Json): HoldOut {
            val share = json["share"].number()
            if (share <= 0 || share >= 1) json["share"].wrong("a number above 0 and below 1")
            val side = json.optional("side")
            return HoldOut(share, side?.text(Regex("train|held-out")) == "held-out")
        }
    }
}

/** The examples that a plan runs on. */
internal data class ExamplesPlan(val fields: List<Field>, val collection: String, val holdOut: HoldOut?) {
    companion object {
        fun of(json: Json): ExamplesPlan =
            ExamplesPlan(
                json["fields"].list(Field::of),
                json.optional("collection")?.text() ?: "default",
                json.nullable("hold_out")?.let(HoldOut::of),
            )
    }
}

/** What apps predict with. [inputs]: names of fields of the examples; [graphs]: by format. */
internal class PredictPlan(
    val inputs: List<String>,
    val outputs: List<Field>,
    val batchSize: Int,
    val graphs: Map<String, BlobRef>,
) {
    companion object {
        fun of(json: Json): PredictPlan =
            PredictPlan(
                json["inputs"].list(Json::text),
                json["outputs"].list(Field::of),
                json["batch_size"].size(1),
                json["graphs"].map(BlobRef::of),
            )
    }
}

/** One exchange with the devices of a round. [graphs]: format → graph name → blob. */
private class TripPlan(
    val broadcast: List<VectorSpec>,
    val passes: List<PassPlan>,
    val report: ReportLayout,
    val graphs: Map<String, Map<String, BlobRef>>,
) {
    /** Throws [FormatException] unless every format has exactly the graphs of the passes. */
    fun check(keeps: Boolean) {
        for ((format, found) in graphs) {
            val wanted = passes.flatMap { listOf("${it.name}.begin", loopGraph(found.keys, it.name)) } + REPORT
            val all = (if (keeps) wanted + FIRST_KEPT + NEXT_KEPT else wanted).toSortedSet()
            if (found.keys != all) throw FormatException("format $format has graphs ${found.keys.sorted()}, the passes need $all")
        }
    }

    companion object {
        fun of(json: Json): TripPlan =
            TripPlan(
                json["broadcast"].list(VectorSpec::of),
                json["passes"].list(PassPlan::of),
                ReportLayout.of(json["report"]),
                json["graphs"].map { it.map(BlobRef::of) },
            )
    }
}

/**
 * A plan as one round runs it: of several [trips], it has the members of the round's trip.
 *
 * [parameters]: values of the model. [kept]: the vectors that a device keeps between rounds. [question]: what a plan that trains
 * nothing asks of the examples, in words for people.
 */
internal data class Plan(
    val name: String,
    val parameters: Int,
    val examples: ExamplesPlan,
    val broadcast: List<VectorSpec>,
    val passes: List<PassPlan>,
    val report: ReportLayout,
    val graphs: Map<String, Map<String, BlobRef>>,
    val frozen: Frozen?,
    val kept: List<VectorSpec>,
    val predict: PredictPlan?,
    val question: String?,
    val trips: Int,
)

/** The plan that round `round` runs, from 1. Throws [PlanRefused] for malformed bytes, or another version. */
internal fun decodePlan(data: ByteArray, round: Int): Plan {
    if (data.size > MOST_PLAN_BYTES) {
        throw PlanRefused("a plan of ${data.size} bytes, at most $MOST_PLAN_BYTES are read")
    }
    try {
        val json = Json.parse(data, "plan")
        val version = json["version"].count()
        if (version != PLAN_VERSION) {
            throw PlanRefused("plan of version $version, this device knows $PLAN_VERSION; update the older side")
        }
        return planOf(json, round)
    } catch (error: FormatException) {
        throw PlanRefused(error.message!!)
    }
}

private fun planOf(json: Json, round: Int): Plan {
    val kept = json.optional("kept")?.list(VectorSpec::of) ?: emptyList()
    val trips = listOfNotNull(TripPlan.of(json), json.nullable("second")?.let(TripPlan::of))
    for (trip in trips) trip.check(kept.isNotEmpty())
    val trip = trips[(round - 1) % trips.size]
    val plan =
        Plan(
            json["name"].text(),
            parametersOf(json["schema"]),
            ExamplesPlan.of(json["examples"]),
            trip.broadcast,
            trip.passes,
            trip.report,
            trip.graphs,
            json.nullable("frozen")?.let(Frozen::of),
            kept,
            json.nullable("predict")?.let(PredictPlan::of),
            json.optional("question")?.let(::asked),
            trips.size,
        )
    checkTrips(plan, trips)
    plan.predict?.let { checkPredict(plan, it) }
    return plan
}

private fun parametersOf(schema: Json): Int {
    val tensors = schema["tensors"].list { tensor -> tensor["name"].text() to product(tensor["shape"].list { it.size() }) }
    if (tensors.distinctBy { it.first }.size < tensors.size) schema["tensors"].wrong("tensors with names of their own")
    val size = tensors.sumOf { it.second.toLong() }
    return if (size <= Int.MAX_VALUE) size.toInt() else schema["tensors"].wrong("a model of at most ${Int.MAX_VALUE} values")
}

private fun asked(question: Json): String {
    val letters = question.text()
    val isShort = letters.codePointCount(0, letters.length) in 1..LONGEST_QUESTION
    return if (isShort) letters else question.wrong("1 to $LONGEST_QUESTION characters")
}

private fun checkTrips(plan: Plan, trips: List<TripPlan>) {
    val names = (trips[0].broadcast + plan.kept).map { it.name }
    if (plan.kept.isNotEmpty() && (trips.size > 1 || names.toSet().size < names.size)) {
        throw FormatException("devices receive and keep the vectors $names; that needs one trip, and a name for each vector")
    }
    if (trips.any { it.graphs.keys != plan.graphs.keys }) {
        throw FormatException("its trips have graphs in ${trips.map { it.graphs.keys }}; all need the same formats")
    }
}

private fun checkPredict(plan: Plan, predict: PredictPlan) {
    val fields = plan.examples.fields.map { it.name }
    val names = predict.outputs.map { it.name }
    val isKnown = fields.containsAll(predict.inputs) && predict.inputs.isNotEmpty()
    if (!isKnown || names.isEmpty() || names.toSet().size < names.size) {
        throw FormatException("the predict graph reads ${predict.inputs} and gives $names")
    }
    if (predict.graphs.keys != plan.graphs.keys) {
        throw FormatException("it predicts in ${predict.graphs.keys}, its other graphs are in ${plan.graphs.keys}")
    }
}

/** The name of a pass's graph of many steps, which runs any number of batches. */
internal fun stepsGraph(pass: String): String = "$pass.steps"

/** The name of the pass's loop graph that is in `graphs`: of one step, or of many. */
internal fun loopGraph(graphs: Collection<String>, pass: String): String = stepsGraph(pass).takeIf { it in graphs } ?: "$pass.step"

/** The graphs of a plan that this device runs, by name. Throws [PlanRefused] when it has none in this format. */
internal fun runGraphs(plan: Plan): Map<String, BlobRef> =
    plan.graphs[FORMAT] ?: throw PlanRefused("plan ${plan.name} has graphs in ${plan.graphs.keys}, this device runs $FORMAT")

/** The blobs that a device keeps between rounds: its graphs, frozen vectors and tokenizers. */
internal fun keptRefs(plan: Plan): List<BlobRef> =
    plan.graphs[FORMAT].orEmpty().values + listOfNotNull(plan.frozen?.blob) + plan.examples.fields.mapNotNull { it.tokenizer?.blob }

/** The bytes of a plan's largest batch, with its mask and noise, or of the calls of many steps that are held. */
internal fun batchBytes(plan: Plan): Double {
    val batch = largestBatchBytes(plan)
    val graphs = plan.graphs[FORMAT].orEmpty()
    val isMany = plan.passes.any { stepsGraph(it.name) in graphs }
    return if (isMany) CALLS_HELD * maxOf(batch, MOST_CALL_BYTES.toDouble()) else batch
}

private const val SMALL_BYTES = 1L shl 20

/** Whether parameters and a batch are so few that the graphs of a plan hold little memory. */
internal fun isSmall(plan: Plan): Boolean =
    DType.FLOAT32.bytes.toDouble() * plan.parameters + largestBatchBytes(plan) <= SMALL_BYTES

private fun largestBatchBytes(plan: Plan): Double =
    exampleBytes(plan).toDouble() * (plan.passes.maxOfOrNull { it.loop.batchSize } ?: 0)

/** The bytes of one example in a batch: its fields, its place in the mask and in the noise. */
internal fun exampleBytes(plan: Plan): Long =
    plan.examples.fields.sumOf { it.width.toLong() * it.dtype.bytes } + 2 * DType.FLOAT32.bytes

/** Whether bytes are those that a reference names, by length and digest. */
internal fun isBlob(ref: BlobRef, data: ByteArray): Boolean =
    data.size.toLong() == ref.size && hex(sha256(data)) == ref.sha256

/** The number of batches of a loop over so many examples. */
internal fun stepCount(loop: Loop, examples: Int): Int {
    val ofEpoch = (examples.toLong() + loop.batchSize - 1) / loop.batchSize
    return minOf(loop.epochs * ofEpoch, (loop.steps ?: Int.MAX_VALUE).toLong()).toInt()
}

/** The number of values of a shape. Throws [FormatException] for one that fits no array. */
internal fun product(shape: List<Int>): Int {
    var size = 1L
    for (axis in shape) {
        size *= axis
        if (size > Int.MAX_VALUE) throw FormatException("an array of shape $shape is too large")
    }
    return size.toInt()
}
