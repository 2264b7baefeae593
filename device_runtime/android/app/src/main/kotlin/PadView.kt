/** The drawing pad: 8 × 8 cells of ink, as the model reads digits. */
package dev.muster.sample

import android.content.Context
import android.graphics.Canvas
import android.graphics.Paint
import android.util.TypedValue
import android.view.MotionEvent
import android.view.View
import kotlin.math.abs
import kotlin.math.ceil
import kotlin.math.floor
import kotlin.math.max
import kotlin.math.min

internal const val SIDE = 8

/** Ink beside a stroke, as a scanned digit has. */
private const val BESIDE = 0.3f

internal class PadView(context: Context) : View(context) {
    private val paint = Paint()
    private val levels = FloatArray(SIDE * SIDE)
    private var pen: Pair<Float, Float>? = null
    private val ink = colourOf(android.R.attr.textColorPrimary)
    private val line = colourOf(android.R.attr.textColorSecondary)

    init {
        contentDescription = context.getString(R.string.pad)
        isFocusable = true
    }

    /** The ink of every cell, from 0 to 1, row by row; a copy. */
    val drawn: FloatArray get() = levels.copyOf()

    val isEmpty: Boolean get() = levels.all { it == 0f }

    fun wipe() {
        levels.fill(0f)
        pen = null
        invalidate()
    }

    /** Ink every cell from the last place of the pen to this one, in cells: a fast finger is seen at few places. */
    fun strokeTo(row: Float, column: Float) {
        val (fromRow, fromColumn) = pen ?: (row to column)
        val steps = max(1, ceil(2 * max(abs(row - fromRow), abs(column - fromColumn))).toInt())
        for (step in 1..steps) {
            val part = step.toFloat() / steps
            inkAt(floor(fromRow + part * (row - fromRow)).toInt(), floor(fromColumn + part * (column - fromColumn)).toInt())
        }
        pen = row to column
        invalidate()
    }

    private fun inkAt(row: Int, column: Int) {
        for ((down, right) in listOf(0 to 0, -1 to 0, 1 to 0, 0 to -1, 0 to 1)) {
            val (y, x) = row + down to column + right
            if (y !in 0 until SIDE || x !in 0 until SIDE) continue
            levels[SIDE * y + x] = max(levels[SIDE * y + x], if (down == 0 && right == 0) 1f else BESIDE)
        }
    }

    override fun onTouchEvent(event: MotionEvent): Boolean {
        if (event.actionMasked == MotionEvent.ACTION_DOWN) pen = null
        when (event.actionMasked) {
            MotionEvent.ACTION_DOWN, MotionEvent.ACTION_MOVE -> {
                parent.requestDisallowInterceptTouchEvent(true)
                strokeTo(SIDE * event.y / height, SIDE * event.x / width)
            }
            MotionEvent.ACTION_UP -> performClick()
        }
        return true
    }

    override fun performClick(): Boolean {
        super.performClick()
        return true
    }

    override fun onMeasure(width: Int, height: Int) {
        val side = min(MeasureSpec.getSize(width), (LARGEST_DP * resources.displayMetrics.density).toInt())
        setMeasuredDimension(side, side)
    }

    override fun onDraw(canvas: Canvas) {
        val cell = width / SIDE.toFloat()
        for (place in levels.indices) {
            val (top, left) = place / SIDE * cell to place % SIDE * cell
            paint.style = Paint.Style.FILL
            paint.color = ink
            paint.alpha = (255 * levels[place]).toInt()
            canvas.drawRect(left, top, left + cell, top + cell, paint)
            paint.style = Paint.Style.STROKE
            paint.color = line
            paint.alpha = 60
            canvas.drawRect(left, top, left + cell, top + cell, paint)
        }
    }

    private fun colourOf(attribute: Int): Int {
        val found = TypedValue()
        context.theme.resolveAttribute(attribute, found, true)
        return if (found.resourceId == 0) found.data else context.getColor(found.resourceId)
    }

    private companion object {
        const val LARGEST_DP = 200
    }
}
