/**
 * One session: check in, wait to be selected, do the work, upload once. Spec: docs/spec/wire.md.
 *
 * A device that was stopped finds its last assignment in the store, and first finishes that.
 */
package dev.muster.device.sessions

import dev.muster.device.AssignmentException
import dev.muster.device.BadAnswer
import dev.muster.device.DeviceException
import dev.muster.device.Ending
import dev.muster.device.Identity
import dev.muster.device.NotAllowedNow
import dev.muster.device.Outcome
import dev.muster.device.Outcome.Retryable
import dev.muster.device.PlanRefused
import dev.muster.device.Platform
import dev.muster.device.PolicyForbids
import dev.muster.device.Progress
import dev.muster.device.Refused
import dev.muster.device.RetryWindow
import dev.muster.device.RuntimeFailed
import dev.muster.device.SessionConfig
import dev.muster.device.Stage
import dev.muster.device.SumAbandoned
import dev.muster.device.TransportException
import dev.muster.device.kept.AssignmentKeeper
import dev.muster.device.kept.KeptAssignment
import dev.muster.device.kept.KeptVectors
import dev.muster.device.kept.Phase
import dev.muster.device.kept.keptBlobs
import dev.muster.device.kept.writeJournal
import dev.muster.device.known
import dev.muster.device.permission.checkModel
import dev.muster.device.permission.oneMoreAnswer
import dev.muster.device.plain
import dev.muster.device.plans.FORMAT
import dev.muster.device.plans.LoadedGraphs
import dev.muster.device.plans.Plan
import dev.muster.device.plans.StreamKey
import dev.muster.device.plans.TrainingResult
import dev.muster.device.plans.Work
import dev.muster.device.plans.checkExamples
import dev.muster.device.plans.decodePlan
import dev.muster.device.plans.decodeVectors
import dev.muster.device.plans.encodeReport
import dev.muster.device.plans.encodeVector
import dev.muster.device.plans.execute
import dev.muster.device.plans.frozenOf
import dev.muster.device.plans.isSmall
import dev.muster.device.plans.keptRefs
import dev.muster.device.plans.onSide
import dev.muster.device.plans.runGraphs
import dev.muster.device.plans.stepCount
import dev.muster.device.plans.weigh
import dev.muster.device.plans.withGraphs
import dev.muster.device.protocol.Hold
import dev.muster.device.protocol.SecureDelivery
import dev.muster.device.protocol.Transport
import dev.muster.device.protocol.UNWEIGHTED
import dev.muster.device.protocol.Visit
import dev.muster.device.texts.tokenized
import dev.muster.device.visible
import dev.muster.device.wire.Accepted
import dev.muster.device.wire.Assignment
import dev.muster.device.wire.Rejected
import java.text.NumberFormat
import java.util.Locale

private const val SECRET_BYTES = 32

// Answers to an upload that leave no assignment to give up: unknown, decided, too late.
private val OVER = setOf(404, 409, 410)
// What Python takes for space, on every platform: the meaning of \s alone differs between Java and Android.
private val BLANKS = Regex("[\\s\\p{Z}\\x1c-\\x1f\\x85]+")

/** Run one session, on this thread. Errors are in the outcome, and the coordinator is told if it was waiting. */
internal fun runSession(platform: Platform, config: SessionConfig): Outcome {
    val transport = Transport(platform, config.coordinator, config.stop)
    val session = Session(platform, config, transport)
    try {
        session.run()
    } catch (error: Throwable) {
        session.fail(known(error))
        if (error is PolicyForbids) session.outcome = session.outcome.copy(ending = Ending.NOT_NOW)
    }
    // A plan and a graph contain foreign texts too, which end up in error messages.
    val ended =
        session.outcome.copy(detail = plain(session.outcome.detail), bytesUp = transport.moved.up, bytesDown = transport.moved.down)
    val outcome = ended.copy(told = toldOf(ended, "${config.coordinator.scheme}://${config.coordinator.host}"))
    try {
        writeJournal(platform.store, platform.now(), outcome.members(), session.closing)
    } catch (error: DeviceException) {
        return outcome.failed(error)
    }
    return outcome
}

