package dev.muster.device.permission
import dev.muster.device.wire.Assignment
internal fun checkRelease(platform: dev.muster.device.Platform, place: Place, given: Assignment, again: Boolean): Unit = TODO("$platform $place $given $again")
internal fun checkModel(given: Assignment, broadcast: Map<String, FloatArray>): Unit = TODO("$given $broadcast")
