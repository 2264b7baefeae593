"""A coordinator small enough to read: real HTTP on a real port, one assignment, and faults on demand."""

import hashlib
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import numpy as np

from fedcore import checkpoint
from fedcore.plan import BlobRef
from fedcore.wire import messages
from fedcore.wire.signatures import COVERED, SIGNED_FIELDS, PublicKey, SignableRequest, Signature, content_digest
from tests.device_runtime import linear

WINDOW = messages.RetryWindow(11.0, 12.0)
ACCEPTED = messages.Accepted("s-1", (messages.Offer(task="t-1", collection="default"),))


class Resent(Exception):
    """A request came before, with the same nonce."""


class Coordinator:
    """Offers one assignment of the linear plan. `faults[call]` are played first, one per well-signed request."""

    def __init__(self):
        self.url = ""
        self.calls = []
        self.willing = []
        self.checkins, self.aborts, self.reports, self.headers = [], [], [], []
        self.faults = defaultdict(list)
        self.forged, self.stale = [], []
        self.may_resend = False  # whether a device's HTTP stack may send a request twice, as a browser does
        self.held = threading.Event()
        self.report_within_s = 60.0
        self.lost_after_s, self.over_selected = None, False
        self.given = 1
        self.invite, self.said = None, []
        self.parties, self.issue, self.issued = lambda url: None, None, []
        self.release, self.lineage, self.round = lambda plan, checkpoint: None, None, linear.KEY.round
        self.server = None
        self.aggregate, self.hear = lambda number, message: b"", None
        self.attempt = 1
        self.lies = {}  # fields of assignments that are others than they would be
        self.keys, self.created, self.enrolments, self.nonces = {}, {}, [], set()
        self.blobs, self.models = {}, {}
        self.parts, self.cuts = bytearray(), []
        self.counted, self.unheard = None, 0
        self.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})

    def offer(self, plan, graphs, vectors):
        plan_bytes = plan if isinstance(plan, bytes) else plan.encode()
        vector_bytes = checkpoint.encode(vectors)
        self.plan, self.checkpoint = BlobRef.of(plan_bytes), BlobRef.of(vector_bytes)
        for blob in (plan_bytes, vector_bytes, *graphs.values()):
            self.blobs[BlobRef.of(blob).sha256] = blob

    def assignment(self):
        given = messages.Assignment(
            assignment=f"a-{self.given}",
            task="t-1",
            round=self.round,
            attempt=self.attempt,
            slot=linear.KEY.slot,
            seed=linear.KEY.seed,
            plan=self.plan,
            checkpoint=self.checkpoint,
            report_within_s=self.report_within_s,
            lost_after_s=self.lost_after_s,
            over_selected=self.over_selected,
            secagg=self.invite and self.invite(self.plan, self.checkpoint),
            release=self.release(self.plan, self.checkpoint),
            lineage=self.lineage,
            server=self.server,
        )
        return msgspec.structs.replace(given, **self.lies)

    def heard(self, call, body):
        """Note a well-signed request; the fault that is played for it, if any."""
        if call == "check-in":
            self.checkins.append(messages.decode(body, messages.CheckIn))
        return self.faults[call].pop(0) if self.faults[call] else None

    def answer(self, method, path, headers, body, signature):
        """(call, status, content type, body) of a request in good weather."""
        match [method, *path.strip("/").split("/")]:
            case ["POST", "v1", "populations", "phones", "checkins"]:
                return "check-in", 200, "application/json", messages.encode(ACCEPTED)
            case ["POST", "v1", "sessions", "s-1", "assignments"]:
                self.willing.append(messages.decode(body, messages.Willing))
                self.given = self.calls.count("assignment")
                return "assignment", 200, "application/json", messages.encode(self.assignment())
            case ["GET", "v1", "blobs", digest, *delta] if "/".join([digest, *delta]) in self.blobs:
                data, start = self.blobs["/".join([digest, *delta])], headers.get("Range", "")[len("bytes=") : -1]
                call = "delta" if delta else "blob"
                return call, 206 if start else 200, "application/octet-stream", data[int(start or 0) :]
            case ["POST", "v1", "assignments", name] if name.endswith(":abort"):
                self.aborts.append(messages.decode(body, messages.Abort))
                return "abort", 204, "application/json", b""
            case ["GET", "v1", "assignments", _]:
                self.held.wait(10.0 if headers.get("Prefer") != "wait=0" else 0.0)
                return "hold", 204, "application/json", b""
        model = self.answer_model(method, path)
        return (
            model
            or self.answer_report(method, path, headers, body)
            or self.answer_secure(method, path, body, signature)
        )

    def answer_model(self, method, path):
        """The same for models; None for what is about none."""
        match [method, *path.strip("/").split("/")]:
            case ["GET", "v1", "populations", "phones", "models", name] if found := self.model_of(name):
                return "model", 200, "application/json", messages.encode(messages.ReleasedModel(found))
            case ["GET", "v1", "populations", "phones", "models", _]:
                return "model", 404, messages.PROBLEM_TYPE, messages.encode(messages.problem("no-model", path))
        return None

    def model_of(self, name):
        """The release for the labels in a name's query, or else for all."""
        return self.models.get(name) or self.models.get(name.partition("?")[0])

    def answer_report(self, method, path, headers, body):
        """The same for reports; None for what is about none."""
        match [method, *path.strip("/").split("/")]:
            case ["PUT", "v1", "assignments", name, "report"]:
                return "report", 200, "application/json", self.count(name, body)
            case ["PATCH", "v1", "assignments", name, "report"]:
                assert int(headers["Upload-Offset"]) == len(self.parts)
                assert headers["Upload-Complete"] == "?1"
                self.parts += body
                assert (len(self.parts), content_digest(self.parts)) == (
                    int(headers["Upload-Length"]),
                    headers["Repr-Digest"],
                )
                self.counted = self.counted or self.count(name, bytes(self.parts))
                return "report", 200, "application/json", self.counted
            case ["HEAD", "v1", "assignments", _, "report"]:
                return "offset", 204, "application/json", b""
        return None

    def count(self, assignment, body):
        self.held.set()
        self.reports.append(checkpoint.decode(body, linear.plan().report.wire)["report"])
        return messages.encode(
            messages.Receipt(assignment=assignment, task="t-1", round=2, sha256=hashlib.sha256(body).hexdigest())
        )

    def check(self, method, path, headers, body):
        """The signature of a request: every one has a good one, of an enrolled key but for the enrolment."""
        signature = Signature.parse(headers["Signature-Input"], headers["Signature"])
        assert set(signature.covered) == {*COVERED, *(name for name in SIGNED_FIELDS if name in headers)}
        assert not body or "content-digest" in signature.covered
        assert not body or headers["Content-Digest"] == content_digest(body)
        if self.may_resend and signature.nonce in self.nonces:
            raise Resent
        assert signature.nonce not in self.nonces
        self.nonces.add(signature.nonce)
        key = signature.keyid if path in {"/v1/devices", "/v1/credentials"} else self.keys[signature.keyid]
        signature.check(SignableRequest(method, headers["Host"], path, headers.get), PublicKey.parse(key))
        return signature

    def answer_secure(self, method, path, body, signature):
        """The same for what a secure round asks; `aggregate` gives its messages; by itself it gives none."""
        match [method, *path.strip("/").split("/")]:
            case ["POST", "v1", "devices"]:
                message, device = messages.decode(body, messages.Enrol), f"d-{len(self.enrolments)}"
                self.enrolments.append(message)
                self.keys[device], self.created[device] = signature.keyid, signature.created
                return (
                    "enrol",
                    200,
                    "application/json",
                    messages.encode(messages.Enrolled(device, self.parties(self.url))),
                )
            case ["POST", "v1", "credentials"]:
                self.asked_at = signature.created
                self.issued.append(messages.decode(body, messages.RequestCredential))
                answer = self.issue(self.issued[-1], signature.keyid)
                return "credential", 200, "application/json", messages.encode(answer)
            case ["PUT", "v1", "assignments", _, "secagg", number]:
                self.said.append((int(number), body))
                message = self.aggregate(int(number), body)
                return "secagg", 200 if message else 204, "application/octet-stream", message
            case ["GET", "v1", "assignments", _, "secagg", number] if self.hear:
                message = self.hear(int(number))
                return "secagg", 200 if message else 204, "application/octet-stream", message
        return "unknown", 404, messages.PROBLEM_TYPE, messages.encode(messages.problem("unknown-resource", path))