/** One pass through the protocol. */
private class Session(private val platform: Platform, private val config: SessionConfig, private val transport: Transport) {
    var outcome = Outcome()
    private val keeper = AssignmentKeeper(platform.store, config.place)
    private val vectors = KeptVectors(platform, config.place)
    private lateinit var visit: Visit
    private var hold: Hold? = null
    private var isTrained = false

    /** What becomes durable at the end: a device that is stopped before sends its report again, which counts once. */
    val closing = HashMap<String, String?>()

    /** Assignments of this session; those that an earlier one left are already counted. */
    private var got = 0

    /** The fewest examples that each offered task runs on. */
    private var minExamples = emptyMap<String, Long>()
    private val tokenRow = "${Identity.TOKEN}${config.coordinator}:${config.population}"

    /** Note an error. Once the session is told to stop, it cuts its own connections and graphs, which is then the cause. */
    fun fail(error: DeviceException) {
        outcome = outcome.failed(causeOf(error))
    }

    private fun causeOf(error: DeviceException): DeviceException =
        if ((error is TransportException || error is RuntimeFailed) && config.stop.isSet) stopping() else error

    private fun stopping() = NotAllowedNow("a condition for work no longer holds: ${config.stop.why}")

    private fun tell(stage: Stage, step: Int = 0, steps: Int = 0) =
        config.progress(Progress(stage, outcome.task, outcome.round, step, steps))

    /** Everything from the policy to the receipt. */
    fun run() {
        visit = Visit(platform, config.place, transport)
        val earlier = keeper.get()
        try {
            if (earlier == null || earlier.phase == Phase.REPORTED || earlier.due <= platform.now()) {
                visit.guard.checkIn()
                takePart(earlier)
            } else {
                finish(earlier)
            }
        } finally {
            outcome = outcome.copy(device = visit.enrolments.device)
            closing += visit.guard.spending(got)
        }
        visit.trim()
    }

    /** Finish the assignment that a stopped device left, or give it up. */
    private fun finish(kept: KeptAssignment) {
        outcome = outcome.copy(question = kept.question)
        try {
            visit.guard.checkKept(kept)
        } catch (error: DeviceException) {
            // Only the owner is told: a population that is no longer allowed must not hear from this device.
            if (error is PlanRefused || error is PolicyForbids) keeper.drop()
            throw error
        }
        noteAssignment(kept.given)
        holding(kept.given) {
            // It is not trained again, because this work may have been what stopped the device.
            if (kept.phase == Phase.ASSIGNED) throw RuntimeFailed("the device was stopped while it worked")
            isTrained = true
            outcome = outcome.copy(examples = kept.examples, steps = kept.steps)
            deliver(kept, planOf(kept.given))
        }
    }

    private fun takePart(last: KeptAssignment?) {
        val now = platform.conditions()
        tell(Stage.CHECKING_IN)
        val unsettled = vectors.settleAll(transport::outcome)
        val message = checkInMessage(platform, config.place, visit.guard, now, platform.store.get(tokenRow), visit.guard.told(config.labels))
        val answer =
            when (val answer = transport.checkIn(config.population, message)) {
                is Rejected -> return rejected(answer)
                is Accepted -> answer
            }
        minExamples = answer.offers.associate { it.task to it.minExamples }
        val willing = acceptableTasks(answer.offers, platform.examples, now, visit.guard::shows)
        val tasks = willing - unsettled.keys
        if (tasks.isEmpty()) {
            // The coordinator is not told: the finding may be private, and silence looks like a lost connection.
            val why = willing.joinToString("; ") { unsettled.getValue(it) }
            outcome = rejectedFor("unwilling", why, answer.retry)
            return
        }
        tell(Stage.WAITING)
        val given = transport.awaitAssignment(answer.session, config.waitS, tasks)
        if (given !is Assignment) return rejected(given as Rejected)
        if (last?.given?.assignment == given.assignment) {
            throw BadAnswer("assignment ${given.assignment} came again after this device was done with it")
        }
        noteAssignment(given)
        holding(given) {
            val (kept, plan) = train(given)
            deliver(kept, plan)
        }
        if (outcome.ending == Ending.REPORTED) outcome = outcome.copy(retry = answer.retry)
    }

