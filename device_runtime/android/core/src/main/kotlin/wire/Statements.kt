/**
 * Signed statements: plans, releases, entries of a lineage, heads of the log of releases, successions of keys.
 *
 * A statement is JSON in exactly the bytes that were signed. The caller decides whether to trust its signer. Every reader and
 * every check throws [FormatException]. Spec: docs/spec/plan.md §8 to §11, docs/spec/wire.md §9.
 */
package dev.muster.device.wire

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.KEY_BYTES
import dev.muster.device.concat
import dev.muster.device.fromBase64url
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.plans.BlobRef
import dev.muster.device.sha256
import dev.muster.device.utf8
import dev.muster.device.verifies

private const val KIND = "ed25519:"
private const val VERSION = 1L
private const val SIGNATURE_BYTES = 64
private const val MOST_SUCCESSORS = 16
private const val MOST_NOISE = 1e6
private const val MOST_TARGET = 1000

/** What a model may be called: it is a part of URLs. */
internal val MODEL_NAME = Regex("[a-z0-9][a-z0-9_-]{0,63}")

/** A signature, and the public key that made it, both as text. */
internal class Signature(val signer: String, val value: String) {
    companion object {
        fun of(json: Json) = Signature(json["signer"].text(), json["value"].text())
    }
}

/** A statement as it was signed. Two are one if all their members are equal. */
internal data class Signed(val text: String, val signer: String, val value: String) {
    /** The members of its JSON. */
    fun members() = mapOf("text" to text, "signer" to signer, "value" to value)

    /** SHA-256 of the statement, in hex. */
    val digest: String get() = hex(sha256(utf8(text)))

    companion object {
        fun of(json: Json) = Signed(json["text"].text(), json["signer"].text(), json["value"].text())
    }
}

/** The proof that a release is in a log: the log's signed head, the index of the release and the path of its leaf. */
internal class Proof(val head: Signed, val position: Long, val path: ByteArray) {
    companion object {
        fun of(json: Json) = Proof(Signed.of(json["head"]), json["position"].count(), json["path"].bytes())
    }
}

/** The text of a task's expression on labels, which a device compares and shows. */
internal fun targetOf(json: Json): String {
    val text = json.text()
    return if (text.codePointCount(0, text.length) in 1..MOST_TARGET) text else json.wrong("1 to $MOST_TARGET letters")
}

/** The parameters of a secure round's sums, which only the release key can change. */
internal class SumBounds(
    val clipNorm: Double,
    val bits: Int,
    val maxExamples: Long,
    val minSum: Long,
    val noiseMultiplier: Double,
    val honest: Long,
    val target: String?,
) {
    companion object {
        fun of(json: Json) =
            SumBounds(
                clipNorm = json["clip_norm"].run { if (number() > 0) number() else wrong("a number above 0") },
                bits = json["bits"].whole(2L..20L).toInt(),
                maxExamples = json["max_examples"].count(),
                minSum = json["min_sum"].count(),
                noiseMultiplier = json["noise_multiplier"].run { if (number() in 0.0..MOST_NOISE) number() else wrong("0 to $MOST_NOISE") },
                honest = json["honest"].count(),
                target = json.optional("target")?.let(::targetOf),
            )
    }
}

/** How devices may evaluate the models of a released training. constants: digests of vectors, by name. */
internal class ReleasedEvaluation(val plan: String, val bounds: SumBounds, val constants: Map<String, String>) {
    companion object {
        fun of(json: Json) =
            ReleasedEvaluation(json["plan"].digest(), SumBounds.of(json["bounds"]), json["constants"].map { it.digest() })
    }
}

/**
 * The work that the devices of a population may do in secure rounds.
 *
 * plan, checkpoint: digests of the plan and of the first checkpoint. lineage: the public key that signs every later one.
 * expiresAt: seconds since 1970.
 */
internal class Release(
    val population: String,
    val plan: String,
    val checkpoint: String,
    val bounds: SumBounds,
    val evaluation: ReleasedEvaluation?,
    val seed: Long?,
    val lineage: String,
    val counter: Long,
    val expiresAt: Long,
) {
    /** The evaluation that a plan, by digest, is released for; null for the plan that trains and for any other. */
    fun evaluationBy(plan: String): ReleasedEvaluation? = evaluation?.takeIf { plan != this.plan && it.plan == plan }

    /** The bounds of the rounds of one of its plans, by digest. */
    fun boundsOf(plan: String): SumBounds = evaluationBy(plan)?.bounds ?: bounds

    companion object {
        fun of(json: Json): Release {
            checkVersion(json)
            return Release(
                population = json["population"].text(),
                plan = json["plan"].digest(),
                checkpoint = json["checkpoint"].digest(),
                bounds = SumBounds.of(json["bounds"]),
                evaluation = json.optional("evaluation")?.let(ReleasedEvaluation::of),
                seed = json.optional("seed")?.wide(),
                lineage = json["lineage"].text(),
                counter = json["counter"].count(),
                expiresAt = json["expires_at"].count(),
            )
        }
    }
}

/** The statement that the devices of a population may use a version of a model. expiresAt: seconds since 1970. */
internal class ModelRelease(
    val population: String,
    val name: String,
    val number: Int,
    val plan: BlobRef,
    val parameters: BlobRef,
    val counter: Long,
    val expiresAt: Long?,
) {
    companion object {
        fun of(json: Json): ModelRelease {
            checkVersion(json)
            return ModelRelease(
                population = json["population"].text(),
                name = json["name"].text(MODEL_NAME),
                number = json["number"].size(1),
                plan = BlobRef.of(json["plan"]),
                parameters = BlobRef.of(json["parameters"]),
                counter = json["counter"].count(),
                expiresAt = json.optional("expires_at")?.count(),
            )
        }
    }
}

