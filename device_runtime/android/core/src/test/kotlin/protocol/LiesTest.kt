package dev.muster.device.protocol

import dev.muster.device.BadAnswer
import dev.muster.device.BytesMoved
import dev.muster.device.DeviceException
import dev.muster.device.Ed25519Key
import dev.muster.device.Refused
import dev.muster.device.Stop
import dev.muster.device.TransportException
import dev.muster.device.Unreachable
import dev.muster.device.sessions.Coordinator
import dev.muster.device.sessions.RoundPlatform
import okhttp3.Cookie
import okhttp3.CookieJar
import okhttp3.HttpUrl
import okhttp3.HttpUrl.Companion.toHttpUrl
import okhttp3.OkHttpClient
import org.junit.jupiter.api.AfterEach
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertFalse
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import java.net.InetAddress
import java.net.ServerSocket
import java.net.Socket
import java.util.concurrent.CopyOnWriteArrayList
import kotlin.concurrent.thread

private const val HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

/** A call ends in time, and with the right error, whatever a server does. */
class LiesTest {
    private val server = ServerSocket(0, 50, InetAddress.getLoopbackAddress())
    private val heads = CopyOnWriteArrayList<String>()
    private val base = "http://127.0.0.1:${server.localPort}".toHttpUrl()

    @AfterEach
    fun close() = server.close()

    /** Answer each request on a connection of its own, by what `answer` does with it. */
    private fun answering(answer: (Socket) -> Unit) {
        thread(isDaemon = true) {
            while (!server.isClosed) {
                val socket = runCatching { server.accept() }.getOrNull() ?: break
                thread(isDaemon = true) { runCatching { socket.use { answer(it.also { heads += head(it) }) } } }
            }
        }
    }

    private fun head(socket: Socket): String {
        val lines = generateSequence(socket.getInputStream().bufferedReader()::readLine).takeWhile { it.isNotEmpty() }
        return lines.joinToString("\n")
    }

    private fun Socket.say(text: String) = getOutputStream().write(text.toByteArray())

    private fun call(
        http: OkHttpClient = OkHttpClient(),
        most: Long = 1000,
        timeoutS: Double = 5.0,
        stop: Stop? = Stop(),
        url: HttpUrl = base,
    ): Answer {
        val platform = object : RoundPlatform(Coordinator()) { override val http = http }
        val call = Call("GET", "/v1/x", timeoutS = timeoutS, most = most, cancelled = stop)
        return send(platform, url, call, Signer("d", Ed25519Key(ByteArray(32))), 1, BytesMoved())
    }

    /** The error of a call that is stopped after 0.2 s, which must end within a second. */
    private fun stopped(call: (Stop) -> Answer): DeviceException {
        val stop = Stop()
        thread(isDaemon = true) { Thread.sleep(200).also { stop.set() } }
        return within(1.2) { call(stop) }
    }

    private fun within(seconds: Double, call: () -> Answer): DeviceException {
        val began = System.nanoTime()
        val error = assertThrows<DeviceException> { call() }
        val passedS = (System.nanoTime() - began) / 1e9
        assertTrue(passedS < seconds, "$passedS s: $error")
        return error
    }

    private fun drip(socket: Socket) {
        socket.say("${HEAD}Content-Length: 900\r\n\r\n")
        repeat(900) {
            socket.say(" ")
            Thread.sleep(100)
        }
    }

    @Test
    fun `a request that is asked for again at once is not sent again with the same nonce`() {
        answering { it.say("HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n") }
        assertEquals(503, assertThrows<Refused> { call() }.status)
        assertEquals(1, heads.size)
    }

    @Test
    fun `a redirection is refused`() {
        answering { it.say("HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n") }
        assertEquals("http-302", assertThrows<Refused> { call() }.reason)
        assertEquals(1, heads.size)
    }

