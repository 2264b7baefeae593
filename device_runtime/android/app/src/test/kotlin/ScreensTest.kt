package dev.muster.sample

import android.app.Activity
import android.graphics.Bitmap
import android.graphics.Canvas
import android.os.Looper
import android.view.View
import android.view.ViewGroup
import android.widget.Button
import android.widget.TextView
import dev.muster.device.FakeKeystore
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode
import java.io.File

private const val PATIENCE_MS = 10_000

/** What a person sees and does, drawn by Android's own code. The pictures are in target/screens. */
@RunWith(RobolectricTestRunner::class)
@GraphicsMode(GraphicsMode.Mode.NATIVE)
@Config(sdk = [35], qualifiers = "w360dp-h640dp-xhdpi")
class ScreensTest {
    @Before
    fun install() = FakeKeystore.install()

    @Test
    fun `a digit that is drawn and labelled is kept`() {
        val activity = opened(MainActivity::class.java)
        draw(activity)
        shot(activity, "draw")
        press(activity, "Keep as 7")
        until { "1 digit is kept." in texts(activity) }
        press(activity, "Keep as 7")
        until { "Draw a digit first." in texts(activity) }
        shot(activity, "kept")
    }

    @Test
    fun `without a model the app says what to do`() {
        val activity = opened(MainActivity::class.java)
        draw(activity)
        press(activity, "Read it")
        until { "There is no model yet" in texts(activity) }
    }

    @Test
    @Config(qualifiers = "ar-w360dp-h640dp-night-xhdpi")
    fun `in Arabic the screen runs from right to left, and at night it is dark`() {
        val activity = opened(MainActivity::class.java)
        draw(activity)
        assertEquals(View.LAYOUT_DIRECTION_RTL, activity.window.decorView.layoutDirection)
        assertTrue("اقرأه" in texts(activity))
        shot(activity, "arabic-night")
    }

    @Test
    fun `the journal is empty at first`() {
        val activity = opened(JournalActivity::class.java)
        until { "No session yet." in texts(activity) }
        shot(activity, "journal")
    }

    @Test
    fun `everything that can be pressed has a label`() {
        val activity = opened(MainActivity::class.java)
        for (view in views(activity).filter { it.isClickable || it is PadView }) {
            val label = view.contentDescription ?: (view as? TextView)?.text
            assertTrue("$view", !label.isNullOrEmpty())
        }
    }

    private fun <T : Activity> opened(screen: Class<T>): T = Robolectric.buildActivity(screen).setup().get()

    private fun draw(activity: Activity) {
        val pad = views(activity).filterIsInstance<PadView>().single()
        for ((row, column) in listOf(1.5f to 2f, 1.5f to 5.5f, 6.5f to 3.5f)) pad.strokeTo(row, column)
    }

    private fun press(activity: Activity, words: String) =
        views(activity).filterIsInstance<Button>().first { words in listOf(it.contentDescription, it.text).map { label -> "$label" } }.performClick()

    private fun texts(activity: Activity) = views(activity).filterIsInstance<TextView>().joinToString("\n") { it.text }

    private fun views(activity: Activity): List<View> = below(activity.window.decorView)

    private fun below(view: View): List<View> = listOf(view) + ((view as? ViewGroup)?.let { group -> (0 until group.childCount).flatMap { below(group.getChildAt(it)) } }.orEmpty())

    /** Wait for work that the app does on a thread of its own. */
    private fun until(holds: () -> Boolean) {
        repeat(PATIENCE_MS / 10) {
            shadowOf(Looper.getMainLooper()).idle()
            if (holds()) return
            Thread.sleep(10)
        }
        throw AssertionError("it did not come to hold")
    }

    private fun exactly(size: Int) = View.MeasureSpec.makeMeasureSpec(size, View.MeasureSpec.EXACTLY)

    private fun shot(activity: Activity, name: String) {
        shadowOf(Looper.getMainLooper()).idle()
        val view = activity.window.decorView
        view.measure(exactly(view.width), exactly(view.height))
        view.layout(0, 0, view.width, view.height)
        val picture = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
        view.draw(Canvas(picture))
        val file = File(System.getProperty("screens")!!, "$name.png").apply { parentFile!!.mkdirs() }
        file.outputStream().use { assertTrue(picture.compress(Bitmap.CompressFormat.PNG, 100, it)) }
    }
}
