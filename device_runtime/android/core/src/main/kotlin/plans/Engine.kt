/** The engine of ONNX graphs: ONNX Runtime's Java interface, on one thread. Its Android library has the same classes. */
package dev.muster.device.plans

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtLoggingLevel
import ai.onnxruntime.OrtSession
import ai.onnxruntime.OrtSession.RunOptions
import ai.onnxruntime.OrtSession.SessionOptions
import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.PlanRefused
import dev.muster.device.RuntimeFailed
import dev.muster.device.Stop
import java.lang.reflect.Method
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.IntBuffer
import java.nio.LongBuffer

/** Memory begins at a multiple of this, as engines' own does. */
private const val ALIGNMENT = 64

private val environment: OrtEnvironment by lazy {
    OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL, "muster").also { it.setTelemetry(false) }
}

/** The options of every graph. They must live as long as the graphs. */
private val options: SessionOptions by lazy {
    SessionOptions().apply {
        setIntraOpNumThreads(1)
        setInterOpNumThreads(1)
        setExecutionMode(SessionOptions.ExecutionMode.SEQUENTIAL)
        // The last level rearranges images for convolutions whose weights are constants; ours are inputs.
        setOptimizationLevel(SessionOptions.OptLevel.EXTENDED_OPT)
        // One block for a whole step holds more memory than the arena, which frees as it goes.
        setMemoryPatternOptimization(false)
        setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL)
        addConfigEntry("session.intra_op.allow_spinning", "0")
        addConfigEntry("session.inter_op.allow_spinning", "0")
        addConfigEntry("session.load_model_format", "ONNX")
        // A graph must be self-contained. ONNX lets a tensor name a file, and this path is no folder, so none can be read.
        addConfigEntry("session.model_external_initializers_file_folder_path", "/dev/null")
    }
}

/** The engine with its version, for [dev.muster.device.Platform.engineName]. */
internal fun engineName(): String = "onnxruntime ${environment.version}"

/** `ByteBuffer.alignedSlice`, which Java has since 9 and Android since API 33. */
private val alignedSlice: Method? =
    try {
        ByteBuffer::class.java.getMethod("alignedSlice", Int::class.java)
    } catch (_: NoSuchMethodException) {
        null
    }

/**
 * Native memory of so many bytes, zeros, aligned where the platform can. Throws [PlanRefused] when there is not as much.
 *
 * The alignment decides which values vector instructions add first, and so how a sum is rounded.
 */
private fun memory(bytes: Long, shape: List<Int>): ByteBuffer {
    val most = bytes + 2 * ALIGNMENT
    if (most > Int.MAX_VALUE) throw PlanRefused("the plan asks for a buffer of $shape")
    val whole =
        try {
            ByteBuffer.allocateDirect(most.toInt())
        } catch (error: OutOfMemoryError) {
            throw PlanRefused("the plan asks for a buffer of $shape: ${error.message}")
        }
    val part = alignedSlice?.invoke(whole, ALIGNMENT) as ByteBuffer? ?: whole
    part.limit(bytes.toInt())
    return part.slice().order(ByteOrder.nativeOrder())
}

/** Values at the edge of graphs, zeros at first, in native memory that graphs read and write in place. Free it after use. */
internal class Tensor(val dtype: DType, val shape: List<Int>) : AutoCloseable {
    /** The number of values. */
    val size: Int = product(shape)
    private val bytes = memory(size.toLong() * dtype.bytes, shape)
    private val buffer: Buffer =
        when (dtype) {
            DType.FLOAT32 -> bytes.asFloatBuffer()
            DType.INT64 -> bytes.asLongBuffer()
            DType.INT32 -> bytes.asIntBuffer()
            DType.UINT8 -> bytes
        }

    /** What the engine reads and writes. */
    internal val value: OnnxTensor = bound()

    private fun bound(): OnnxTensor {
        val axes = LongArray(shape.size) { shape[it].toLong() }
        return when (dtype) {
            DType.FLOAT32 -> OnnxTensor.createTensor(environment, buffer as FloatBuffer, axes)
            DType.INT64 -> OnnxTensor.createTensor(environment, buffer as LongBuffer, axes)
            DType.INT32 -> OnnxTensor.createTensor(environment, buffer as IntBuffer, axes)
            DType.UINT8 -> OnnxTensor.createTensor(environment, buffer as ByteBuffer, axes, OnnxJavaType.UINT8)
        }
    }

    /** A copy of the values, in an array of their type. */
    fun read(): Any {
        buffer.clear()
        return when (buffer) {
            is FloatBuffer -> FloatArray(size).also { buffer.get(it) }
            is LongBuffer -> LongArray(size).also { buffer.get(it) }
            is IntBuffer -> IntArray(size).also { buffer.get(it) }
            else -> ByteArray(size).also { bytes.get(it, 0, size) }
        }
    }

    /** A copy of float32 values. */
    fun floats(): FloatArray = read() as FloatArray

    /** One of float32 values. */
    fun float(place: Int): Float = (buffer as FloatBuffer).get(place)

    /** Write all values, from an array of their type. */
    fun write(values: Any) {
        buffer.clear()
        put(values, 0, size)
    }

    /** Write rows of a column, each of so many values, one after the other. */
    fun writeRows(column: Column, width: Int, rows: IntArray) {
        buffer.clear()
        for (row in rows) put(column.values, row * width, width)
    }

