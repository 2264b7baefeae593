package dev.muster.device.secagg

import dev.muster.device.Ed25519Key
import dev.muster.device.Json
import dev.muster.device.PairKey
import dev.muster.device.damaged
import dev.muster.device.fromHex
import dev.muster.device.hex
import dev.muster.device.items
import dev.muster.device.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

private const val SLOT = "10"
private const val TIMES = 300
private val FROM_SERVER = listOf(0, 2, 4, 6, 8, 10, 12)

/** A device replays Python's session of SA1 byte by byte. */
class TranscriptTest {
    private val session = vectors("secagg/transcript.json")
    private val identity = Ed25519Key(bytes(session["identity_private_keys"][SLOT]))
    private val policy =
        AggregationPolicy(
            serverKey = Ed25519Key(bytes(session["server_private_key"])).publicKey,
            authority = Ed25519Key(bytes(session["authority_private_key"])).publicKey,
            minSum = 2,
        )
    private val held = HeldModel(ByteArray(32) { 1 }, ByteArray(32) { 2 })
    private val credential = bytes(session["sent"]["M1"][SLOT]).let { it.copyOfRange(it.size - 88, it.size) }

    private fun bytes(json: Json) = fromHex(json.text())

    private fun got(number: Int) = bytes(if (number == 0) session["M0"] else session["got_by_slot_10"]["M$number"])

    /** The draws of a device of the transcript, in turn. */
    private fun chance(slot: String): RandomSource {
        val drawn = session["drawn"][slot].items().iterator()
        return { bytes(drawn.next()) }
    }

    private fun input(
        slot: String = SLOT,
        vector: FloatArray = session["vectors"][slot].list { it.number().toFloat() }.toFloatArray(),
        weight: Long = slot.toLong(),
        held: HeldModel = this.held,
        lastRound: Long = -1,
        now: Long = 0,
    ) = SessionInput(vector, weight, held, credential, lastRound, now)

    private fun client(given: SessionInput = input(), policy: AggregationPolicy = this.policy) =
        Client(identity, policy, given, chance(SLOT))

    private fun upTo(last: Int) = client().also { one -> FROM_SERVER.filter { it < last }.forEach { one.receive(got(it)) } }

    @Test
    fun `every message of the device is Python's, byte by byte`() {
        val one = client()
        for (number in FROM_SERVER.dropLast(1)) {
            val reply = one.receive(got(number))
            assertEquals(session["sent"]["M${number + 1}"][SLOT].text(), hex(reply.message!!))
            assertEquals(number < 6, reply.keep == null)
        }
        assertThrows<OutOfOrder> { one.result }
        val last = one.receive(got(12))
        assertNull(last.message)
        assertNull(last.keep)
        assertTrue(one.result.summed)
        assertEquals(session["aggregate"]["digest"].text(), hex(one.result.aggregateHash))
        assertThrows<OutOfOrder> { one.receive(got(12)) }
    }

    @TestFactory
    fun `what every device advertised is Python's`(): List<DynamicTest> =
        session["sent"]["M1"].members().keys.map { slot ->
            dynamicTest("slot $slot") {
                val sent = bytes(session["sent"]["M1"][slot])
                val own = sent.copyOfRange(sent.size - 88, sent.size)
                val given = input(slot).run { SessionInput(vector, weight, held, own, lastRound, now) }
                val one = Client(Ed25519Key(bytes(session["identity_private_keys"][slot])), policy, given, chance(slot))
                assertArrayEquals(sent, one.receive(got(0)).message)
            }
        }

    @Test
    fun `a device that was restarted says again what it said`() {
        val keep = upTo(6).receive(got(6)).keep!!
        for (number in listOf(8, 10)) {
            val again = Client.restore(identity, policy, keep)
            if (number == 10) again.receive(got(8))
            repeat(2) {
                val message = again.receive(got(number)).message!!
                assertEquals(session["sent"]["M${number + 1}"][SLOT].text(), hex(message))
            }
        }
    }

    @Test
    fun `what is kept is the same after it was read, and loses what was revealed`() {
        val one = upTo(6)
        for (number in listOf(6, 8, 10)) {
            val keep = one.receive(got(number)).keep!!
            val state = ClientState.decode(keep)
            assertArrayEquals(keep, state.encoded())
            val revealed = state.peers.count { (it.seedShare.signum() == 0) != (it.keyShare.signum() == 0) }
            assertEquals(if (number == 10) state.peers.size else 0, revealed)
        }
    }

    @Test
    fun `another survivor set is refused, before and after the shares were revealed`() {
        val (confirmed, revealed) = upTo(10) to upTo(12)
        val other = got(8)
        other[other.size - 1] = (other.last().toInt() and (other.last().toInt() - 1)).toByte()
        assertThrows<InconsistentSurvivors> { confirmed.receive(other) }
        assertThrows<AlreadyRevealed> { revealed.receive(other) }
    }

