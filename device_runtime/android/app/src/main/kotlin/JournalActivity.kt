package dev.muster.sample

import android.app.Activity
import android.os.Bundle
import android.text.format.DateUtils
import android.view.Gravity
import android.widget.ArrayAdapter
import android.widget.FrameLayout
import android.widget.ListView
import android.widget.TextView
import kotlin.concurrent.thread

/** What this device did, the newest first. */
class JournalActivity : Activity() {
    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        val list = ListView(this)
        val empty = TextView(this).apply { gravity = Gravity.CENTER }
        val both = FrameLayout(this).apply { fitsSystemWindows = true }
        both.addView(list)
        both.addView(empty)
        list.emptyView = empty
        setContentView(both)
        thread {
            val lines = (application as SampleApplication).muster.journal().asReversed().map(::line)
            runOnUiThread {
                list.adapter = ArrayAdapter(this, android.R.layout.simple_list_item_1, lines)
                empty.setText(R.string.no_session)
            }
        }
    }

    private fun line(entry: Map<String, Any?>): String {
        val at = ((entry["at"] as Number).toDouble() * 1000).toLong()
        val time = DateUtils.formatDateTime(this, at, DateUtils.FORMAT_SHOW_DATE or DateUtils.FORMAT_SHOW_TIME)
        val place = entry["task"]?.toString().orEmpty()
        val facts = listOf(place, entry["outcome"], entry["reason"], entry["detail"]).filter { it?.toString().orEmpty().isNotEmpty() }
        return "$time\n${facts.joinToString(" · ")}"
    }
}
