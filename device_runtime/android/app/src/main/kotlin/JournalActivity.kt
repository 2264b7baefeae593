package dev.muster.sample

import android.app.Activity
import android.os.Bundle
import android.text.format.DateUtils
import android.view.Gravity
import android.widget.ArrayAdapter
import android.widget.FrameLayout
import android.widget.ListView
import android.widget.TextView
import dev.muster.device.Entry

/** What this device did, the newest first, as it happens. */
class JournalActivity : Activity() {
    private val list by lazy { ListView(this) }
    private val empty by lazy { TextView(this) }
    private var listening: AutoCloseable? = null

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        empty.gravity = Gravity.CENTER
        val both = FrameLayout(this).apply { fitsSystemWindows = true }
        both.addView(list)
        both.addView(empty)
        list.emptyView = empty
        setContentView(both)
    }

    override fun onStart() {
        super.onStart()
        listening = (application as SampleApplication).muster.listenToJournal { entries -> runOnUiThread { show(entries) } }
    }

    override fun onStop() {
        super.onStop()
        listening?.close()
    }

    private fun show(entries: List<Entry>) {
        list.adapter = ArrayAdapter(this, android.R.layout.simple_list_item_1, entries.asReversed().map(::line))
        empty.setText(R.string.no_session)
    }

    private fun line(entry: Entry): String {
        val flags = DateUtils.FORMAT_SHOW_DATE or DateUtils.FORMAT_SHOW_TIME
        val time = entry.at?.let { DateUtils.formatDateTime(this, it.toEpochMilli(), flags) }.orEmpty()
        val ended = entry.outcome
        val whom = ended?.target?.ifEmpty { null }?.let { "for devices with $it" }
        val facts = listOfNotNull(ended?.task, whom, ended?.ending?.text ?: entry.kind.text, ended?.reason, entry.detail)
        return "$time\n${facts.filter { it.isNotEmpty() }.joinToString(" · ")}"
    }
}
