/**
 * The check of an ONNX graph before ONNX Runtime sees its bytes. The rules: docs/spec/plan.md §2.1.
 *
 * A graph is untrusted data, and ONNX Runtime runs far more than a plan needs: endless loops, operators of other domains,
 * tensors in files. So this file walks the protobuf bytes along a table of all fields that a plan's graph may have. No message of
 * the table contains itself, so the table bounds the depth.
 */
package dev.muster.device.plans

import dev.muster.device.FormatException
import dev.muster.device.PlanRefused
import dev.muster.device.text

private const val OPSET = 18L

/** The operators that a plan may use, all of ONNX's own domain, except the loop. */
private val OPERATORS =
    """
    Abs Acos Add And Asin Atan Cast Ceil Clip Concat Conv ConvTranspose Cos CumSum Div Equal Erf Exp Expand Floor Gather
    GatherElements Gemm Greater GreaterOrEqual Identity Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Min Mod Mul Neg Not Or
    Pad Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Round ScatterElements ScatterND Shape Sigmoid
    Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Unsqueeze Where
    """.trim().split(Regex("\\s+")).toSet()

/**
 * A loop must end: the last value that it scans is a vector whose bytes are in the graph, or the mask, which the device makes.
 * Its body is a graph of nodes.
 */
private const val LOOP = "Scan"
private const val BOUND = "mask"

/** A loop scans only the first axis: the plan itself chooses the other axes of a batch. */
private const val AXES = "scan_input_axes"

/** How many of a loop's inputs, the last ones, it goes over. More than there are would end the process in ONNX's own code. */
private const val SCANNED = "num_scan_inputs"

/** Operators that divide. Of integers, 0 and −1 as divisors may end the process, and an app runs predict graphs in its own. */
private val DIVIDING = setOf("Div", "Mod")

/** By element type, the bytes of an integer. */
private val INTEGER_BYTES = mapOf(2L to 1, 6L to 4, 7L to 8)
private val FLOATS = setOf(1L, 11L)

/** Element types by ONNX's numbers: float32, uint8, int32, int64, bool, float64. */
private val ELEMENTS = setOf(1L, 2L, 6L, 7L, 9L, 11L)
private const val MOST_NODES = 100_000
private const val MOST_FIELDS = 3_000_000
private const val MOST_SHOWN = 100

// Wire types of protobuf.
private const val VARINT = 0
private const val FIXED64 = 1
private const val LENGTH = 2
private const val FIXED32 = 5

/** What a field holds: a number, an element type, a text, bytes or a list of numbers; or a message of the kind of that name. */
private class Content(val field: String, val kind: String)

private fun fields(vararg all: Pair<Int, String>): Map<Int, Content> =
    all.associate { (number, named) -> number to Content(named.substringBefore(':'), named.substringAfter(':')) }

private val GRAPH =
    fields(
        1 to "node:node", 2 to "name:text", 5 to "initializer:tensor", 11 to "input:graph's input", 12 to "output:value",
        13 to "value_info:value",
    )
private val NODE =
    fields(
        1 to "input:text", 2 to "output:text", 3 to "name:text", 4 to "op_type:text", 5 to "attribute:attribute", 7 to "domain:text",
    )
private val ATTRIBUTE =
    fields(1 to "name:text", 2 to "f:number", 3 to "i:number", 4 to "s:text", 7 to "floats:bytes", 8 to "ints:bytes", 20 to "type:number")
private val VALUE = fields(1 to "name:text", 2 to "type:type")
private val TENSOR =
    fields(
        1 to "dims:bytes", 2 to "data_type:element", 4 to "float_data:bytes", 5 to "int32_data:bytes", 7 to "int64_data:bytes",
        8 to "name:text", 9 to "raw_data:bytes", 10 to "double_data:bytes",
    )
private val FIELDS =
    mapOf(
        "model" to
            fields(
                1 to "ir_version:number", 2 to "producer_name:text", 3 to "producer_version:text", 7 to "graph:graph",
                8 to "opset_import:opset",
            ),
        "opset" to fields(1 to "domain:text", 2 to "version:number"),
        "graph" to GRAPH,
        "node" to NODE,
        "attribute" to ATTRIBUTE + fields(6 to "g:body"),
        "body" to fields(1 to "node:body's node", 2 to "name:text", 11 to "input:value", 12 to "output:value"),
        "body's node" to NODE + fields(5 to "attribute:body's attribute"),
        "body's attribute" to ATTRIBUTE,
        "tensor" to TENSOR,
        "graph's input" to VALUE,
        "value" to VALUE,
        "type" to fields(1 to "tensor_type:tensor type"),
        "tensor type" to fields(1 to "elem_type:element", 2 to "shape:shape"),
        "shape" to fields(1 to "dim:dimension"),
        "dimension" to fields(1 to "dim_value:number", 2 to "dim_param:text"),
    )
