/** Sessions that the system runs. */
package dev.muster.device

import android.app.job.JobParameters
import android.app.job.JobService
import android.util.Log
import java.util.concurrent.ConcurrentHashMap
import kotlin.concurrent.thread

/**
 * A job of the system that runs one session, if the coordinator's time to return has come.
 *
 * The application is a [MusterProvider]. Where the manifest gives this service a process of its own, a graph that exhausts memory
 * does not take the app with it.
 */
public class SessionJob : JobService() {
    private val stops = ConcurrentHashMap<Int, Stop>()

    override fun onStartJob(job: JobParameters): Boolean {
        val provider = application as? MusterProvider
        if (provider == null) {
            Log.w(TAG, "no session: the application class must be a MusterProvider")
            return false
        }
        val stop = Stop()
        stops[job.jobId] = stop
        thread(name = "muster-session") {
            try {
                provider.muster.runIfDue(stop)
            } catch (error: Throwable) { // what nobody catches ends the app
                Log.w(TAG, "no session", error)
            } finally {
                if (stops.remove(job.jobId, stop)) jobFinished(job, false)
            }
        }
        return true
    }

    /** Stop at once. What the session owes is in the store, and the next one finishes it or gives it up. */
    override fun onStopJob(job: JobParameters): Boolean {
        stops.remove(job.jobId)?.set()
        return true
    }
}
