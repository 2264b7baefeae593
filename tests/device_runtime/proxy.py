"""A proxy of a real coordinator that tests control: it sees every call, and may hold, slow, cut or change it."""

import http.client
import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Hold:
    """Stops one call and tells that it is there. The other side is never answered: whoever asked is to be killed."""

    def __init__(self):
        self.reached = threading.Event()
        self._over = threading.Event()

    def __call__(self):
        self.reached.set()
        self._over.wait(60)

    def end(self):
        self._over.set()


class Weather:
    """What befalls the requests on a road, drawn by seed; `shares` of fates are of requests, the rest pass.

    cut_up, cut_down: half a request, or half an answer, arrives, and the connection ends. flip_up, flip_down: a byte of
    a request, or of a blob, is another. twice: a request arrives again. late: it arrives after the one that was sent
    after it. Every request takes `latency_s`, and each of its bytes both ways its part of `bytes_per_s`.
    """

    def __init__(self, seed, latency_s=0.0, bytes_per_s=float("inf"), **shares):
        self.latency_s, self.bytes_per_s, self.shares = latency_s, bytes_per_s, shares
        self.befell = Counter()
        self._random, self._passing = random.Random(seed), threading.Condition()

    def fate(self):
        with self._passing:
            fates = ["", *self.shares]
            fate = self._random.choices(fates, [1 - sum(self.shares.values()), *self.shares.values()])[0]
            self.befell[fate] += 1
            return fate

    def take(self, size_bytes):
        time.sleep(self.latency_s + size_bytes / self.bytes_per_s)

    def let_one_pass(self):
        with self._passing:
            self._passing.wait(0.5)

    def passed(self):
        with self._passing:
            self._passing.notify_all()

    def flipped(self, data):
        if not data:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


class Proxy:
    """`before[call]` and `after[call]` are played first, one per call: before it is passed on, or before its answer is.

    `change[call]` alters an answer's body; `slow_s` is waited after every `piece` bytes of a blob. `weather` befalls
    whatever else there is.
    """

    def __init__(self, coordinator):
        self.url = ""
        self.target = urlsplit(coordinator).netloc
        self.before, self.after = defaultdict(list), defaultdict(list)
        self.change = {}
        self.calls, self.reports, self.ranges = [], [], []
        self.slow_s, self.piece = 0.0, 1000
        self.weather = Weather(0)


def call_of(path):
    names = {"checkins": "check-in", "assignments": "assignment", "report": "report", "devices": "enrol"}
    if path.startswith("/page/"):
        return "page"
    if "/models/" in path:
        return "model"
    last = path.rsplit("/", 1)[-1]
    return "abort" if last.endswith(":abort") else names.get(last, "blob")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def handle_any(self):
        road, call = self.server.road, call_of(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        road.calls.append(call)
        if call == "report":
            road.reports.append((self.path, body))
        if call == "blob":
            road.ranges.append(self.headers.get("Range"))
        if road.before[call]:
            road.before[call].pop(0)()
        weather = road.weather
        fate = weather.fate()
        weather.take(len(body))
        if fate == "cut_up":
            self.cut_up(body)
            return
        if fate == "late":
            weather.let_one_pass()
        answer, data = self.ask(weather.flipped(body) if fate == "flip_up" else body)
        weather.passed()
        if fate == "twice":
            self.ask(body)
        if road.after[call]:
            road.after[call].pop(0)()
        if fate == "flip_down" and call == "blob":
            data = weather.flipped(data)
        weather.take(len(data))
        data = road.change.get(call, lambda data: data)(data)
        self.respond(answer, data, road.slow_s if call == "blob" else 0, half=fate == "cut_down")

    def ask(self, body):
        connection = http.client.HTTPConnection(self.server.road.target, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer, data

    def cut_up(self, body):
        """Half of the request reaches the coordinator, and nothing comes back."""
        self.close_connection = True
        connection = http.client.HTTPConnection(self.server.road.target, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body[: len(body) // 2])
        connection.close()

    def respond(self, answer, data, slow_s, half=False):
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if half:
            self.close_connection = True
            data = data[: len(data) // 2]
        piece = self.server.road.piece
        for start in range(0, len(data), piece):
            self.wfile.write(data[start : start + piece])
            if slow_s:
                self.wfile.flush()
                time.sleep(slow_s)

    def log_message(self, *_):
        pass


for method in ("GET", "POST", "PUT", "HEAD", "PATCH"):
    setattr(Handler, f"do_{method}", Handler.handle_any)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # a device that was killed hangs up in the middle


@contextmanager
def road_to(coordinator):
    """A road to the coordinator at this URL; it begins at `url`."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.road = Proxy(coordinator)
        server.road.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.road
        finally:
            for holds in (*server.road.before.values(), *server.road.after.values()):
                for hold in holds:
                    hold.end()
            server.shutdown()
            thread.join()
