package dev.muster.device

import android.app.ActivityManager
import android.app.Application
import android.app.job.JobInfo
import android.app.job.JobScheduler
import android.content.Intent
import android.net.ConnectivityManager
import android.net.NetworkCapabilities
import android.os.BatteryManager
import android.os.PowerManager
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Before
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.shadows.ShadowNetworkCapabilities
import org.robolectric.shadows.ShadowStatFs

/** The phone's conditions are read, a job has them as its constraints, and no session begins where they do not hold. */
@RunWith(RobolectricTestRunner::class)
@Config(manifest = Config.NONE, sdk = [35])
class PhoneTest {
    private val context: Application = RuntimeEnvironment.getApplication()
    private val folder = context.noBackupFilesDir
    private val power = shadowOf(context.service<PowerManager>())

    private fun battery(level: Int, plugged: Int) {
        val intent = Intent(Intent.ACTION_BATTERY_CHANGED)
        intent.putExtra(BatteryManager.EXTRA_LEVEL, level).putExtra(BatteryManager.EXTRA_SCALE, 200)
        @Suppress("DEPRECATION")
        context.sendStickyBroadcast(intent.putExtra(BatteryManager.EXTRA_PLUGGED, plugged))
    }

    private fun network(isUnmetered: Boolean) {
        val networks = context.service<ConnectivityManager>()
        val capabilities = ShadowNetworkCapabilities.newInstance()
        if (isUnmetered) shadowOf(capabilities).addCapability(NetworkCapabilities.NET_CAPABILITY_NOT_METERED)
        shadowOf(networks).setNetworkCapabilities(networks.activeNetwork, capabilities)
    }

    private fun muster(requirements: Requirements = Requirements()) =
        Muster.builder(context).coordinator("https://fl.example", "phones").requirements(requirements).allowMainThread().build()

    @Before
    fun restingPhone() {
        FakeKeystore.install()
        battery(160, BatteryManager.BATTERY_PLUGGED_AC)
        network(isUnmetered = true)
        power.turnScreenOn(false)
        ShadowStatFs.registerStats(folder, 1000, 500, 400)
    }

    @Test
    fun `battery, plug, power saver, screen, network and storage are read`() {
        val resting = conditionsOf(context, folder)
        assertEquals(listOf(true, true, true), listOf(resting.charging, resting.idle, resting.unmetered))
        assertEquals(0.8, resting.battery!!, 0.0)
        assertEquals(400L * ShadowStatFs.BLOCK_SIZE, resting.freeStorageBytes)
        power.setIsPowerSaveMode(true)
        assertEquals(false, conditionsOf(context, folder).charging)
        battery(20, 0)
        network(isUnmetered = false)
        power.turnScreenOn(true)
        val busy = conditionsOf(context, folder)
        assertEquals(listOf(false, false, false), listOf(busy.charging, busy.idle, busy.unmetered))
        assertEquals(0.1, busy.battery!!, 0.0)
    }

    @Test
    fun `the system's session waits until the requirements hold`() {
        assertEquals(emptyList<String>(), Requirements(minFreeStorageBytes = 0).unmet(conditionsOf(context, folder)))
        assertEquals(listOf("too little storage is free"), Requirements().unmet(conditionsOf(context, folder)))
        battery(20, 0)
        network(isUnmetered = false)
        val unmet = Requirements(minBattery = 0.5, minFreeStorageBytes = 0).unmet(conditionsOf(context, folder))
        assertEquals(listOf("the phone does not charge", "the network is metered, or there is none", "the battery is too low"), unmet)
        muster().use { muster ->
            assertNull(muster.runIfDue(Stop()))
            assertEquals(emptyList<Any>(), muster.journal())
        }
    }

    @Test
    fun `the system's job has the requirements as its constraints`() {
        muster(Requirements(idle = false)).use { muster ->
            muster.schedule()
            val job = context.service<JobScheduler>().allPendingJobs.single()
            assertTrue(job.isRequireCharging && job.isPersisted && !job.isRequireDeviceIdle)
            assertEquals(15 * 60_000L, job.intervalMillis)
            assertEquals(SessionJob::class.java.name, job.service.className)
            @Suppress("DEPRECATION")
            assertEquals(JobInfo.NETWORK_TYPE_UNMETERED, job.networkType)
            muster.unschedule()
            assertTrue(context.service<JobScheduler>().allPendingJobs.isEmpty())
        }
    }

    @Test
    fun `a session on a warm phone ends at once, and the app hears why`() {
        power.setCurrentThermalStatus(PowerManager.THERMAL_STATUS_SEVERE)
        muster().use { muster ->
            val heard = ArrayList<String>()
            val outcome = muster.listen { heard += it.detail }.use { muster.sessionAsync().get() }
            assertEquals(Ending.NOT_NOW, outcome.ending)
            assertEquals(listOf("the phone is warm, of thermal status 3", outcome.detail), heard + heard)
            assertEquals(outcome, muster.journal().last().outcome)
        }
    }

    @Test
    fun `no session begins on a phone that is short of memory`() {
        shadowOf(context.service<ActivityManager>()).setMemoryInfo(ActivityManager.MemoryInfo().apply { lowMemory = true })
        muster().use { assertEquals("the phone is short of memory", it.sessionAsync().get().detail) }
    }
}
