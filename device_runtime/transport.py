"""The device's half of the wire: every call it makes, what is asked again, and what an error means.

Spec: docs/spec/wire.md.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from device_runtime.cache import Partial
from device_runtime.errors import BadAnswer, ConfigError, Refused, Unreachable, plain
from fedcore.errors import DigestMismatch, WireError
from fedcore.plan import BlobRef
from fedcore.wire.messages import (
    Abort,
    Assignment,
    AssignmentAnswer,
    CheckIn,
    CheckInAnswer,
    Enrol,
    Enrolled,
    Receipt,
    Rejected,
    Willing,
    decode,
    encode,
)
from fedcore.wire.problems import PROBLEM_TYPE, Problem

T = TypeVar("T")
RETRIES = 3
RETRIED_STATUSES = frozenset({429, 503})
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
TIMEOUT_S = 30.0
LEAVING_S = 2.0
LONGEST_NAP_S = 0.25
LARGEST_MESSAGE = 1 << 20
MOST_FORMATS = 20
PIECE = 1 << 16
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    """A request."""

    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


def checked_url(coordinator: str) -> httpx2.URL:
    """The coordinator's base URL. Raises ConfigError when it is none, or names a user, without repeating that."""
    if isinstance(coordinator, str) and "@" in coordinator:
        raise ConfigError("the coordinator's URL names a user; leave out all up to the @: it would be written down")
    try:
        url = httpx2.URL(coordinator)
    except (httpx2.InvalidURL, TypeError, UnicodeError) as error:
        raise ConfigError(f"coordinator {coordinator!r} is not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError(f"coordinator {coordinator!r} must start with https:// or http://, and name a host")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ConfigError(f"coordinator {coordinator!r} has the port {url.port}; ports are 1 to 65535")
    return url


class Transport:
    """A conversation with one coordinator. `bytes_up` and `bytes_down` count bodies as they cross the wire.

    A call is made again on 429, on 503 and when the connection breaks: 3 times until there is an assignment, and 3
    times within it; `leave` never. Once `stopping`, nothing is asked again, and answers have LEAVING_S to come.
    Every method raises Unreachable, Refused or BadAnswer.
    """

    def __init__(
        self, client: httpx2.Client, *, sleep: Callable[[float], None] = time.sleep, rng: random.Random | None = None
    ) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.stopping: Callable[[], bool] = lambda: False
        self._client = client
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._retries = RETRIES

    @classmethod
    def to(
        cls, coordinator: str, carrier: Callable[[ssl.SSLContext | bool], httpx2.BaseTransport] | None = None
    ) -> Transport:
        """A transport to the coordinator at this base URL. Raises ConfigError when it is none.

        carrier: makes what carries requests, from the certificates that it may trust; the library's own if not given.
        """
        url = checked_url(coordinator)
        # Loading trusted certificates costs more CPU than the rest of a session; a context without any trusts nobody.
        trusted = url.scheme != "http" or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return cls(httpx2.Client(base_url=url, verify=trusted, transport=carrier and carrier(trusted)))

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()

    @property
    def bytes_moved(self) -> int:
        """Bytes down and up together."""
        return self.bytes_down + self.bytes_up

    def check_in(self, population: str, message: CheckIn) -> CheckInAnswer:
        """Say that this device is willing."""
        call = _Call("POST", f"/v1/populations/{_segment(population)}/checkins", encode(message), JSON)
        answer: CheckInAnswer = self._message(call, CheckInAnswer)
        return _shown(answer) if isinstance(answer, Rejected) else answer

    def await_assignment(self, session: str, wait_s: float, tasks: tuple[str, ...]) -> AssignmentAnswer:
        """Wait, for about `wait_s` seconds, to be selected for one of `tasks`."""
        headers = {**JSON, "Prefer": f"wait={wait_s:.0f}"}
        path = f"/v1/sessions/{_segment(session)}/assignments"
        answer: AssignmentAnswer = self._message(
            _Call("POST", path, encode(Willing(tasks=tasks)), headers, timeout_s=wait_s + TIMEOUT_S), AssignmentAnswer
        )
        self._retries = RETRIES
        if isinstance(answer, Rejected):
            return _shown(answer)
        _demand_names(answer)
        return answer

    def blob(self, ref: BlobRef, partial: Partial, watch: Callable[[], None] = lambda: None) -> bytes:
        """A blob's bytes, checked; `partial` holds what arrived so far, and only the rest is asked for.

        watch: called before every request and after every piece that arrives. What it raises ends the download, and
        what arrived stays. Raises StateError when `partial` cannot be written.
        """
        if partial.size < ref.size or not ref.size:
            try:
                self._retrying(lambda: self._append(ref, partial, watch))
            except Refused as error:
                if error.slug == "range-not-satisfiable":
                    partial.clear()  # it is no beginning of what the coordinator has
                raise
        try:
            return ref.check(partial.read())
        except DigestMismatch as error:
            partial.clear()
            raise BadAnswer(str(error)) from error

    def report(self, assignment: str, body: bytes) -> Receipt:
        """Upload the report. Asking again is safe: the coordinator counts a digest once."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        headers = {"Content-Type": "application/octet-stream", "Content-Digest": f"sha-256=:{digest}:"}
        path = f"/v1/assignments/{_segment(assignment)}/report"
        receipt: Receipt = self._message(_Call("PUT", path, body, headers), Receipt)
        return receipt

    def enrol(self, message: Enrol) -> Enrolled:
        """Ask for a credential for secure aggregation. Asking again is safe."""
        enrolled: Enrolled = self._message(_Call("POST", "/v1/devices", encode(message), JSON), Enrolled)
        return enrolled

    def say(self, assignment: str, number: int, message: bytes, wait_s: float) -> bytes | None:
        """Send a message of a secure aggregation, and hear the next as `hear` does. Sending the same again is safe."""
        headers = {"Content-Type": "application/octet-stream", "Prefer": f"wait={wait_s:.0f}"}
        answer = self._send(_Call("PUT", _secagg(assignment, number), message, headers, timeout_s=wait_s + TIMEOUT_S))
        return None if answer.status == 204 else answer.body

    def hear(self, assignment: str, number: int, wait_s: float) -> bytes | None:
        """A message of a secure aggregation; None when there is none within about `wait_s` seconds."""
        headers = {"Prefer": f"wait={wait_s:.0f}"}
        answer = self._send(_Call("GET", _secagg(assignment, number), headers=headers, timeout_s=wait_s + TIMEOUT_S))
        return None if answer.status == 204 else answer.body

    def abort(self, assignment: str, message: Abort) -> None:
        """Give the assignment up."""
        self._send(_Call("POST", f"/v1/assignments/{_segment(assignment)}:abort", encode(message), JSON))

    def leave(self, assignment: str, message: Abort) -> None:
        """Give the assignment up with no time to lose: asked once, for a moment."""
        path = f"/v1/assignments/{_segment(assignment)}:abort"
        self._attempt(_Call("POST", path, encode(message), JSON, timeout_s=LEAVING_S))

    def _message(self, call: _Call, kind: Any) -> Any:
        answer = self._send(call)
        if not answer.headers.get("content-type", "").startswith("application/json"):
            # A captive portal or a proxy's page, as a rule, and gone in minutes.
            raise BadAnswer(f"{call.method} {call.path} was answered with something other than JSON")
        try:
            return decode(answer.body, kind)
        except WireError as error:
            raise BadAnswer(f"{call.method} {call.path}: {error}", permanent=True) from error

    def _send(self, call: _Call) -> _Answer:
        return self._retrying(lambda: self._attempt(call))

    def _retrying(self, attempt_once: Callable[[], T]) -> T:
        """What an attempt gives, after as many attempts as the rules allow."""
        for attempt in itertools.count():
            try:
                return attempt_once()
            except (Unreachable, Refused) as error:
                asked_s = error.after_s if isinstance(error, Refused) else 0.0
                passing = not isinstance(error, Refused) or error.status in RETRIED_STATUSES
                if not passing or self._retries == 0 or asked_s > LONGEST_DELAY_S:
                    raise
                self._retries -= 1
                if not self._pause(max(asked_s, FIRST_DELAY_S * 2**attempt * self._rng.uniform(0.5, 1.0))):
                    raise
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> bool:
        """Sleep; False as soon as the device is told to stop."""
        while seconds > 0 and not self.stopping():
            self._sleep(min(seconds, LONGEST_NAP_S))
            seconds -= LONGEST_NAP_S
        return not self.stopping()

    def _attempt(self, call: _Call) -> _Answer:
        with self._asked(call) as response:
            return _Answer(response.status_code, response.headers, self._read(response, call))

    def _append(self, ref: BlobRef, partial: Partial, watch: Callable[[], None]) -> None:
        """Fetch what is missing of a blob. What arrives before something ends it is kept, if it is of the blob."""
        watch()
        start, etag = partial.size, f'"{ref.sha256}"'
        # Compressed bytes could not be continued, and nobody compresses them but a proxy.
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": etag}
        call = _Call("GET", f"/v1/blobs/{_segment(ref.sha256)}", headers=headers)
        with self._asked(call) as response:
            if start and not _continues(response, start):
                partial.clear()
            try:
                for chunk in response.iter_bytes():
                    partial.append(chunk)
                    if partial.size > ref.size:
                        partial.clear()
                        raise BadAnswer(f"{call.method} {call.path}: the answer is longer than {ref.size} bytes")
                    watch()
            except BaseException:
                if response.headers.get("etag") != etag:
                    partial.clear()
                raise

    @contextlib.contextmanager
    def _asked(self, call: _Call) -> Iterator[httpx2.Response]:
        """A good answer whose body is still to be read. Its bytes are counted, however it ends."""
        # The length is given because the body is handed over in pieces, to count those that left.
        headers = {**call.headers, "Content-Length": str(len(call.content))}
        try:
            with self._client.stream(
                call.method,
                call.path,
                content=self._counted(call.content),
                headers=headers,
                timeout=self._allowed_s(call),
            ) as response:
                try:
                    if not 200 <= response.status_code < 300:
                        answer = _Answer(response.status_code, response.headers, self._read(response, call))
                        raise _refusal(call, answer)
                    yield response
                finally:
                    self.bytes_down += response.num_bytes_downloaded
        except httpx2.TransportError as error:
            raise Unreachable(f"{call.method} {call.path}: {error or type(error).__name__}") from error
        except httpx2.RequestError as error:
            raise BadAnswer(f"{call.method} {call.path}: {error}") from error

    def _allowed_s(self, call: _Call) -> float:
        return min(call.timeout_s, LEAVING_S) if self.stopping() else call.timeout_s

    def _counted(self, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            self.bytes_up += len(piece)
            yield piece

    def _read(self, response: httpx2.Response, call: _Call) -> bytes:
        body, began = bytearray(), time.monotonic()
        for chunk in response.iter_bytes():
            body += chunk
            if time.monotonic() - began > self._allowed_s(call):
                raise Unreachable(f"{call.method} {call.path}: the answer took too long")
            if len(body) > LARGEST_MESSAGE:
                raise BadAnswer(f"{call.method} {call.path}: the answer is longer than {LARGEST_MESSAGE} bytes")
        return bytes(body)


def _shown(answer: Rejected) -> Rejected:
    """A rejection whose names of formats may be printed."""
    return msgspec.structs.replace(answer, formats=tuple(map(plain, answer.formats[:MOST_FORMATS])))


def _demand_names(given: Assignment) -> None:
    """Raise BadAnswer for an assignment whose names are none: they are kept, and shown to the device's owner."""
    for name in (given.assignment, given.task, given.plan.sha256, given.checkpoint.sha256):
        if plain(name) != name:
            raise BadAnswer(f"an assignment names something {name[:40]!r}, which is no name", permanent=True)


def _continues(response: httpx2.Response, start: int) -> bool:
    """Whether an answer is the rest from byte `start` on; anything else is the whole."""
    return response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {start}-")


def _refusal(call: _Call, answer: _Answer) -> Refused:
    """The problem that an answer holds; one made up from its status when it holds none."""
    after = answer.headers.get("retry-after", "")
    after_s = float(after) if after.isdecimal() else 0.0
    found = Problem("", "", answer.status, f"{call.method} {call.path} was answered with status {answer.status}")
    if answer.headers.get("content-type", "").startswith(PROBLEM_TYPE):
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(answer.body, type=Problem)
    return Refused(answer.status, found.slug or f"http-{answer.status}", found.detail, found.retry, after_s)


def _secagg(assignment: str, number: int) -> str:
    return f"/v1/assignments/{_segment(assignment)}/secagg/{number}"


def _segment(name: str) -> str:
    return quote(name, safe="")
