/**
 * Many devices of a fleet in one process, each with a state folder of its own. `simulator.fleet` starts it.
 *
 * A line of JSON on standard input starts a session of one device, and a line on standard output says how it ended, as with the fork
 * server of Python's devices. Sessions run at the same time. The end of standard input ends all.
 */
package dev.muster.device.jvm

import dev.muster.device.Json
import dev.muster.device.Policy
import dev.muster.device.SessionConfig
import dev.muster.device.sessions.runSession
import okhttp3.HttpUrl.Companion.toHttpUrl
import java.io.File
import kotlin.concurrent.thread

/** Run sessions until standard input ends; the exit code. */
internal fun runFleet(): Int {
    for (line in generateSequence(::readlnOrNull)) {
        val start = Json.parse(line, "start of a session")
        thread(isDaemon = true) { tell(start["client"].text(), outcomeOf(start)) }
    }
    return 0
}

/** The outcome of a session as JSON's members; null when this program failed, which standard error tells. */
private fun outcomeOf(start: Json): Map<String, Any?>? =
    try {
        val secret = start.nullable("enrolment_secret")?.let { secretIn(File(it.text())) }
        JvmPlatform(File(start["state"].text()), NpzExamples(File(start["examples"].text())), secret).use { platform ->
            val policy = start.nullable("policy")?.let { Policy.of(Json.write(it.value)) } ?: Policy()
            val (address, labels) = start["coordinator"].text().toHttpUrl() to start["device"]["labels"].map { it.text() }
            val config = SessionConfig(address, start["population"].text(), policy, start["wait_s"].number(), labels = labels)
            config.graphs = GRAPHS
            runSession(platform, config).members()
        }
    } catch (error: Exception) {
        error.printStackTrace()
        null
    }

private fun tell(client: String, outcome: Map<String, Any?>?) {
    val line = Json.write(mapOf("client" to client, "outcome" to outcome, "exit_code" to if (outcome == null) 1 else 0))
    synchronized(System.out) {
        println(line)
        System.out.flush()
    }
}