    private fun put(values: Any, begin: Int, count: Int) {
        when (buffer) {
            is FloatBuffer -> buffer.put(values as FloatArray, begin, count)
            is LongBuffer -> buffer.put(values as LongArray, begin, count)
            is IntBuffer -> buffer.put(values as IntArray, begin, count)
            else -> bytes.put(values as ByteArray, begin, count)
        }
    }

    override fun close() = value.close()
}

/** A float32 vector at the edge of a graph. */
internal fun flatTensor(vector: FloatArray): Tensor = Tensor(DType.FLOAT32, listOf(vector.size)).also { it.write(vector) }

/** A vector that no round changes at the edge of a graph. */
internal fun flatTensor(vector: Column): Tensor = Tensor(vector.dtype, vector.shape).also { it.write(vector.values) }

/** Values under names at the edge of a graph: `prefix.name`. */
internal fun <T> prefixed(prefix: String, values: Map<String, T>): Map<String, T> = values.mapKeys { (name, _) -> "$prefix.$name" }

/** Free tensors that nothing reads any more. */
internal fun letGoOf(tensors: Collection<Tensor>) = tensors.forEach(Tensor::close)

/** A call of a graph with the same tensors each time. Not to be shared between threads. */
internal class Call(
    private val graph: Graph,
    private val inputs: Map<String, OnnxTensor>,
    private val outputs: Map<String, OnnxTensor>,
) {
    /** Compute the outputs in place. Throws [RuntimeFailed] when a tensor does not fit, an operator fails, or the graph is stopped. */
    fun run() {
        if (outputs.isEmpty()) return
        try {
            graph.session.run(inputs, emptySet(), outputs, graph.options).close()
        } catch (error: OrtException) {
            graph.isSound = false
            throw RuntimeFailed("graph ${graph.name} failed: ${error.message}")
        }
    }
}

/**
 * Graphs that stay loaded after a session of a small model, for the next one: at most so many. To load one costs more than to train
 * with it. For a process with memory to spare.
 */
internal class LoadedGraphs(private val most: Int) {
    private val idle = ArrayDeque<Pair<String, OrtSession>>()

    @Synchronized
    fun take(key: String): OrtSession? = idle.indexOfFirst { it.first == key }.let { if (it < 0) null else idle.removeAt(it).second }

    /** Keep a graph that nobody runs any more, instead of the one that was given back first. */
    @Synchronized
    fun give(key: String, session: OrtSession) {
        idle.addLast(key to session)
        if (idle.size > most) idle.removeFirst().second.close()
    }
}

/** A graph that is ready to run. leave: where it goes when it is closed and has not failed. */
internal class Graph private constructor(
    internal val session: OrtSession,
    val name: String,
    private val leave: (OrtSession) -> Unit = OrtSession::close,
) : AutoCloseable {
    internal val options = RunOptions()
    private var isOpen = true

    @Volatile
    internal var isSound = true

    /**
     * A call that computes `outputs`, which share no memory with inputs, from those `inputs` that the graph declares.
     *
     * Throws [PlanRefused] when an input is missing, or the graph has no such output.
     */
    fun bind(inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Call {
        val lacking = session.inputNames.filter { it !in inputs } + outputs.keys.filter { it !in session.outputNames }
        if (lacking.isNotEmpty()) throw PlanRefused("graph $name has inputs or outputs that the plan does not: $lacking")
        return Call(this, session.inputNames.associateWith { inputs.getValue(it).value }, outputs.mapValues { it.value.value })
    }

    /** The same, computed once. Throws [RuntimeFailed] too. */
    fun run(inputs: Map<String, Tensor>, outputs: Map<String, Tensor>) = bind(inputs, outputs).run()

    /** End the call that is under way, and later ones, from another thread. */
    @Synchronized
    fun stop() {
        if (isOpen) options.setTerminate(true)
    }

    /** Free the engine's memory, unless the graph stays loaded. A second time it does nothing. */
    @Synchronized
    override fun close() {
        if (!isOpen) return
        isOpen = false
        if (isSound) leave(session) else session.close()
        options.close()
    }

    companion object {
        /** Throws [PlanRefused] when a plan may not contain the graph, or the engine cannot read it. */
        fun load(graph: ByteArray, name: String): Graph = Graph(session(graph, name), name)

        /** The same of a blob, from those that are loaded and to them. */
        fun load(ref: BlobRef, name: String, loaded: LoadedGraphs, blob: (BlobRef) -> ByteArray): Graph {
            val key = "$name ${ref.sha256}"
            return Graph(loaded.take(key) ?: session(blob(ref), name), name) { loaded.give(key, it) }
        }

        private fun session(graph: ByteArray, name: String): OrtSession {
            checkGraph(graph, name)
            try {
                return environment.createSession(graph, options)
            } catch (error: OrtException) {
                throw PlanRefused("ONNX Runtime cannot load graph $name: ${error.message}")
            }
        }
    }
}

/** Do work with graphs by name, which are freed after it, and stopped in mid-call by `stop`. blob: the bytes of a graph. */
internal fun <T> withGraphs(
    refs: Map<String, BlobRef>,
    blob: (BlobRef) -> ByteArray,
    stop: Stop,
    loaded: LoadedGraphs = LoadedGraphs(0),
    work: (Map<String, Graph>) -> T,
): T {
    val graphs = LinkedHashMap<String, Graph>()
    try {
        for ((name, ref) in refs) graphs[name] = Graph.load(ref, name, loaded, blob)
        return stop.use({ graphs.values.forEach(Graph::stop) }) { work(graphs) }
    } finally {
        graphs.values.forEach(Graph::close)
    }
}
