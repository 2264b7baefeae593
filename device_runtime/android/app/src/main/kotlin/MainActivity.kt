package dev.muster.sample

import android.app.Activity
import android.app.AlertDialog
import android.content.Intent
import android.os.Bundle
import android.text.format.DateUtils
import android.view.Gravity
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.Button
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.Switch
import android.widget.TextView
import dev.muster.device.DeviceException
import dev.muster.device.Ending
import dev.muster.device.Entry
import dev.muster.device.Model
import dev.muster.device.NoModel
import dev.muster.device.Outcome
import java.util.concurrent.Executors
import kotlin.math.roundToInt

private const val SCHEDULED = "scheduled"
private const val PADDING_DP = 16

/** Draw a digit, keep it, train, and read. Whatever may wait runs on a thread of its own. */
class MainActivity : Activity() {
    private val sample get() = application as SampleApplication
    private val work = Executors.newSingleThreadExecutor()
    private lateinit var pad: PadView
    private lateinit var said: TextView
    private lateinit var facts: TextView
    private lateinit var train: Button
    private lateinit var night: Switch

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        pad = PadView(this)
        said = text("").apply { accessibilityLiveRegion = View.ACCESSIBILITY_LIVE_REGION_POLITE }
        facts = text("")
        train = button(R.string.train, ::train)
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL }
        val padding = dp(PADDING_DP)
        column.setPadding(padding, padding, padding, padding)
        if (!sample.hasEngine) column.addView(text(getString(R.string.no_engine)))
        column.addView(pad, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT).apply { gravity = Gravity.CENTER_HORIZONTAL })
        column.addView(row(button(R.string.clear) { pad.wipe() }, button(R.string.read, ::read)))
        column.addView(said)
        column.addView(text(getString(R.string.keep)))
        for (digits in listOf(0..4, 5..9)) column.addView(row(*digits.map(::label).toTypedArray()))
        column.addView(facts)
        column.addView(train)
        night = nightSwitch()
        column.addView(night)
        column.addView(row(button(R.string.journal, ::openJournal), button(R.string.forget, ::askToForget)))
        val scroll = ScrollView(this).apply { addView(column) }
        scroll.fitsSystemWindows = true // Android 15 draws apps below the system's bars
        setContentView(scroll)
        show()
    }

    override fun onDestroy() {
        super.onDestroy()
        work.shutdown()
    }

    /** Do work that may wait, and then something on the screen. Errors are said there. */
    private fun <T> doing(work: () -> T, then: (T) -> Unit) {
        if (isDestroyed) return // as when a session ends after the screen was turned
        this.work.execute {
            try {
                val found = work()
                runOnUiThread { then(found) }
            } catch (error: DeviceException) {
                runOnUiThread { say(error.message ?: error.reason) }
            }
        }
    }

    private fun say(words: String) {
        said.text = words
    }

    /** What is kept, the last session, and the model's version. */
    private fun show() {
        doing({ Triple(sample.muster.examples.counts()[COLLECTION] ?: 0, lastSession(), model().version) }) { (count, session, version) ->
            val lines =
                listOfNotNull(
                    resources.getQuantityString(R.plurals.kept, count, count),
                    session,
                    version?.let { getString(R.string.version, it) },
                )
            facts.text = lines.joinToString("\n")
        }
    }

    private fun lastSession(): String {
        val last = sample.muster.journal().lastOrNull { it.kind == Entry.Kind.SESSION } ?: return getString(R.string.no_session)
        val ago = DateUtils.getRelativeTimeSpanString(last.at?.toEpochMilli() ?: 0, System.currentTimeMillis(), DateUtils.MINUTE_IN_MILLIS)
        return getString(R.string.session, ago, ended(last.outcome!!))
    }

    private fun ended(outcome: Outcome): String {
        val why = "${outcome.reason} ${outcome.detail}".trim()
        return when (outcome.ending) {
            Ending.REPORTED -> getString(R.string.reported, outcome.examples)
            Ending.REJECTED, Ending.NOT_NEEDED, Ending.NOT_NOW -> getString(R.string.no_work, why)
            Ending.ABORTED, Ending.FAILED -> getString(R.string.failed, why)
        }
    }

    private fun keep(digit: Int) {
        if (pad.isEmpty) return say(getString(R.string.empty))
        val drawn = pad.drawn
        pad.wipe()
        doing({ sample.keep(drawn, digit) }) { show() }
    }

    private fun read() {
        if (pad.isEmpty) return say(getString(R.string.empty))
        val drawn = pad.drawn
        doing({ likeliest(drawn) }) { (digit, percent) -> say(getString(R.string.looks_like, digit, percent)) }
    }

    /** The digit that the model reads, and how sure it is, in percent. Throws NoModel before the first release. */
    private fun likeliest(drawn: FloatArray): Pair<Int, Int> {
        try {
            val output = model().predict(mapOf("x" to drawn)).run { floats(names.first()) }
            val most = output.max()
            val shares = output.map { Math.exp((it - most).toDouble()) }
            val digit = output.indices.maxBy { output[it] }
            return digit to (100 * shares[digit] / shares.sum()).roundToInt()
        } catch (_: NoModel) {
            throw NoModel(getString(R.string.no_model))
        }
    }

    private fun model(): Model = sample.muster.model(getString(R.string.model))

    private fun train() {
        train.isEnabled = false
        train.setText(R.string.training)
        sample.muster.sessionAsync().whenComplete { outcome: Outcome?, error ->
            runOnUiThread {
                train.isEnabled = true
                train.setText(R.string.train)
                say(error?.message ?: ended(outcome!!))
                show()
            }
        }
    }

    private fun nightSwitch(): Switch {
        val kept = getPreferences(MODE_PRIVATE)
        return Switch(this).apply {
            setText(R.string.at_night)
            isChecked = kept.getBoolean(SCHEDULED, false)
            setOnCheckedChangeListener { _, isOn ->
                kept.edit().putBoolean(SCHEDULED, isOn).apply()
                if (isOn) sample.muster.schedule() else sample.muster.unschedule()
            }
        }
    }

    private fun openJournal() = startActivity(Intent(this, JournalActivity::class.java))

    private fun askToForget() {
        AlertDialog.Builder(this)
            .setMessage(R.string.forget_sure)
            .setPositiveButton(R.string.forget) { _, _ -> forget() }
            .setNegativeButton(R.string.cancel, null)
            .show()
    }

    private fun forget() {
        doing({ sample.muster.eraseEverything() }) {
            say(getString(R.string.forgotten))
            night.isChecked = false
            show()
        }
    }

    private fun label(digit: Int) =
        button(digit.toString()) { keep(digit) }.apply { contentDescription = getString(R.string.keep_as, digit) }

    private fun button(words: Int, action: () -> Unit) = button(getString(words), action)

    private fun button(words: String, action: () -> Unit) =
        Button(this).apply {
            text = words
            setOnClickListener { action() }
        }

    private fun text(words: String) =
        TextView(this).apply {
            text = words
            setPadding(0, dp(PADDING_DP / 2), 0, dp(PADDING_DP / 2))
        }

    private fun row(vararg views: View) =
        LinearLayout(this).apply { for (view in views) addView(view, LinearLayout.LayoutParams(0, WRAP_CONTENT, 1f)) }

    private fun dp(size: Int) = (size * resources.displayMetrics.density).toInt()
}
