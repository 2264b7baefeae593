/** Collections of numbers without an object for each. */
package dev.muster.device.texts

private const val FIRST_SIZE = 16

/** A list of integers. */
internal class Ints {
    private var values = IntArray(FIRST_SIZE)

    var size = 0
        private set

    operator fun get(place: Int): Int = values[place]

    fun add(value: Int) {
        if (size == values.size) values = values.copyOf(2 * size)
        values[size++] = value
    }

    fun addAll(more: IntArray) {
        while (values.size < size + more.size) values = values.copyOf(2 * values.size)
        more.copyInto(values, size)
        size += more.size
    }

    fun removeLast(): Int = values[--size]

    fun clear() {
        size = 0
    }

    fun toArray(): IntArray = values.copyOf(size)
}

/** Integers from 0 on by keys from 0 on: a table with open addressing, at most half full. */
internal class LongMap {
    private var keys = LongArray(FIRST_SIZE).also { it.fill(NONE) }
    private var values = IntArray(FIRST_SIZE)
    private var size = 0

    /** The value of a key; -1 if there is none. */
    operator fun get(key: Long): Int {
        val place = placeOf(key)
        return if (keys[place] == key) values[place] else -1
    }

    operator fun set(key: Long, value: Int) {
        val place = placeOf(key)
        if (keys[place] == NONE && ++size > keys.size / 2) {
            grow()
            return put(placeOf(key), key, value)
        }
        put(place, key, value)
    }

    private fun put(place: Int, key: Long, value: Int) {
        keys[place] = key
        values[place] = value
    }

    private fun placeOf(key: Long): Int {
        val mixed = key * MIXER
        var place = (mixed xor (mixed ushr 32)).toInt() and keys.size - 1
        while (keys[place] != key && keys[place] != NONE) place = place + 1 and keys.size - 1
        return place
    }

    private fun grow() {
        val (oldKeys, oldValues) = keys to values
        keys = LongArray(2 * oldKeys.size).also { it.fill(NONE) }
        values = IntArray(keys.size)
        for (place in oldKeys.indices) if (oldKeys[place] != NONE) put(placeOf(oldKeys[place]), oldKeys[place], oldValues[place])
    }

    private companion object {
        const val NONE = -1L
        const val MIXER = -0x61c8864680b583ebL // 2⁶⁴ divided by the golden ratio
    }
}

/** Integers of which the least comes out first. */
internal class Heap(private val work: Work) {
    private var all = LongArray(FIRST_SIZE)
    private var size = 0

    fun push(one: Long) {
        if (size == all.size) all = all.copyOf(2 * size)
        var at = size++
        while (at > 0 && one < all[(at - 1) / 2]) {
            all[at] = all[(at - 1) / 2]
            at = (at - 1) / 2
            work.spend(1)
        }
        all[at] = one
        work.spend(1)
    }

    /** The least; -1 if there is none. */
    fun pop(): Long {
        if (size == 0) return -1
        val first = all[0]
        val last = all[--size]
        var at = 0
        var down = 1
        while (down < size) {
            if (down + 1 < size && all[down + 1] < all[down]) down++
            if (all[down] >= last) break
            all[at] = all[down]
            at = down
            down = 2 * at + 1
            work.spend(1)
        }
        all[at] = last
        work.spend(1)
        return first
    }
}
