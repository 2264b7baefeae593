"""A call to the coordinator: its HTTP request, its answer, and how often it is attempted."""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from device_runtime.errors import BadAnswer, RefusalHints, Refused, Unreachable, plain
from device_runtime.protocol.connection import PIECE, Address, HttpRequest, HttpResponse
from fedcore.errors import WireError
from fedcore.wire.messages import PROBLEM_FIELD, PROBLEM_TYPE, Assignment, Problem, Rejected, decode, decode_problem
from fedcore.wire.signatures import SignableRequest, Signer, content_digest, digest_field

TIMEOUT_S = 30.0
SLOWEST = 1000
"""The least bytes of a body per second; a slower peer counts as gone (docs/spec/wire.md §1)."""
LARGEST_MESSAGE = 1 << 20
JSON = {"content-type": "application/json"}
BYTES = {"content-type": "application/octet-stream"}
PARTIAL = {"content-type": "application/partial-upload"}


@dataclass(slots=True)
class BytesMoved:
    """Bytes of bodies, over all conversations on one connection."""

    up: int = 0
    down: int = 0

    def leaving(self, content: bytes | memoryview) -> Iterator[bytes]:
        """The pieces of a body, counted as they leave."""
        for start in range(0, len(content), PIECE):
            piece = bytes(content[start : start + PIECE])
            self.up += len(piece)
            yield piece

    def arriving(self, response: HttpResponse) -> Iterator[bytes]:
        """The pieces of an answer's body, counted as they arrive."""
        for piece in response:
            self.down += len(piece)
            yield piece


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the wire protocol. Without a signer the device signs it; without a time it is signed with the current
    one.

    timeout_s: for each wait on the network. created: in seconds since 1970. sha256: of the content, in hex, if already
    known.
    """

    method: str
    path: str
    content: bytes | memoryview = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    signer: Signer | None = None
    created: int | None = None
    sha256: str = ""

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"{self.method} {self.path}"

    def request(
        self, address: Address, signer: Signer | None, now: int, moved: BytesMoved, timeout_s: float
    ) -> HttpRequest:
        """The request, with a fresh signature if there is a signer.

        now: the time of the signature, if the call has none of its own. moved: counts the body as it leaves.
        """
        headers = {"host": address.authority, **self.headers, "content-length": str(len(self.content))}
        if self.content:
            digest = bytes.fromhex(self.sha256)
            headers["content-digest"] = digest_field(digest) if digest else content_digest(self.content)
        target = address.path + self.path
        if signer is not None:
            about = SignableRequest(self.method, address.authority, target, headers.get)
            headers |= signer.headers(about, now if self.created is None else self.created)
        return HttpRequest(self.method, target, headers, moved.leaving(self.content), timeout_s)

    def paced(self, pieces: Iterable[bytes], most: int) -> Iterator[bytes]:
        """The pieces of an answer of `most` bytes. Raises Unreachable once it took longer than at the least rate."""
        began, allowed_s = time.monotonic(), self.timeout_s + most / SLOWEST
        for piece in pieces:
            yield piece
            if time.monotonic() - began > allowed_s:
                raise Unreachable(f"{self.name}: the answer came too slowly")

    def body_of(self, pieces: Iterable[bytes], allowed_s: Callable[[], float]) -> bytes:
        """The body of an answer. Raises Unreachable after `allowed_s`, and BadAnswer above LARGEST_MESSAGE bytes."""
        body, began = bytearray(), time.monotonic()
        for piece in pieces:
            body += piece
            if time.monotonic() - began > allowed_s():
                raise Unreachable(f"{self.name}: the answer took too long")
            if len(body) > LARGEST_MESSAGE:
                raise BadAnswer(f"{self.name}: the answer is longer than {LARGEST_MESSAGE} bytes")
        return bytes(body)


MOST_FORMATS = 20
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def decode_answer(asked: str, answer: Answer, kind: Any) -> Any:
    """The message in an answer. asked: the request, for errors. Raises BadAnswer."""
    if not answer.headers.get("content-type", "").startswith("application/json"):
        # Usually a captive portal's or a proxy's page, which is gone in minutes.
        raise BadAnswer(f"{asked} was answered with something other than JSON")
    try:
        return decode(answer.body, kind)
    except WireError as error:
        raise BadAnswer(f"{asked}: {error}", permanent=True) from error


def upload_offset(answer: Answer, length: int) -> int:
    """The number of bytes of an upload that have arrived; `length` when it was counted. Raises BadAnswer."""
    if answer.headers.get("upload-complete") == "?1":
        return length
    offset = answer.headers.get("upload-offset", "")
    if not _NUMBER.fullmatch(offset) or int(offset) > length:
        raise BadAnswer("the coordinator does not say how much of the report has arrived")
    return int(offset)


def printable(answer: Rejected) -> Rejected:
    """A rejection whose format names are safe to print."""
    return msgspec.structs.replace(answer, formats=tuple(map(plain, answer.formats[:MOST_FORMATS])))


def check_names(assignment: Assignment) -> None:
    """Raise BadAnswer unless an assignment's names are printable: they are stored, and shown to the device's owner."""
    for name in (assignment.assignment, assignment.task, assignment.plan.sha256, assignment.checkpoint.sha256):
        if plain(name) != name:
            raise BadAnswer(f"an assignment names something {name[:40]!r}, which is no name", permanent=True)


def is_continuation(response: HttpResponse, start: int) -> bool:
    """Whether an answer is the rest of a blob from byte `start` on; otherwise it is the whole blob."""
    return response.status == 206 and response.headers.get("content-range", "").startswith(f"bytes {start}-")


def refusal(asked: str, answer: Answer) -> Refused:
    """The error for an answer with a problem; without a problem document, one made from the status."""
    after = answer.headers.get("retry-after", "")
    after_s = float(after) if after.isdecimal() else 0.0
    problem = Problem("", "", answer.status, f"{asked} was answered with status {answer.status}")
    if answer.headers.get("content-type", "").startswith(PROBLEM_TYPE):
        with contextlib.suppress(WireError):
            problem = decode_problem(answer.body)
    # An answer to HEAD has no body.
    slug = problem.slug or answer.headers.get(PROBLEM_FIELD.lower()) or f"http-{answer.status}"
    hints = RefusalHints(problem.retry, after_s, _time(answer.headers.get("date", "")))
    return Refused(answer.status, slug, problem.detail, hints)


def _time(date: str) -> float | None:
    """Seconds since 1970 of a Date header; None if it is not a date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