/**
 * The origin of a checkpoint: round `round` of a release, from the checkpoint `parent`; all by digest.
 *
 * params: the digest of the model in the checkpoint, if it is evaluated.
 */
internal class LineageEntry(
    val release: String,
    val round: Long,
    val parent: String,
    val checkpoint: String,
    val params: String?,
) {
    /** Its members, as JSON has them. */
    fun members(): Map<String, Any?> {
        val members = mapOf("release" to release, "round" to round, "parent" to parent, "checkpoint" to checkpoint)
        return if (params == null) members else members + ("params" to params)
    }

    companion object {
        fun of(json: Json) =
            LineageEntry(
                release = json["release"].digest(),
                round = json["round"].count(),
                parent = json["parent"].digest(),
                checkpoint = json["checkpoint"].digest(),
                params = json.optional("params")?.digest(),
            )
    }
}

/** A log of releases at one moment: the number of releases, and the root of their Merkle tree, in hex. */
internal class TreeHead(val size: Long, val root: String) {
    /** Its members, as JSON has them. */
    fun members(): Map<String, Any?> = mapOf("size" to size, "root" to root)

    companion object {
        fun of(json: Json) = TreeHead(json["size"].count(), json["root"].digest())
    }
}

private fun checkVersion(json: Json) {
    val version = json["version"]
    if (version.count() != VERSION) version.wrong("version $VERSION, which this side knows, not version ${version.value}")
}

/** A public key of Ed25519, 32 bytes, from its text. */
internal fun publicKey(signer: String): ByteArray {
    val key =
        try {
            if (signer.startsWith(KIND)) fromBase64url(signer.substring(KIND.length)) else null
        } catch (_: FormatException) {
            null // named below, with its form
        }
    return key?.takeIf { it.size == KEY_BYTES }
        ?: throw FormatException("${signer.take(100)} is not a public key: it must be $KIND and $KEY_BYTES bytes in base64url")
}

/** Check that `signature` is its signer's, over the plan of this digest. */
internal fun verifyPlan(plan: BlobRef, signature: Signature) {
    val message = concat(utf8("muster.plan.v1\u0000"), fromHex(plan.sha256))
    demand(signature.signer, signature.value, message, "plan ${plan.sha256.take(12)}…")
}

/** The release in a statement, if its signer signed it. */
internal fun verifiedRelease(signed: Signed): Release = Release.of(verified("release", signed))

/** The release of a model in a statement, if its signer signed it. */
internal fun verifiedModelRelease(signed: Signed): ModelRelease = ModelRelease.of(verified("model", signed))

/** The entry of a lineage in a statement, if its signer signed it. */
internal fun verifiedEntry(signed: Signed): LineageEntry = LineageEntry.of(verified("lineage", signed))

/** The head of a log in a statement, if its signer signed it. */
internal fun verifiedHead(signed: Signed): TreeHead = TreeHead.of(verified("log", signed))

private fun verified(what: String, signed: Signed): Json {
    demand(signed.signer, signed.value, utf8("muster.$what.v1\u0000${signed.text}"), "the statement of a $what")
    return Json.parse(signed.text, what)
}

private fun demand(signer: String, value: String, message: ByteArray, noun: String) {
    val key = publicKey(signer)
    val signature =
        try {
            fromBase64url(value)
        } catch (_: FormatException) {
            ByteArray(0) // which never verifies
        }
    if (!verifies(key, signature, message)) {
        throw FormatException("$noun does not have the signature of $signer: it was altered, or signed for another")
    }
}

/** A public key, and the signature of the key before it. */
internal class Successor(val key: ByteArray, val signature: ByteArray)

/** An Ed25519 public key and its successors in order; the last one is current. */
internal class Succession(val first: ByteArray, val successors: List<Successor>) {
    /** The key that holds now. */
    val current: ByteArray get() = successors.lastOrNull()?.key ?: first

    /**
     * The key that holds now, for whoever pinned an earlier one, or this one, in that role: `server` or `authority`.
     *
     * Throws [FormatException] unless signatures lead from the pinned key to it.
     */
    fun follow(role: String, pinned: ByteArray): ByteArray {
        val keys = listOf(first) + successors.map { it.key }
        val start = keys.indexOfFirst { it.contentEquals(pinned) }
        if (start < 0) {
            throw FormatException("the $role shows the key ${short(current)}, and nothing leads to it from ${short(pinned)}")
        }
        for (place in start until successors.size) {
            val (old, next) = keys[place] to successors[place]
            val statement = concat(utf8("muster.succession.v1\u0000$role\u0000"), old, next.key)
            if (!verifies(old, next.signature, statement)) {
                throw FormatException("the $role shows ${short(next.key)} as the successor of ${short(old)}, which did not sign it")
            }
        }
        return current
    }

    companion object {
        fun of(json: Json): Succession {
            val successors =
                json.optional("successors")?.run {
                    list { Successor(it["key"].bytes(KEY_BYTES), it["signature"].bytes(SIGNATURE_BYTES)) }
                        .also { if (it.size > MOST_SUCCESSORS) wrong("$MOST_SUCCESSORS successors at most") }
                }
            return Succession(json["first"].bytes(KEY_BYTES), successors ?: emptyList())
        }
    }
}

private fun short(key: ByteArray) = "${hex(key).take(16)}…"