    /** Train, and keep the report. */
    private fun train(given: Assignment): Pair<KeptAssignment, Plan> {
        val guard = visit.guard
        got = 1
        // Its use too: a device that is killed at work has used it.
        val assigned = keeper.keep(KeptAssignment(given, platform.now() + given.reportWithinS), guard.spending(got))
        tell(Stage.FETCHING)
        guard.checkAssignment(given)
        val plan = planOf(given)
        val question = plan.question?.let { onOneLine(it) }
        outcome = outcome.copy(question = question)
        guard.checkQuestion(question)
        val count = platform.examples.counts()[plan.examples.collection] ?: 0
        guard.checkCache(toCache(given, plan))
        val kept = if (plan.kept.isEmpty()) null else vectors.of(given, plan)
        guard.checkPlan(given.plan, given.checkpoint, plan, count, if (plan.kept.isEmpty()) 0 else vectors.bytesBesides(given.task))
        if (given.secagg != null) secure(assigned.due).check(given, plan.report)
        val result = work(given, plan, assigned.due, kept)
        outcome = outcome.copy(examples = result.examples, steps = result.steps)
        val trained =
            KeptAssignment(
                given, assigned.due, Phase.TRAINED, reportOf(given, plan, result), plan.examples.collection, result.examples,
                result.steps, question,
            )
        val made = if (plan.kept.isEmpty()) emptyMap() else vectors.put(given, result.kept)
        keeper.keep(trained, made + if (question == null) emptyMap() else oneMoreAnswer(platform))
        isTrained = true
        return trained to plan
    }

    private fun reportOf(given: Assignment, plan: Plan, result: TrainingResult): ByteArray =
        if (given.secagg == null) {
            val report = weigh(plan.report, result.values, result.weight)
            encodeReport(plan.report, report, StreamKey(given.seed, given.round, given.slot))
        } else {
            encodeVector(UNWEIGHTED, result.values)
        }

    private fun work(given: Assignment, plan: Plan, due: Double, kept: Map<String, FloatArray>?): TrainingResult {
        val keepGoing = { keepGoing(due) }
        val (all, cut) = tokenized(plan, platform.examples.load(plan.examples.collection), visit::blob, keepGoing)
        outcome = outcome.copy(cut = cut)
        checkExamples(plan, all)
        val examples = onSide(plan, all, minExamples[given.task] ?: 0)
        val broadcast = decodeVectors(transport.blob(given.checkpoint), plan.broadcast)
        checkModel(given, broadcast)
        val frozen = frozenOf(plan, visit::blob)
        // In a secure round a graph's noise must stay secret: a plan could use it to place examples apart in the sum.
        val secret = if (given.secagg == null) ByteArray(0) else platform.random(SECRET_BYTES)
        val key = StreamKey(given.seed, given.round, given.slot, secret)
        val steps = plan.passes.sumOf { stepCount(it.loop, examples.count) }
        var ran = 0
        val tellRan = { more: Int ->
            ran += more
            tell(Stage.TRAINING, ran, steps)
        }
        val loaded = if (isSmall(plan)) config.graphs else LoadedGraphs(most = 0)
        return withGraphs(runGraphs(plan), visit::blob, config.stop, loaded) { graphs ->
            tellRan(0)
            execute(Work(plan, graphs, broadcast, frozen, kept, examples, key, tellRan, keepGoing))
        }
    }

    /** Send the stored report. It stays stored until its receipt has arrived, unless it is no longer needed. */
    private fun deliver(kept: KeptAssignment, plan: Plan) {
        outcome = outcome.copy(numbers = plan.report.size)
        tell(Stage.SENDING)
        if (kept.given.secagg == null) {
            if (kept.given.overSelected) hold?.ask()
            transport.report(kept.given.assignment, kept.report)
        } else if (!secure(kept.due).run(kept, plan.report).summed) {
            throw SumAbandoned("the secure aggregation ended without a sum")
        }
        outcome = outcome.copy(ending = Ending.REPORTED)
        closing += keeper.changed(kept.at(Phase.REPORTED, ByteArray(0)))
    }

