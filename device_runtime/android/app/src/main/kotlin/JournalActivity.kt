package dev.muster.sample

import android.app.Activity
import android.os.Bundle
import android.text.format.DateUtils
import android.view.Gravity
import android.widget.ArrayAdapter
import android.widget.FrameLayout
import android.widget.ListView
import android.widget.TextView

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

    private fun show(entries: List<Map<String, Any?>>) {
        list.adapter = ArrayAdapter(this, android.R.layout.simple_list_item_1, entries.asReversed().map(::line))
        empty.setText(R.string.no_session)
    }

    private fun line(entry: Map<String, Any?>): String {
        val at = ((entry["at"] as Number).toDouble() * 1000).toLong()
        val time = DateUtils.formatDateTime(this, at, DateUtils.FORMAT_SHOW_DATE or DateUtils.FORMAT_SHOW_TIME)
        val place = entry["task"]?.toString().orEmpty()
        val facts = listOf(place, entry["outcome"], entry["reason"], entry["detail"]).filter { it?.toString().orEmpty().isNotEmpty() }
        return "$time\n${facts.joinToString(" · ")}"
    }
}
