/**
 * Releases: this device's demands on a secure round before it trains, and on a model before it fetches what that names.
 *
 * Of a round, a key that the owner's policy names must have released the plan, its first checkpoint and the parameters of sums.
 * Every later checkpoint must descend from the first, and a model that is evaluated be that of such a checkpoint. The store
 * remembers releases, so that none can be rolled back. Spec: docs/spec/plan.md §9 to §11.
 */
package dev.muster.device.permission

import dev.muster.device.FormatException
import dev.muster.device.Json
import dev.muster.device.ModelRefused
import dev.muster.device.PlanRefused
import dev.muster.device.Platform
import dev.muster.device.Policy
import dev.muster.device.fromHex
import dev.muster.device.keeping
import dev.muster.device.keptJson
import dev.muster.device.keptNumber
import dev.muster.device.plans.vectorDigest
import dev.muster.device.secagg.DIGEST_BYTES
import dev.muster.device.secagg.climb
import dev.muster.device.secagg.depth
import dev.muster.device.utf8
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.LineageEntry
import dev.muster.device.wire.ModelRelease
import dev.muster.device.wire.Release
import dev.muster.device.wire.Signed
import dev.muster.device.wire.TreeHead
import dev.muster.device.wire.verifiedEntry
import dev.muster.device.wire.verifiedHead
import dev.muster.device.wire.verifiedModelRelease
import dev.muster.device.wire.verifiedRelease

private const val RELEASE = "release"
private const val LINEAGE = "lineage"
private const val LOG = "require_release_log"
private const val PARAMS = "params"

/** The release of a secure round, and the lineage entry of the assignment; `last` is the one that this device was shown before. */
private class Shown(val signed: Signed, val release: Release, val entry: LineageEntry?, val last: LineageEntry?) {
    val digest = signed.digest
}

/**
 * Check an assignment of a secure round against its release, and remember the release and the checkpoint.
 *
 * again: an earlier session accepted it, so that a newer head of the log may have been shown since. Throws [PlanRefused], which
 * names the broken rule.
 */
internal fun checkRelease(platform: Platform, place: Place, given: Assignment, again: Boolean) {
    val shown = readRelease(platform, place.policy, given)
    val counterPlace = "released:${shown.signed.signer}:${place.population}"
    checkTerms(platform, place, given, shown.release, keptNumber(platform.store, counterPlace) ?: 0)
    if (shown.release.evaluationBy(given.plan.sha256) == null) checkCheckpoint(given, shown) else checkEvaluated(given, shown)
    val changes = hashMapOf(counterPlace to shown.release.counter.toString())
    if (shown.entry != null && shown.entry.round > (shown.last?.round ?: 0)) {
        changes[entryPlace(shown.signed)] = Json.write(shown.entry.members())
    }
    if (place.policy.requireReleaseLog) {
        val head = provenHead(shown, given)
        if (!again) changes += grownLog(platform, shown.release.lineage, head)
    }
    platform.store.write(changes)
}

private fun entryPlace(release: Signed) = "lineage:${release.digest}"

private fun readRelease(platform: Platform, policy: Policy, given: Assignment): Shown {
    val signed = given.release ?: throw refused("signers", "the secure round has no signed release")
    demand(signed.signer in policy.signers, "signers") { "the release is signed by ${signed.signer}, which it does not name" }
    val entry = given.lineage?.let { breaking("signers") { verifiedEntry(it) } }
    val release = breaking("signers") { verifiedRelease(signed) }
    val last = keptJson(platform.store, entryPlace(signed))?.let { keeping(entryPlace(signed)) { LineageEntry.of(it) } }
    return Shown(signed, release, entry, last)
}

/** Refuse unless a release is for this plan and population now. seen: the greatest counter that was shown before. */
private fun checkTerms(platform: Platform, place: Place, given: Assignment, release: Release, seen: Long) {
    val plan = given.plan.sha256
    demand(release.population == place.population, RELEASE) { "it is for population ${release.population}" }
    demand(release.plan == plan || release.evaluationBy(plan) != null, RELEASE) { "it is for another plan" }
    demand(release.expiresAt > platform.now(), RELEASE) { "it has expired" }
    demand(release.counter >= seen, RELEASE) { "its counter is ${release.counter}; this device has seen $seen" }
    val (promised, least) = release.boundsOf(plan).noiseMultiplier to place.policy.minNoiseMultiplier
    demand(promised >= least, "min_noise_multiplier") {
        "devices would add noise of $promised, the least allowed is $least"
    }
}

private fun checkCheckpoint(given: Assignment, shown: Shown) {
    val (entry, last) = shown.entry to shown.last
    if (entry == null) {
        demand(given.checkpoint.sha256 == shown.release.checkpoint, LINEAGE) {
            "the checkpoint is not the release's, and no signed entry comes with it"
        }
        demand(given.round == 1, LINEAGE) { "no signed entry comes with the checkpoint of round ${given.round}" }
        demand(last == null, LINEAGE) { "the first checkpoint comes again after that of round ${last?.round}" }
        return
    }
    demand(entry.checkpoint == given.checkpoint.sha256, LINEAGE) { "the signed entry is for another checkpoint" }
    demand(entry.round == given.round - 1L && entry.round >= 1, LINEAGE) {
        "the checkpoint of round ${entry.round} comes in round ${given.round}"
    }
    demand(last == null || entry.round >= last.round, LINEAGE) {
        "the checkpoint of round ${entry.round} comes after that of ${last?.round}"
    }
    checkEntry(given, shown, entry)
}