    /** Work on an assignment, hold it meanwhile, and give it up when it fails for good. */
    private fun holding(given: Assignment, work: () -> Unit) {
        val held = Hold(platform, transport, given)
        hold = held
        try {
            work()
        } catch (error: Throwable) { // the round must not wait for this device
            val known = known(error)
            // A report that may still arrive stays kept: the next session sends it if there is time left.
            val mayArrive = known is TransportException && !(known is Refused && known.isFinal)
            if (!(mayArrive && isTrained)) giveUp(given, causeOf(known))
            fail(known)
            if (causeOf(known) is AssignmentException) outcome = outcome.copy(ending = Ending.ABORTED)
        } finally {
            held.end()
        }
    }

    /** End an assignment without a report, and say why. */
    private fun giveUp(given: Assignment, error: DeviceException) {
        if (!(error is Refused && error.status in OVER)) {
            try {
                transport.abort(given.assignment, if (error is AssignmentException) error.reason else "runtime-failed")
            } catch (_: TransportException) {
                // the outcome keeps the first failure
            }
        }
        keeper.drop()
    }

    private fun keepGoing(due: Double): Boolean {
        if (config.stop.isSet) throw stopping()
        hold?.check()
        visit.guard.checkWork()
        return platform.now() < due
    }

    private fun secure(due: Double) = SecureDelivery(visit, keeper) { keepGoing(due) }

    private fun planOf(given: Assignment): Plan = decodePlan(visit.blob(given.plan), given.round)

    /** Bytes that the cache must hold for a plan between rounds: all that it needs, but for what models keep anyway. */
    private fun toCache(given: Assignment, plan: Plan): Double {
        val stays = keptBlobs(platform.store)
        return (listOf(given.plan, given.checkpoint) + keptRefs(plan)).filter { it.sha256 !in stays }.distinctBy { it.sha256 }
            .sumOf { it.size.toDouble() }
    }

    private fun noteAssignment(given: Assignment) {
        outcome =
            outcome.copy(
                task = given.task, round = given.round, attempt = given.attempt, target = visible(given.target ?: ""),
                secure = given.secagg != null,
            )
    }

    private fun rejected(answer: Rejected) {
        closing[tokenRow] = answer.token.ifEmpty { null }
        val isUnsupported = answer.reason == "unsupported-format"
        val detail = if (isUnsupported) "this device runs $FORMAT; wanted: ${answer.formats.joinToString()}" else ""
        outcome = rejectedFor(answer.reason, detail, answer.retry, if (isUnsupported) Retryable.PERMANENT else Retryable.TRANSIENT)
    }

    private fun rejectedFor(reason: String, detail: String, retry: RetryWindow?, retryable: Retryable = Retryable.TRANSIENT) =
        outcome.copy(ending = Ending.REJECTED, reason = reason, detail = detail, retry = retry, retryable = retryable)
}

/** A question as its owner reads it. */
internal fun onOneLine(question: String): String = visible(question.replace(BLANKS, " ").trim())

/** What became of a question that `by` asked, in words for the owner; empty where none was asked. As in Python. */
internal fun toldOf(ended: Outcome, by: String): String {
    val question = ended.question ?: return ""
    val asked = "$question, by $by"
    val why = if (ended.detail.startsWith("against ")) "it is ${ended.detail}" else ended.detail.ifEmpty { ended.reason }
    if (ended.ending == Ending.REPORTED) {
        val count = NumberFormat.getIntegerInstance(Locale.ENGLISH).format(ended.numbers)
        return "answered a question: $question; sent $count numbers, ${if (ended.secure) "masked" else "in the clear"}"
    }
    if (ended.numbers > 0) return "made an answer to: $asked; not counted because $why"
    return "was asked: $asked; ${if (ended.reason == "plan-refused") "refused" else "not answered"} because $why"
}
