/** The program `muster-device`: its words, its help, and its exit codes, which are those of Python's `muster device`. */
@file:JvmName("Command")

package dev.muster.device.jvm

import dev.muster.device.ConfigException
import dev.muster.device.Device
import dev.muster.device.DeviceException
import dev.muster.device.Ending
import dev.muster.device.Json
import dev.muster.device.Outcome
import dev.muster.device.Policy
import dev.muster.device.SessionConfig
import dev.muster.device.SharedSecret
import dev.muster.device.sessions.runSession
import okhttp3.HttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrlOrNull
import java.io.File
import java.io.IOException
import kotlin.system.exitProcess

private val HELP =
    """
    muster-device run --coordinator URL --population NAME --examples PATH

    Check in, train when selected, report; again and again unless --once. Examples never leave the device.

      --coordinator URL  the coordinator's URL
      --population NAME  the population to serve
      --examples PATH    local examples: an .npz file with an array for each field, whose first axis counts examples, or a
                         folder of such files, each the collection of its name; a single file is the collection "default"
      --state DIR        where the device keeps its identity, its journal and plans  [device]
      --policy FILE      what this device may do: a JSON file with the settings of docs/device.md  [policy.json in the state
                         folder; without one, any plan of a plain round, no secure round]
      --enrolment-secret-file FILE
                         a file with the secret that coordinator and authority want devices to know  [none]
      --label NAME=VALUE what this device is, such as region=eu: told if the policy's labels list the name; may be repeated
      --once             run one session and end
      --json             print outcomes as JSON, one on a line
      --help             print this

    With --once the exit code is 0 when the session reported, 75 when there was no work now, and 1 when it failed. It is 2 for
    an option, a policy or examples that are none.
    """.trimIndent()
private val NAMED =
    setOf("--coordinator", "--population", "--examples", "--state", "--policy", "--enrolment-secret-file", "--label")
private val FLAGS = setOf("--once", "--json")

/** The bytes around a secret that are none of it, as in Python. */
private const val BLANKS = " \t\n\r\u000b\u000c"

internal fun main(words: Array<String>) {
    useUnpackedLibraries()
    val code =
        when {
            words.isEmpty() || "--help" in words || "-h" in words -> println(HELP).let { if (words.isEmpty()) 2 else 0 }
            words[0] == "fleet" -> runFleet()
            else -> command(words.toList())
        }
    System.out.flush()
    exitProcess(code) // connections that are kept would keep the process
}

private fun command(words: List<String>): Int =
    try {
        run(Given.of(words))
    } catch (error: DeviceException) {
        System.err.println("error: ${error.message}")
        if (error is ConfigException) 2 else 1
    }

private class Given(val config: SessionConfig, val examples: File, val state: File, val secret: File?, val once: Boolean, val json: Boolean) {
    companion object {
        fun of(words: List<String>): Given {
            if (words[0] != "run") throw ConfigException("there is no command ${words[0]}, but `run`; --help says more")
            val pairs = pairsOf(words.drop(1))
            val values = pairs.toMap()
            val missing = listOf("--coordinator", "--population", "--examples").filter { it !in values }
            if (missing.isNotEmpty()) throw ConfigException("missing: ${missing.joinToString()}; --help says more")
            val examples = File(values.getValue("--examples"))
            val isThere = if (examples.isDirectory) examples.list().orEmpty().any(::isExamples) else examples.exists()
            if (!isThere) throw ConfigException("there are no examples at $examples: an .npz file is wanted, or a folder of them")
            val state = File(values["--state"] ?: "device")
            val policy = policyIn(values["--policy"]?.let(::File), state)
            val labels = labelsOf(pairs.filter { it.first == "--label" }.map { it.second })
            val address = addressOf(values.getValue("--coordinator"))
            val config = SessionConfig(address, values.getValue("--population"), policy, labels = labels)
            config.graphs = GRAPHS
            return Given(config, examples, state, values["--enrolment-secret-file"]?.let(::File), "--once" in values, "--json" in values)
        }
    }
}

/** Labels of texts such as `region=eu`. */
private fun labelsOf(texts: List<String>): Map<String, String> {
    val labels = HashMap<String, String>()
    for (text in texts) {
        val (name, value) = text.split("=", limit = 2).let { it[0] to it.getOrNull(1) }
        if (value == null) throw ConfigException("label ${Json.write(text)} is not like region=eu")
        if (labels.put(name, value) != null) throw ConfigException("label $name is given twice")
    }
    return labels
}

/** The options with their values, in order. */
private fun pairsOf(words: List<String>): List<Pair<String, String>> {
    val pairs = ArrayList<Pair<String, String>>()
    val rest = words.iterator()
    while (rest.hasNext()) {
        val (name, inline) = rest.next().split("=", limit = 2).let { it[0] to it.getOrNull(1) }
        val value =
            when {
                name in FLAGS && inline == null -> ""
                name in NAMED && (inline != null || rest.hasNext()) -> inline ?: rest.next()
                name in NAMED -> throw ConfigException("$name needs a value; --help says more")
                else -> throw ConfigException("there is no option $name; --help says more")
            }
        pairs += name to value
    }
    return pairs
}

private fun addressOf(coordinator: String): HttpUrl {
    val url = coordinator.toHttpUrlOrNull()
    if (url == null || url.username.isNotEmpty() || url.query != null) {
        throw ConfigException("--coordinator must be a URL that starts with https:// or http://, without a user or a query")
    }
    return url
}

private fun policyIn(file: File?, state: File): Policy {
    val path = file ?: File(state, "policy.json")
    if (file == null && !path.exists()) return Policy()
    try {
        return Policy.of(path.readText())
    } catch (error: IOException) {
        throw ConfigException("policy $path cannot be read: ${error.message}")
    } catch (error: ConfigException) {
        throw ConfigException("policy $path: ${error.message}")
    }
}

internal fun secretIn(file: File): SharedSecret {
    val text =
        try {
            file.readText(Charsets.ISO_8859_1).trim { it in BLANKS }
        } catch (error: IOException) {
            throw ConfigException("the enrolment secret $file cannot be read: ${error.message}")
        }
    if (text.isEmpty()) throw ConfigException("the enrolment secret $file is empty")
    return SharedSecret(text.toByteArray(Charsets.ISO_8859_1))
}

private fun run(given: Given): Int =
    JvmPlatform(given.state, NpzExamples(given.examples), given.secret?.let(::secretIn)).use { platform ->
        val tell = { outcome: Outcome -> println(if (given.json) outcome.toJson() else inWords(outcome)) }
        if (given.once) {
            val outcome = runSession(platform, given.config)
            tell(outcome)
            if (outcome.reason == "conditions") 75 else codeOf(outcome.ending)
        } else {
            Device(platform, given.config).runForever(tell)
            0
        }
    }

private fun codeOf(ending: Ending): Int =
    when (ending) {
        Ending.REPORTED -> 0
        Ending.REJECTED, Ending.NOT_NEEDED, Ending.NOT_NOW -> 75
        Ending.ABORTED, Ending.FAILED -> 1
    }

private fun inWords(ended: Outcome): String {
    val place = if (ended.task.isEmpty()) "" else "task ${ended.task} round ${ended.round}"
    return listOf(ended.ending.text, ended.reason, place, ended.told.ifEmpty { ended.detail }).filter { it.isNotEmpty() }.joinToString(" ")
}