private fun checkEvaluated(given: Assignment, shown: Shown) {
    val entry = shown.entry ?: throw refused(LINEAGE, "no signed entry comes with the model that is evaluated")
    demand(entry.params != null && entry.round >= 1, LINEAGE) {
        "the signed entry of round ${entry.round} names no model to evaluate"
    }
    demand(given.round == 1, LINEAGE) { "an evaluation of the release has one round, and this is round ${given.round}" }
    checkEntry(given, shown, entry)
}

/** Refuse unless an entry belongs to the release, and to the last entry that this device was shown. */
private fun checkEntry(given: Assignment, shown: Shown, entry: LineageEntry) {
    val (release, last) = shown.release to shown.last
    demand(given.lineage?.signer == release.lineage, LINEAGE) { "the checkpoint is not signed by the release's key" }
    demand(entry.release == shown.digest, LINEAGE) { "the signed entry is for another release" }
    demand(entry.round > 1 || entry.parent == release.checkpoint, LINEAGE) {
        "the checkpoint of round 1 does not descend from the release's"
    }
    if (last != null) {
        if (entry.round < last.round) checkDescent(entry, last) else checkDescent(last, entry)
    }
}

/** Refuse unless two entries are the same, or the checkpoint of the later can follow the other's. */
private fun checkDescent(before: LineageEntry, after: LineageEntry) {
    val isSame = after.parent == before.parent && after.checkpoint == before.checkpoint && after.params == before.params
    demand(after.round != before.round || isSame, LINEAGE) { "two checkpoints of round ${after.round} are signed" }
    demand(after.round != before.round + 1 || after.parent == before.checkpoint, LINEAGE) {
        "the checkpoint of round ${after.round} does not descend from that of ${before.round}"
    }
}

/**
 * Check the vectors of a secure assignment that was checked: the model that its entry names, if any, and the constants of an
 * evaluation.
 *
 * Who trains checks it too: else the entry of a round could name any model to those who evaluate. Throws [PlanRefused].
 */
internal fun checkModel(given: Assignment, received: Map<String, FloatArray>) {
    if (given.secagg == null || given.release == null || given.lineage == null) return
    val evaluation = verifiedRelease(given.release).evaluationBy(given.plan.sha256)
    val entry = verifiedEntry(given.lineage)
    for ((name, vector) in received) {
        val isModel = name == PARAMS
        if (evaluation == null && !(isModel && entry.params != null)) continue
        val named = if (isModel) entry.params else evaluation?.constants?.get(name)
        demand(named == vectorDigest(vector), LINEAGE) {
            "the vector $name of the checkpoint is not ${if (isModel) "the model of round ${entry.round}" else "the released one"}"
        }
    }
}

/** The head of a log that holds the release. */
private fun provenHead(shown: Shown, given: Assignment): TreeHead {
    val log = given.log?.takeIf { it.head.signer == shown.release.lineage }
        ?: throw refused(LOG, "no head that the release's lineage key signed comes with it")
    val head = breaking(LOG) { verifiedHead(log.head) }
    val leaf = utf8("${shown.signed.signer}\n${shown.signed.text}")
    val fits = log.position < head.size && log.path.size == DIGEST_BYTES * depth(head.size)
    demand(fits && climb(leaf, log.position, log.path).contentEquals(fromHex(head.root)), LOG) {
        "the proof does not lead from the release to the head"
    }
    return head
}

/** What the store keeps once a log has a head, which must not contradict the one that was shown before. */
private fun grownLog(platform: Platform, lineage: String, head: TreeHead): Pair<String, String> {
    val place = "log:$lineage"
    val last = keptJson(platform.store, place)?.let { keeping(place) { TreeHead.of(it) } } ?: head
    demand(head.size > last.size || (head.size == last.size && head.root == last.root), LOG) {
        "the head of ${head.size} contradicts one of ${last.size} that was shown before"
    }
    return place to Json.write(head.members())
}

private inline fun demand(holds: Boolean, rule: String, why: () -> String) {
    if (!holds) throw refused(rule, why())
}

/** A refusal of a model by limits of the policy, which its owner may change. */
internal class AgainstLimits(message: String) : ModelRefused(message)

/** Make a check of the policy's limits. Throws [AgainstLimits]. */
internal fun withinLimits(check: () -> Unit) {
    try {
        check()
    } catch (error: PlanRefused) {
        throw AgainstLimits(error.message!!)
    }
}

/**
 * The release, if a key that the policy names signed it; any key if it names none, as for plans of plain rounds.
 *
 * Throws [ModelRefused].
 */
internal fun signedRelease(policy: Policy, signed: Signed): ModelRelease {
    if (policy.signers.isNotEmpty() && signed.signer !in policy.signers) {
        throw ModelRefused("against signers of this device's policy: it does not name who signed the model release")
    }
    try {
        return verifiedModelRelease(signed)
    } catch (error: FormatException) {
        throw ModelRefused(error.message!!)
    }
}

/** Check a release for the model `name` of a population, and remember its counter. Throws [ModelRefused]. */
internal fun checkModelRelease(platform: Platform, release: ModelRelease, signer: String, population: String, name: String) {
    val place = "model-released:$signer:$population:$name"
    val seen = keptNumber(platform.store, place) ?: 0
    demandModel(release.population == population) { "it is for population ${release.population}" }
    demandModel(release.name == name) { "it is for model ${release.name}" }
    demandModel(release.expiresAt == null || release.expiresAt > platform.now()) { "it has expired" }
    demandModel(release.counter >= seen) { "its counter is ${release.counter}; this device has seen $seen" }
    platform.store.write(mapOf(place to release.counter.toString()))
}

private inline fun demandModel(holds: Boolean, why: () -> String) {
    if (!holds) throw ModelRefused("the model release is refused: ${why()}")
}