private val NODES = setOf("node", "body's node")

/** The fields of messages that give names to values. */
private val NAMES = mapOf("node" to "output", "tensor" to "name", "graph's input" to "name", "value" to "name")
private val ALL_NAMES = NAMES + ("body's node" to "output")

/** The fields of a tensor that divides: its values are nowhere else than in raw_data. */
private val PLAIN_TENSOR = setOf("dims", "name", "data_type", "raw_data")

/** Throws [PlanRefused], naming the graph `name`, unless its bytes are an ONNX model that a plan may contain. */
internal fun checkGraph(graph: ByteArray, name: String) {
    try {
        Walk(graph, name.endsWith(stepsGraph("")), name == PREDICT).run {
            message("model", 0, graph.size)
            check()
        }
    } catch (error: Unfit) {
        throw PlanRefused("cannot load graph $name: ${error.message}")
    }
}

/** The reason to refuse a graph. */
private class Unfit(message: String) : Exception(message)

/** A field in the bytes: its wire type, and where its content begins and ends. */
private class Place(val number: Long, val wire: Int, val start: Int, val stop: Int)

/** Names of values under a rule: those that must be good, those of good values, and those of others. */
private class Names {
    val must = HashSet<String>()
    private val good = HashSet<String>()
    private val bad = HashSet<String>()

    fun add(name: String, isGood: Boolean) {
        (if (isGood) good else bad) += name
    }

    /** Throws [Unfit], saying why, unless those that must be are names of good values alone. */
    fun check(why: String) {
        if (must.any { it !in good || it in bad }) throw Unfit(why)
    }
}

/**
 * One walk over the bytes of a model.
 *
 * isMany: whether the model takes many steps, so that a loop may scan the mask. predicts: whether it is a predict graph, which may
 * not divide by data.
 */
private class Walk(private val data: ByteArray, private val isMany: Boolean, private val predicts: Boolean) {
    private var nodes = 0
    private var fields = 0
    private var opsets = 0
    private var versions = 0

    /** The number of inputs that the node now read goes over, as its attributes say. */
    private var scanned = 0L

    /** The offset after the number that was read last. */
    private var behind = 0

    /** The last value that each loop scans must be one that bounds a loop. */
    private val loops = Names()

    /** A divisor must be a constant by which a graph may divide. */
    private val divisors = Names()

    /**
     * Throws [Unfit] unless the model names one operator set, with its version, its loops end, and its divisors are safe.
     *
     * All values that a loop scans have equally many rows.
     */
    fun check() {
        if (opsets != 1 || versions != 1) throw Unfit("it must import one opset with one version, not $opsets with $versions")
        loops.check(
            "the turns of a $LOOP have no bound: its last input must be the mask of a graph of many steps, or an initializer of one " +
                "dimension with its values in raw_data, and have a name of its own",
        )
        divisors.check(
            "it divides by data: a predict graph may divide by an initializer with its values in raw_data, none of them the integers " +
                "0 and -1, and multiply by a Reciprocal",
        )
    }

    /** Check the message between two offsets. */
    fun message(kind: String, begin: Int, end: Int) {
        if (kind in NODES) nodes++
        if (kind == "opset") opsets++
        if (nodes > MOST_NODES) throw Unfit("it has more than $MOST_NODES nodes")
        val places = HashMap<String, MutableList<Place>>()
        var at = begin
        while (at < end) {
            val place = field(at, end)
            val content = FIELDS.getValue(kind)[place.number.toInt()]?.takeIf { place.number <= Int.MAX_VALUE }
                ?: throw Unfit("its $kind has a field ${place.number} that a plan's graph does not have")
            places.getOrPut(content.field, ::ArrayList) += place
            value(kind, content, place)
            at = place.stop
        }
        note(kind, places)
    }

    private fun value(kind: String, content: Content, place: Place) {
        when (content.kind) {
            "bytes" -> Unit
            "text" -> text(kind, content.field, place)
            "number" -> if (kind == "opset") version(place)
            "element" -> {
                val number = if (place.wire == VARINT) varint(place.start, place.stop) else -1
                if (number !in ELEMENTS) throw Unfit("$kind.${content.field} is $number, which is no type of a plan's tensors")
            }
            else -> {
                if (place.wire != LENGTH) throw Unfit("${content.field} of its $kind is no message")
                message(content.kind, place.start, place.stop)
            }
        }
    }

    private fun version(place: Place) {
        val number = if (place.wire == VARINT) varint(place.start, place.stop) else -1
        if (number != OPSET) throw Unfit("it is of opset $number, a plan's graphs are of opset $OPSET")
        versions++
    }

