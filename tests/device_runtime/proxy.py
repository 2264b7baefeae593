"""A road to a real coordinator on which a test can stand: it sees every call, and may hold, slow, cut or change it."""

import http.client
import threading
import time
from collections import defaultdict
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


class Road:
    """`before[call]` and `after[call]` are played first, one per call: before it is passed on, or before its answer is.

    `change[call]` alters an answer's body; `slow_s` is waited after every `piece` bytes of a blob.
    """

    def __init__(self, coordinator):
        self.url = ""
        self.target = urlsplit(coordinator).netloc
        self.before, self.after = defaultdict(list), defaultdict(list)
        self.change = {}
        self.calls, self.reports, self.ranges = [], [], []
        self.slow_s, self.piece = 0.0, 1000


def call_of(path):
    names = {"checkins": "check-in", "assignments": "assignment", "report": "report", "devices": "enrol"}
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
        connection = http.client.HTTPConnection(road.target, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if road.after[call]:
            road.after[call].pop(0)()
        self.respond(answer, road.change.get(call, lambda data: data)(data), road.slow_s if call == "blob" else 0)

    def respond(self, answer, data, slow_s):
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        piece = self.server.road.piece
        for start in range(0, len(data), piece):
            self.wfile.write(data[start : start + piece])
            if slow_s:
                self.wfile.flush()
                time.sleep(slow_s)

    def log_message(self, *_):
        pass


for method in ("GET", "POST", "PUT"):
    setattr(Handler, f"do_{method}", Handler.handle_any)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # a device that was killed hangs up in the middle


@contextmanager
def road_to(coordinator):
    """A road to the coordinator at this URL; it begins at `url`."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.road = Road(coordinator)
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
