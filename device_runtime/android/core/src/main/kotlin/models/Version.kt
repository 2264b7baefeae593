/** A version of a model: what it is made of, and the same ready to predict. */
package dev.muster.device.models

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.DeviceException
import dev.muster.device.FormatException
import dev.muster.device.InputRefused
import dev.muster.device.Inputs
import dev.muster.device.ModelRefused
import dev.muster.device.Outputs
import dev.muster.device.PlanRefused
import dev.muster.device.plans.BlobRef
import dev.muster.device.plans.FORMAT
import dev.muster.device.plans.Field
import dev.muster.device.plans.FrozenVector
import dev.muster.device.plans.Graph
import dev.muster.device.plans.PREDICT
import dev.muster.device.plans.Plan
import dev.muster.device.plans.PredictPlan
import dev.muster.device.plans.Tensor
import dev.muster.device.plans.decodeFrozen
import dev.muster.device.plans.decodePlan
import dev.muster.device.plans.flatTensor
import dev.muster.device.plans.letGoOf
import dev.muster.device.plans.prefixed
import dev.muster.device.texts.Tokenizer
import dev.muster.device.texts.Work
import dev.muster.device.texts.loadedTokenizer
import dev.muster.device.texts.tokensOf
import dev.muster.device.wire.ModelRelease
import kotlin.math.sin

/** Rows of a trial. */
private const val TRIED = 3

/** Calls whose tensors are kept for later ones. */
private const val MOST_IDLE = 8

/** What a version is made of: its plan, and its blobs by kind: `graph`, `parameters`, `frozen` if any, `tokenizer.FIELD` for each. */
internal class Recipe(val plan: Plan, val predict: PredictPlan, val blobs: Map<String, BlobRef>)

/** The recipe of a release. get: a blob's bytes, checked. Throws [ModelRefused], [PlanRefused], and as `get`. */
internal fun recipeOf(release: ModelRelease, get: (BlobRef) -> ByteArray): Recipe {
    val plan = decodePlan(get(release.plan), 1)
    val predict = plan.predict
    val graph = predict?.graphs?.get(FORMAT)
    if (graph == null) {
        val forms = predict?.graphs?.keys?.joinToString() ?: "no format"
        throw ModelRefused("plan ${plan.name} predicts in $forms, this device runs $FORMAT")
    }
    val blobs = linkedMapOf("graph" to graph, "parameters" to release.parameters)
    plan.frozen?.let { blobs["frozen"] = it.blob }
    for (field in plan.examples.fields) field.tokenizer?.let { blobs["tokenizer.${field.name}"] = it.blob }
    return Recipe(plan, predict, blobs)
}

/**
 * A version that predicts, for any thread. Once it is retired, its memory is free when the last call that uses it has ended.
 *
 * Tensors of a call stay for later calls of as many rows, so that no call allocates native memory in the long run.
 */