    @Test
    fun `what is no answer of HTTP is an error of transport`() {
        val lies =
            listOf(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
                "HTTP/1.1 100 Continue\r\n\r\n".repeat(3),
                "${HEAD}Content-Length: 2\r\nContent-Length: 900\r\n\r\n{}",
                "${HEAD}Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
                "${HEAD}X: ${"x".repeat(1 shl 20)}\r\n\r\n",
                "HTTP/9.9 abc\r\n\r\n",
                "SSH-2.0-OpenSSH\r\n",
                "\u0000\u0000\u0012\u0004\u0000",
            )
        val left = lies.iterator()
        answering { it.say(left.next()) }
        for (lie in lies) {
            val error = assertThrows<TransportException>(lie.take(90)) { call(timeoutS = 0.5) }
            assertTrue(error.message!!.length < 700, error.message)
        }
    }

    @Test
    fun `an answer without end is cut at the most that is wanted`() {
        answering { socket ->
            socket.say("${HEAD}Transfer-Encoding: chunked\r\n\r\n")
            while (true) socket.say("100\r\n${" ".repeat(256)}\r\n")
        }
        assertThrows<BadAnswer> { call() }
    }

    @Test
    fun `half an answer is none`() {
        answering { it.say("${HEAD}Content-Length: 900\r\n\r\n{}") }
        assertThrows<Unreachable> { call() }
    }

    @Test
    fun `packed bytes are not unpacked`() {
        answering { it.say("${HEAD}Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nbomb") }
        assertEquals("bomb", String(call().body))
    }

    @Test
    fun `a stopped call ends within a second while the body comes byte by byte`() {
        answering(::drip)
        stopped { call(stop = it) }
    }

    @Test
    fun `a call on leaving is short, although the body comes byte by byte`() {
        answering(::drip)
        within(2.0) { call(stop = null, timeoutS = 1.0) }
    }

    @Test
    fun `a stopped call ends within a second while it looks for the server`() {
        val slow = OkHttpClient.Builder().dns { Thread.sleep(5000).let { _ -> emptyList() } }.build()
        stopped { call(slow, stop = it, url = "http://fl.example".toHttpUrl()) }
        within(2.0) { call(slow, stop = null, timeoutS = 1.0, url = "http://fl.example".toHttpUrl()) }
    }

    @Test
    fun `a stopped call ends within a second while it connects`() {
        ServerSocket(0, 1, InetAddress.getLoopbackAddress()).use { full ->
            val waiting = List(8) { Socket() } // those that nobody accepts fill the queue
            waiting.forEach { socket -> thread(isDaemon = true) { runCatching { socket.connect(full.localSocketAddress) } } }
            Thread.sleep(200)
            stopped { call(stop = it, url = "http://127.0.0.1:${full.localPort}".toHttpUrl()) }
            waiting.forEach(Socket::close)
        }
    }

    @Test
    fun `a connection that is kept is used again`() {
        val sources = CopyOnWriteArrayList<Int>()
        answering { socket ->
            while (true) {
                sources += socket.port
                socket.say("${HEAD}Content-Length: 2\r\n\r\n{}")
                head(socket)
            }
        }
        val http = OkHttpClient()
        val name = "http://localhost:${server.localPort}".toHttpUrl()
        repeat(3) { call(http, url = name) }
        assertEquals(listOf(1, 3), listOf(sources.toSet().size, sources.size))
    }

    @Test
    fun `cookies of an app's client are not sent, nor kept`() {
        val jar =
            object : CookieJar {
                var isAsked = false

                override fun loadForRequest(url: HttpUrl) = emptyList<Cookie>().also { isAsked = true }

                override fun saveFromResponse(url: HttpUrl, cookies: List<Cookie>) = loadForRequest(url).let { }
            }
        answering { it.say("${HEAD}Set-Cookie: id=1\r\nContent-Length: 2\r\n\r\n{}") }
        call(OkHttpClient.Builder().cookieJar(jar).build())
        assertFalse(jar.isAsked)
    }
}
