package dev.muster.device.texts
import dev.muster.device.Examples
import dev.muster.device.plans.*
internal fun tokenized(plan: Plan, stored: Examples, blob: (BlobRef) -> ByteArray, keepGoing: () -> Boolean): Pair<Examples, Int> = TODO("$plan $stored $blob $keepGoing")