internal class Version private constructor(
    val number: Int,
    recipe: Recipe,
    private val graph: Graph,
    private val constants: Map<String, Tensor>,
    private val tokenizers: Map<String, Tokenizer>,
) {
    private val inputs = recipe.predict.inputs.map { name -> recipe.plan.examples.fields.first { it.name == name } }
    private val outputs = recipe.predict.outputs
    private val idle = ArrayDeque<Rows>()
    private var calls = 0
    private var isRetired = false

    /**
     * The outputs for n rows, at least 1; null once this is retired. Throws [InputRefused], and [dev.muster.device.RuntimeFailed]
     * when an operator fails.
     */
    fun predict(given: Inputs): Outputs? {
        if (!begin()) return null
        try {
            val values = valuesOf(given)
            val rows = rowsFor(countOf(values))
            val found =
                try {
                    rows.run(values)
                } catch (error: Throwable) {
                    rows.close()
                    throw error
                }
            giveBack(rows)
            return Outputs(found)
        } finally {
            end()
        }
    }

    /** Predict for rows that are always the same. Throws [ModelRefused] unless outputs are finite. */
    fun tryOut() {
        val given = inputs.associate { it.name to if (it.name in tokenizers) List(TRIED) { "a" } else drawn(it) }
        val found =
            try {
                predict(given)!!
            } catch (error: DeviceException) {
                throw ModelRefused("version $number fails on trial: ${error.message}")
            }
        val wrong = found.names.find { name -> (found[name] as? FloatArray)?.all { it.isFinite() } == false }
        if (wrong != null) throw ModelRefused("version $number gives $wrong that is not finite on trial")
    }

    /** Let it go after the last call. */
    @Synchronized
    fun retire() {
        if (!isRetired && calls == 0) letGo()
        isRetired = true
    }

    @Synchronized
    private fun begin(): Boolean {
        if (!isRetired) calls++
        return !isRetired
    }

    @Synchronized
    private fun end() {
        calls--
        if (isRetired && calls == 0) letGo()
    }

    private fun letGo() {
        idle.forEach(Rows::close)
        letGoOf(constants.values)
        graph.close()
    }

    /** Tensors for so many rows. */
    private fun rowsFor(count: Int): Rows {
        synchronized(this) {
            val place = idle.indexOfLast { it.count == count }
            if (place >= 0) return idle.removeAt(place)
        }
        return Rows(count)
    }

    @Synchronized
    private fun giveBack(rows: Rows) {
        idle.addLast(rows)
        if (idle.size > MOST_IDLE) idle.removeFirst().close()
    }

    /** The tensors of a call for so many rows. */
    private inner class Rows(val count: Int) : AutoCloseable {
        private val taken = inputs.associate { it.name to Tensor(it.dtype, listOf(count) + it.shape) }
        private val made = outputs.associate { it.name to Tensor(it.dtype, listOf(count) + it.shape) }
        private val call = graph.bind(constants + prefixed("example", taken), made)

        fun run(values: Map<String, Any>): Map<String, Any> {
            for ((name, tensor) in taken) tensor.write(values.getValue(name))
            call.run()
            return made.mapValues { it.value.read() }
        }

        override fun close() = letGoOf(taken.values + made.values)
    }

    /** The values of all inputs, with texts as tokens. */
    private fun valuesOf(given: Inputs): Map<String, Any> {
        val names = inputs.map { it.name }
        if (given.keys != names.toSet()) {
            val (wanted, found) = listOf(names, given.keys).map { it.sorted().joinToString(",") }
            throw InputRefused("the model takes the inputs $wanted, not $found")
        }
        return inputs.associate { field ->
            val tokenizer = tokenizers[field.name]
            val values = given.getValue(field.name)
            field.name to if (tokenizer != null && values is List<*>) tokens(field, tokenizer, values) else values
        }
    }

    private fun tokens(field: Field, tokenizer: Tokenizer, values: List<*>): IntArray {
        val texts = values.map { it as? String ?: throw InputRefused("input ${field.name} holds ${it?.javaClass?.simpleName}, not texts") }
        try {
            return tokensOf(field, tokenizer, texts.asSequence(), texts.size, Work()).ids
        } catch (error: PlanRefused) {
            throw InputRefused(error.message!!)
        }
    }

    /** The number of rows of all inputs. */
    private fun countOf(values: Map<String, Any>): Int {
        val counts = inputs.map { rowsOf(it, values.getValue(it.name)) }
        val wrong = counts.indexOfFirst { it == 0 || it != counts[0] }
        if (wrong >= 0) {
            throw InputRefused("input ${inputs[wrong].name} holds ${counts[wrong]} rows; all must hold the same number, at least 1")
        }
        return counts[0]
    }

    companion object {
        /** The version of a release. Throws [ModelRefused] or [PlanRefused] when its parts do not fit, and as `get`. */
        fun load(release: ModelRelease, recipe: Recipe, get: (BlobRef) -> ByteArray): Version {
            val part = { kind: String -> get(recipe.blobs.getValue(kind)) }
            val params = listOf(FrozenVector("params", recipe.plan.parameters, DType.FLOAT32))
            val vectors = vectorsOf(part("parameters"), params, "parameters").toMutableMap()
            recipe.plan.frozen?.let { vectors += prefixed("frozen", vectorsOf(part("frozen"), it.vectors, "frozen")) }
            val tokenizers =
                recipe.plan.examples.fields.filter { it.tokenizer != null }.associate { field ->
                    field.name to loadedTokenizer(field, part("tokenizer.${field.name}"), Work())
                }
            val graph = Graph.load(part("graph"), PREDICT)
            return Version(release.number, recipe, graph, vectors.mapValues { flatTensor(it.value) }, tokenizers)
        }
    }
}

/** The number of rows of an input. Throws [InputRefused] when it is of another type or size, or outside its range. */
private fun rowsOf(field: Field, values: Any): Int {
    val size = if (values.javaClass == typeOf(field.dtype)) java.lang.reflect.Array.getLength(values) else -1
    if (size < 0 || field.width == 0 || size % field.width != 0) {
        val wanted = typeOf(field.dtype).kotlin.simpleName
        throw InputRefused("input ${field.name} is ${inWords(values)}, the model takes $wanted of n × ${field.width} values")
    }
    val high = field.high
    if (high != null && !isWithin(values, high)) throw InputRefused("input ${field.name} holds a value outside 0 … ${high - 1}")
    return size / field.width
}

private fun typeOf(dtype: DType): Class<*> =
    when (dtype) {
        DType.FLOAT32 -> FloatArray::class.java
        DType.INT64 -> LongArray::class.java
        DType.INT32 -> IntArray::class.java
        DType.UINT8 -> ByteArray::class.java
    }

private fun inWords(values: Any): String {
    val size = if (values.javaClass.isArray) " of ${java.lang.reflect.Array.getLength(values)} values" else ""
    return "${values.javaClass.kotlin.simpleName}$size"
}

private fun isWithin(values: Any, high: Long): Boolean =
    when (values) {
        is LongArray -> values.all { it in 0 until high }
        is IntArray -> values.all { it in 0 until high }
        is ByteArray -> values.all { it.toInt() and 0xff < high }
        else -> true
    }

/** Rows of a trial for one input: waves, or integers from 0 on; integers without a bound are 0. */
private fun drawn(field: Field): Any {
    val size = TRIED * field.width
    val most = maxOf(field.high ?: 1, 1)
    return when (field.dtype) {
        DType.FLOAT32 -> FloatArray(size) { sin(1.0 + it).toFloat() }
        DType.INT64 -> LongArray(size) { it % most }
        DType.INT32 -> IntArray(size) { (it % most).toInt() }
        DType.UINT8 -> ByteArray(size) { (it % most).toByte() }
    }
}

private fun vectorsOf(data: ByteArray, specs: List<FrozenVector>, kind: String): Map<String, Column> {
    val vectors =
        try {
            decodeFrozen(data, specs)
        } catch (error: FormatException) {
            throw ModelRefused("$kind of the version do not fit its plan: ${error.message}")
        }
    val isFinite = vectors.values.all { column -> column.dtype != DType.FLOAT32 || column.floats.all { it.isFinite() } }
    return if (isFinite) vectors else throw ModelRefused("$kind of the version hold an infinity or NaN")
}
