/**
 * Named flat vectors as safetensors bytes: checkpoints and reports. Spec: docs/spec/params.md §3.
 *
 * The format holds data only: a length, a JSON header, and float32 values, all little-endian.
 */
package dev.muster.device.plans

import dev.muster.device.Column
import dev.muster.device.DType
import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.bytesOf
import dev.muster.device.floatsOf
import dev.muster.device.hex
import dev.muster.device.joined
import dev.muster.device.littleEndian
import dev.muster.device.sha256
import dev.muster.device.utf8

private const val HEAD_BYTES = 8
private const val METADATA = "__metadata__"
private val CODES = mapOf(DType.FLOAT32 to "F32", DType.UINT8 to "U8")

/** The bytes of one vector, as every writer makes them. */
internal fun encodeVector(name: String, vector: FloatArray): ByteArray = encodeVectors(mapOf(name to vector))

/** The bytes of named vectors, one after the other. */
internal fun encodeVectors(vectors: Map<String, FloatArray>): ByteArray {
    var end = 0L
    val described =
        vectors.mapValues { (_, vector) ->
            val begin = end
            end += Float.SIZE_BYTES.toLong() * vector.size
            mapOf("dtype" to "F32", "shape" to listOf(vector.size), "data_offsets" to listOf(begin, end))
        }
    val header = utf8(Json.write(described))
    val padded = header.copyOf((header.size + 7) / 8 * 8)
    padded.fill(' '.code.toByte(), header.size)
    return joined(listOf(littleEndian(padded.size.toLong(), HEAD_BYTES), padded) + vectors.values.map(::bytesOf))
}

/** SHA-256 of a vector's values in hex, as a release and the entries of its lineage name a vector. */
internal fun vectorDigest(vector: FloatArray): String = hex(sha256(bytesOf(vector)))

/**
 * The vectors in `data`, in the order of `specs`.
 *
 * Throws [FormatException] when the bytes are not safetensors, or do not hold exactly the vectors of `specs`.
 */
internal fun decodeVectors(data: ByteArray, specs: List<VectorSpec>): Map<String, FloatArray> =
    decodeFrozen(data, specs.map { FrozenVector(it.name, it.size, DType.FLOAT32) }).mapValues { (_, vector) -> vector.floats }

/** The same of vectors that no round changes, each as the column of one example: of float32 or uint8. */
internal fun decodeFrozen(data: ByteArray, specs: List<FrozenVector>): Map<String, Column> {
    val tensors = readHeader(data)
    val names = specs.map { it.name }
    if (tensors.keys != names.toSet()) throw FormatException("vectors are ${tensors.keys.sorted()}, expected $names")
    return specs.associate { it.name to vectorOf(data, tensors.getValue(it.name), it) }
}

/** The frozen vectors of a plan, none if it has none. blob: the bytes of a blob. */
internal fun frozenOf(plan: Plan, blob: (BlobRef) -> ByteArray): Map<String, Column> =
    plan.frozen?.let { decodeFrozen(blob(it.blob), it.vectors) }.orEmpty()

/** A vector in a file: its type, its size, and where its bytes begin and end. */
private class Described(val code: String, val size: Int, val begin: Int, val end: Int) {
    val bytes: Int get() = end - begin
}

private fun vectorOf(data: ByteArray, tensor: Described, spec: FrozenVector): Column {
    if (tensor.size != spec.size || tensor.bytes.toLong() != spec.dtype.bytes.toLong() * spec.size || tensor.code != CODES[spec.dtype]) {
        throw FormatException(
            "vector ${spec.name} has ${tensor.size} values of ${tensor.code} in ${tensor.bytes} bytes, expected " +
                "${spec.dtype.text}[${spec.size}]",
        )
    }
    val values = data.copyOfRange(tensor.begin, tensor.end)
    val shape = listOf(spec.size)
    return if (spec.dtype == DType.UINT8) Column(shape, values) else Column(shape, floatsOf(values))
}

private fun readHeader(data: ByteArray): Map<String, Described> {
    val length = if (data.size < HEAD_BYTES) -1 else littleEndian(data).getLong(0)
    if (length < 0 || length > data.size - HEAD_BYTES) {
        throw FormatException("not a safetensors file: its header goes beyond its end")
    }
    val base = HEAD_BYTES + length.toInt()
    val header = Json.parse(data.copyOfRange(HEAD_BYTES, base), "safetensors header")
    val tensors = (header.members().keys - METADATA).associateWith { tensorOf(header[it], base, data.size) }
    var behind = base
    for (tensor in tensors.values.sortedWith(compareBy(Described::begin, Described::end))) {
        behind = if (tensor.begin == behind) tensor.end else -1
    }
    if (behind != data.size) {
        throw FormatException("not a safetensors file: its vectors do not follow each other from its header to its end")
    }
    return tensors
}

private fun tensorOf(json: Json, base: Int, most: Int): Described {
    val shape = json["shape"].list { it.size() }
    val (begin, end) = json["data_offsets"].list { it.count() }.takeIf { it.size == 2 } ?: json.wrong("two offsets")
    if (shape.size != 1 || begin > end || base + end > most) json.wrong("a vector within its file")
    return Described(json["dtype"].text(Regex("F32|U8")), shape[0], base + begin.toInt(), base + end.toInt())
}