T = TypeVar("T")
RETRIES = 3
RETRIED_STATUSES = frozenset({429, 503})
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
LONGEST_NAP_S = 0.25


class Attempts:
    """Repeats calls: RETRIES times until `renew`, and as often after it. Never after the device is told to stop.

    mend: tries to remove the cause of a refusal, so that the call is worth another attempt at once; returns whether it
    did. It is called once per call for each kind of refusal.
    """

    def __init__(
        self,
        mend: Callable[[Refused], bool],
        stopping: Callable[[], bool],
        sleep: Callable[[float], None],
        rng: random.Random,
    ) -> None:
        self._mend = mend
        self._stopping = stopping
        self._sleep = sleep
        self._rng = rng
        self._left = RETRIES

    def renew(self) -> None:
        """Start counting retries from zero."""
        self._left = RETRIES

    def make(self, attempt_once: Callable[[], T]) -> T:
        """The result of the first successful attempt. After the last allowed attempt, raises its error."""
        mended: set[str] = set()
        for attempt in itertools.count():
            try:
                return attempt_once()
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and error.slug not in mended and self._mend(error):
                    mended.add(error.slug)
                    continue
                asked_s = error.after_s if isinstance(error, Refused) else 0.0
                if not _passes(error) or self._left == 0 or asked_s > LONGEST_DELAY_S:
                    raise
                self._left -= 1
                if not self._pause(max(asked_s, FIRST_DELAY_S * 2**attempt * self._rng.uniform(0.5, 1.0))):
                    raise
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> bool:
        """Sleep; False as soon as the device is told to stop."""
        while seconds > 0 and not self._stopping():
            self._sleep(min(seconds, LONGEST_NAP_S))
            seconds -= LONGEST_NAP_S
        return not self._stopping()


def _passes(error: Unreachable | Refused) -> bool:
    """Whether the same call may succeed later in this session."""
    # A proxy may send a request twice when a connection breaks. The first answer is lost, and the second request is
    # refused only for its repeated nonce.
    if isinstance(error, Unreachable) or error.status in RETRIED_STATUSES or error.slug == "replayed-signature":
        return True
    # The coordinator has just started. The device's clock is right, and better than Date, which is up to 2 s late.
    return error.slug == "stale-signature" and error.after_s > 0