    private fun text(kind: String, field: String, place: Place) {
        val found = if (place.wire == LENGTH) textAt(place) else null
        val shown = found?.take(MOST_SHOWN)
        val isOperator = field == "op_type" && kind in NODES
        when {
            found == null -> throw Unfit("$kind.$field is not text in UTF-8")
            isOperator && found !in OPERATORS && !(found == LOOP && kind == "node") ->
                throw Unfit("operator $shown is none that a plan may use")
            kind == "attribute" && field == "name" && found == AXES -> throw Unfit("a $LOOP goes over another axis than the first")
            field == "domain" && found.isNotEmpty() -> throw Unfit("$kind.domain is $shown, a plan's operators are ONNX's own")
        }
    }

    private fun textAt(place: Place): String? =
        try {
            text(data.copyOfRange(place.start, place.stop))
        } catch (_: FormatException) {
            null
        }

    /** Record the names that a message gives to values. */
    private fun note(kind: String, places: Map<String, List<Place>>) {
        fun texts(field: String?) = places[field].orEmpty().map { textAt(it)!! }
        if (kind == "attribute" && SCANNED in texts("name")) scanned = maxOf(scanned, greatest(places["i"].orEmpty()))
        if (kind == "node") {
            if (texts("op_type").lastOrNull() == LOOP) noteLoop(texts("input"))
            scanned = 0
        }
        val isVector = kind == "tensor" && isVector(places)
        for (name in texts(NAMES[kind])) loops.add(name, isVector || (isMany && kind == "graph's input" && name == BOUND))
        if (!predicts) return
        if (texts("op_type").any { it in DIVIDING }) divisors.must += texts("input").getOrNull(1).orEmpty()
        val divides = kind == "tensor" && divides(places)
        for (name in texts(ALL_NAMES[kind])) divisors.add(name, divides)
    }

    private fun greatest(numbers: List<Place>): Long =
        numbers.maxOfOrNull { (if (it.wire == VARINT) varint(it.start, it.stop) else -1) and Long.MAX_VALUE } ?: 0

    private fun noteLoop(inputs: List<String>) {
        if (scanned > inputs.size) throw Unfit("a $LOOP goes over $scanned inputs, and has ${inputs.size}")
        loops.must += inputs.lastOrNull().orEmpty()
    }

    /** Whether a tensor is of floats, or of integers other than 0 and −1. */
    private fun divides(places: Map<String, List<Place>>): Boolean {
        val type = places["data_type"]?.singleOrNull() ?: return false
        val raw = places["raw_data"]?.singleOrNull()?.takeIf { it.wire == LENGTH } ?: return false
        if (!PLAIN_TENSOR.containsAll(places.keys)) return false
        val number = varint(type.start, type.stop)
        val size = INTEGER_BYTES[number] ?: return number in FLOATS
        if ((raw.stop - raw.start) % size != 0) return false
        return (raw.start until raw.stop step size).none { at ->
            val bytes = (at until at + size).map { data[it].toInt() }
            bytes.all { it == 0 } || (size > 1 && bytes.all { it == -1 })
        }
    }

    /** Whether a tensor has one dimension, and no more elements than bytes in the graph. */
    private fun isVector(places: Map<String, List<Place>>): Boolean {
        val dims = places["dims"]?.singleOrNull()?.takeIf { it.wire == VARINT } ?: return false
        val raw = places["raw_data"]?.lastOrNull() ?: return false
        return varint(dims.start, dims.stop) <= raw.stop - raw.start
    }

    private fun field(at: Int, end: Int): Place {
        if (++fields > MOST_FIELDS) throw Unfit("it has more than $MOST_FIELDS fields")
        val tag = varint(at, end)
        val wire = (tag and 7).toInt()
        val start = behind
        val size =
            when (wire) {
                VARINT -> varint(start, end).let { (behind - start).toLong() }
                LENGTH -> varint(start, end)
                FIXED64 -> Long.SIZE_BYTES.toLong()
                FIXED32 -> Int.SIZE_BYTES.toLong()
                else -> throw Unfit("there is no wire type $wire")
            }
        val begin = if (wire == LENGTH) behind else start
        if (size > end - begin) throw Unfit("a field ends behind its message")
        return Place(tag ushr 3, wire, begin, begin + size.toInt())
    }

    /** The number at an offset, at most 2⁶³ − 1. */
    private fun varint(at: Int, end: Int): Long {
        var value = 0L
        for (place in at until minOf(at + 10, end)) {
            val byte = data[place].toLong()
            val bits = byte and 0x7f
            val shift = 7 * (place - at)
            value = if (bits shl shift ushr shift == bits) value or (bits shl shift) else Long.MAX_VALUE
            if (byte >= 0) {
                behind = place + 1
                return if (value < 0) Long.MAX_VALUE else value
            }
        }
        throw Unfit("a number does not end")
    }
}