def status(code, **headers):
    return lambda handler: handler.respond(code, "text/plain", b"no", headers)


def refusal(slug, detail="because", retry=None, **headers):
    document = messages.problem(slug, detail, retry)
    named = {messages.PROBLEM_FIELD: slug}
    return lambda handler: handler.respond(
        document.status, messages.PROBLEM_TYPE, messages.encode(document), named | headers
    )


def answer(body, kind="application/json"):
    return lambda handler: handler.respond(200, kind, body)


def cut(handler):
    """Promise a thousand bytes, send ten, hang up."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/octet-stream")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)
    handler.close_connection = True


def hang_up(handler):
    """No answer at all."""
    handler.close_connection = True


def call_of(method, path):
    parts = path.split("/")[::-1]
    if method == "HEAD":
        return "offset"
    if method == "GET" and parts[1] == "assignments":
        return "hold"
    return "abort" if parts[0].endswith(":abort") else next(CALLS[part] for part in parts if part in CALLS)


def is_stale(headers):
    """Whether a request is signed by a clock that is off: the device is to take ours, and to ask again."""
    created = Signature.parse(headers["Signature-Input"], headers["Signature"]).created
    return abs(created - time.time()) > 30


CALLS = {"checkins": "check-in", "assignments": "assignment", "deltas": "delta", "blobs": "blob", "report": "report"}
CALLS |= {"models": "model", "devices": "enrol", "credentials": "credential", "secagg": "secagg"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one segment: two would wait for the client's delayed acknowledgement

    def handle_any(self):
        coordinator = self.server.coordinator
        size = int(self.headers.get("Content-Length", 0))
        if self.command == "PATCH" and coordinator.cuts:
            coordinator.parts += self.rfile.read(coordinator.cuts.pop(0))
            coordinator.calls.append("cut")
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if is_stale(self.headers):
            coordinator.stale.append(self.path)
            refusal("stale-signature")(self)
            return
        call = call_of(self.command, self.path)
        if call not in {"enrol", "credential"}:
            coordinator.calls.append(call)
        coordinator.headers.append((call, dict(self.headers)))
        try:
            signature = coordinator.check(self.command, self.path, self.headers, body)
        except Resent:
            refusal("replayed-signature")(self)
            return
        except Exception as error:
            coordinator.forged.append(error)
            self.respond(401, "text/plain", str(error).encode())
            return
        if fault := coordinator.heard(call, body):
            fault(self)
            return
        _, code, kind, answer = coordinator.answer(self.command, self.path, self.headers, body, signature)
        if call == "report" and coordinator.unheard:
            coordinator.unheard -= 1
            hang_up(self)
            return
        about = {"ETag": f'"{self.path.rsplit("/", 1)[-1]}"'} if call == "blob" else {}
        if call == "offset":
            half = {"Upload-Offset": str(len(coordinator.parts)), "Upload-Complete": "?0"}
            about = {"Upload-Complete": "?1"} if coordinator.counted else half
        if code == 206:
            about["Content-Range"] = self.headers["Range"].replace("=", " ")
        self.respond(code, kind, answer, about)

    def respond(self, code, kind, body, headers=None):
        given = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        self.send_response_only(code)
        for name, value in ({"Date": self.date_time_string()} | given).items():
            self.send_header(name, value)
        if code != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


for method in ("GET", "POST", "PUT", "HEAD", "PATCH"):
    setattr(Handler, f"do_{method}", Handler.handle_any)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    coordinator: Coordinator

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a device that hangs up early is no news
            super().handle_error(request, client_address)


@contextmanager
def serving():
    """A coordinator that answers at its `url`."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.coordinator = Coordinator()
        server.coordinator.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.coordinator
        finally:
            server.shutdown()
            thread.join()
        assert server.coordinator.forged == []


def report_of(examples):
    """What a device with these examples must report."""
    return linear.reference(linear.PARAMS, examples, linear.KEY).astype(np.float32)
