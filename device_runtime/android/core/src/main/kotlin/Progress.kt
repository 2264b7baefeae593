/** How far a session is, for the app. */
package dev.muster.device

/** What a session does, in this order; one that finishes earlier work begins with the last. */
public enum class Stage { CHECKING_IN, WAITING, FETCHING, TRAINING, SENDING }

/**
 * How far a session is. [task] is empty and [round] 0 before an assignment.
 *
 * [step] of [steps] is done while it trains, else both are 0. A plan may end before its last step.
 */
public data class Progress(val stage: Stage, val task: String, val round: Int, val step: Int, val steps: Int)