    @Test
    fun `a message that is not due is refused, and ends the session`() {
        val one = upTo(4)
        assertThrows<OutOfOrder> { one.receive(got(2)) }
        assertThrows<OutOfOrder> { one.receive(got(4)) }
        assertThrows<OutOfOrder> { upTo(8).receive(got(10)) }
        assertThrows<Malformed> { upTo(2).receive(byteArrayOf(13)) }
        assertThrows<Malformed> { upTo(2).receive(ByteArray(0)) }
    }

    /** What reads a message of the server, given all that came before: the session itself takes far longer. */
    private fun reader(number: Int): (ByteArray) -> Unit {
        val invite = acceptInvitation(policy, got(0), held, -1)
        if (number == 0) return { acceptInvitation(policy, it, held, -1) }
        val (maskKey, boxKey) = chance(SLOT).let { PairKey(it(32)) to PairKey(it(32)) }
        val own = Advertisement(identity.publicKey, maskKey.publicKey, boxKey.publicKey, ByteArray(64), credential)
        val rosterOf = { data: ByteArray ->
            decodeRoster(data, invite.hash, invite.nMax).also { checkRoster(policy, invite, own, it, 0) }
        }
        if (number == 2) return { rosterOf(it) }
        val roster = rosterOf(got(2))
        val secrets = roster.neighbours.associate { it.position to agree(boxKey, it.device.boxKey) }
        val shared = Shared(input(), invite, roster, bytes(session["sid"]), PRIME, secrets, secrets)
        if (number == 4) return { openBoxes(shared, it) }
        val opened = openBoxes(shared, got(4))
        if (number == 6) return { included(opened, it) }
        val keep = upTo(number - 2).receive(got(number - 2)).keep!!
        return { Client.restore(identity, policy, keep).receive(it) }
    }

    @TestFactory
    fun `damaged bytes of a message are refused by name, or complained of`(): List<DynamicTest> =
        FROM_SERVER.map { number ->
            dynamicTest("M$number") {
                val read = reader(number)
                read(got(number))
                assertTrue(refusals(got(number), read) > TIMES / 10)
            }
        }

    @Test
    fun `a damaged state of a device is refused by name`() {
        val keep = upTo(6).receive(got(6)).keep!!
        assertTrue(refusals(keep) { ClientState.decode(it) } > TIMES / 10)
    }

    @TestFactory
    fun `a bit more or less of a message is refused, or complained of`(): List<DynamicTest> =
        FROM_SERVER.map { number ->
            dynamicTest("M$number") {
                val (read, message) = reader(number) to got(number)
                assertThrows<SecaggException> { read(message + 0) }
                assertThrows<SecaggException> { read(message.copyOf(message.size - 1)) }
                for (place in listOf(0, 1, 2, 20, message.size / 2, message.size - 1)) {
                    val bad = message.copyOf().also { it[place] = (it[place].toInt() xor 1).toByte() }
                    val complained = number == 4 && place > 35
                    if (complained) read(bad) else assertThrows<SecaggException> { read(bad) }
                }
            }
        }

    private fun refusals(data: ByteArray, read: (ByteArray) -> Unit): Int =
        (0 until TIMES).count { seed ->
            try {
                read(damaged(data, seed))
                false
            } catch (_: SecaggException) {
                true
            }
        }

    @Test
    fun `invitations for an answered round, another model or another layout are refused`() {
        assertThrows<ReplayedRound> { client(input(lastRound = 7)).receive(got(0)) }
        assertThrows<ModelMismatch> { client(input(held = HeldModel(ByteArray(32), held.layoutHash))).receive(got(0)) }
        assertThrows<ModelMismatch> { client(input(held = HeldModel(held.modelHash, ByteArray(32)))).receive(got(0)) }
    }

    @Test
    fun `a policy that wants a larger sum refuses the invitation`() {
        val strict = AggregationPolicy(policy.serverKey, policy.authority, minSum = 5)
        assertThrows<PolicyViolation> { client(policy = strict).receive(got(0)) }
    }

    @Test
    fun `what cannot be summed is refused before it is masked`() {
        val bad = listOf(input(vector = FloatArray(7) { Float.NaN }), input(vector = FloatArray(6)), input(weight = 65), input(weight = -1))
        for (given in bad) {
            val one = client(given)
            for (number in listOf(0, 2, 4)) one.receive(got(number))
            assertThrows<BadInput> { one.receive(got(6)) }
        }
    }

    @Test
    fun `a peer's credential that ended is refused`() {
        val one = client(input(now = 2_000_000_002))
        one.receive(got(0))
        assertThrows<ExpiredCredential> { one.receive(got(2)) }
    }
}
