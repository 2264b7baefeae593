package dev.muster.device.protocol
import dev.muster.device.kept.*
import dev.muster.device.plans.ReportLayout
internal const val UNWEIGHTED = "values"
internal class SessionResult(val summed: Boolean)
internal class SecureDelivery(val visit: Visit, val keeper: AssignmentKeeper, val keepGoing: () -> Boolean) {
 fun check(given: dev.muster.device.wire.Assignment, layout: ReportLayout): Unit = TODO("$given $layout")
 fun run(kept: KeptAssignment, layout: ReportLayout): SessionResult = TODO("$kept $layout")
}
