/** Damage to bytes, drawn by seed, as in the tests of the device in TypeScript. */
package dev.muster.device

import kotlin.random.Random

/** Bytes with up to four changed, some cut off, or some twice: the same in every run. */
internal fun damaged(data: ByteArray, seed: Int): ByteArray {
    val random = Random(seed)
    if (data.isEmpty()) return byteArrayOf(seed.toByte())
    val found = data.copyOf()
    repeat(1 + random.nextInt(4)) { found[random.nextInt(data.size)] = random.nextInt().toByte() }
    val place = random.nextInt(data.size)
    return when (random.nextInt(4)) {
        0 -> found.copyOf(place)
        1 -> found.copyOf(place) + found.copyOfRange(random.nextInt(data.size), data.size)
        else -> found
    }
}
