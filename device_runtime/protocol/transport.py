"""The device's half of the wire protocol: its calls, which calls are repeated, and the meaning of errors.

Spec: docs/spec/wire.md.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, cast
from urllib.parse import quote, urlencode

from msgspec import Struct

from device_runtime.errors import BadAnswer, Refused, Unreachable
from device_runtime.protocol import connection
from device_runtime.protocol.call import (
    BYTES,
    JSON,
    PARTIAL,
    TIMEOUT_S,
    Answer,
    Attempts,
    BytesMoved,
    Call,
    check_names,
    decode_answer,
    is_continuation,
    printable,
    refusal,
    upload_offset,
)
from device_runtime.state.folder import PartialDownload
from fedcore.errors import DigestMismatch
from fedcore.plan import BlobRef
from fedcore.release import Signed
from fedcore.wire import messages
from fedcore.wire.signatures import KEY_ID, Signer, digest_field

# A body arrived damaged, or an upload began at another offset: the next attempt asks for the offset again.
SENT_AGAIN = frozenset({"digest-mismatch", "mismatching-offset"})
# Assignments that the coordinator removed long ago, lost with its database, or gave to another id of this device.
FORGOTTEN = frozenset({"unknown-assignment", "foreign-assignment"})
LEAVING_S = 2.0
NO_SUCH_THING = 404
_ASSIGNMENTS = "/v1/assignments/"
# A larger report is uploaded resumably, so that a broken connection loses nothing.
LARGEST_WHOLE = 8 << 20


class Identity(Protocol):
    """The device's identity for the coordinator."""

    def signer(self, transport: Transport) -> Signer:
        """The signer of requests; it may enrol first, by this transport."""

    def forget(self) -> None:
        """Note that the coordinator does not know this device, so that it enrols before it signs again."""


class Transport:
    """A conversation with one coordinator. `bytes_up` and `bytes_down` count bodies as they cross the wire.

    identity: signs every attempt anew. wall: the time for signatures, in seconds since 1970. If the coordinator finds
    it wrong, the coordinator's time is used for signatures from then on, and the call is repeated once. A call is
    repeated on 429, on 503, when the coordinator is too new for a signature, when the connection breaks, and when a
    proxy sent a request twice: 3 times before there is an assignment, and 3 times within it; `leave` is never repeated.
    Once `stopping`, no call is repeated, and answers must come within LEAVING_S.
    Every method raises Unreachable, Refused or BadAnswer.
    """

    def __init__(
        self,
        address: connection.Address,
        carrier: connection.Carrier,
        *,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._moved = BytesMoved()
        self.stopping: Callable[[], bool] = lambda: False
        self.identity: Identity | None = None
        self.wall: Callable[[], float] = time.time
        self._ahead_s = 0.0
        self._address = address
        self._carrier = carrier
        self._attempts = Attempts(self._mend, self._told_to_stop, sleep, rng or random.Random())
        self.spoke_at = -math.inf
        """The monotonic time at which the last call about an assignment ended; infinity during one."""

    @classmethod
    def to(
        cls, coordinator: str, over: Callable[[connection.Carrier], connection.Carrier] = lambda carrier: carrier
    ) -> Transport:
        """A transport to the coordinator at this base URL. Raises ConfigError when the URL is malformed.

        over: wraps the carrier that sends requests.
        """
        address = connection.address_of(coordinator)
        return cls(address, over(connection.Connections(address)))

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._carrier.close()

    def beside(self, identity: Identity) -> Transport:
        """Another conversation on the same connections, for another thread."""
        other = Transport(self._address, self._carrier)
        other._moved = self._moved
        other.identity, other.stopping, other.wall, other._ahead_s = identity, self.stopping, self.wall, self._ahead_s
        return other

    @property
    def bytes_up(self) -> int:
        """Bytes of bodies sent, including other conversations on the same connections."""
        return self._moved.up

    @property
    def bytes_down(self) -> int:
        """Bytes of bodies received, including other conversations on the same connections."""
        return self._moved.down

    @property
    def bytes_moved(self) -> int:
        """Bytes down and up together."""
        return self.bytes_down + self.bytes_up

    def check_in(self, population: str, message: messages.CheckIn) -> messages.CheckInAnswer:
        """Check in: this device is willing."""
        call = Call("POST", f"/v1/populations/{_segment(population)}/checkins", messages.encode(message), JSON)
        answer: messages.CheckInAnswer = self._message(call, messages.CheckInAnswer)
        return printable(answer) if isinstance(answer, messages.Rejected) else answer

    def await_assignment(self, session: str, wait_s: float, tasks: tuple[str, ...]) -> messages.AssignmentAnswer:
        """Wait, for about `wait_s` seconds, to be selected for one of `tasks`."""
        headers = {**JSON, "prefer": f"wait={wait_s:.0f}"}
        path = f"/v1/sessions/{_segment(session)}/assignments"
        answer: messages.AssignmentAnswer = self._message(
            Call("POST", path, messages.encode(messages.Willing(tasks=tasks)), headers, timeout_s=wait_s + TIMEOUT_S),
            messages.AssignmentAnswer,
        )
        self._attempts.renew()
        if isinstance(answer, messages.Rejected):
            return printable(answer)
        check_names(answer)
        return answer

    def blob(self, ref: BlobRef, partial: PartialDownload, watch: Callable[[], None] = lambda: None) -> None:
        """Fetch a blob, and check it. `partial` holds what has arrived so far, so that only the rest is requested.

        watch: called before every request and after every piece. An error in it ends the download, and `partial` keeps
        what has arrived. Raises StateError when `partial` cannot be written.
        """
        if partial.size < ref.size or not ref.size:
            try:
                self._attempts.make(lambda: self._append(ref, partial, watch))
            except Refused as error:
                if error.slug == "range-not-satisfiable":
                    partial.clear()  # it is not the start of the coordinator's blob
                raise
        try:
            partial.check(ref)
        except DigestMismatch as error:
            raise BadAnswer(str(error)) from error

    def delta(self, ref: BlobRef, base: str, watch: Callable[[], None] = lambda: None) -> bytes | None:
        """The delta from the blob with the digest `base` to another; None if the coordinator has none.

        watch: as in `blob`.
        """

        def fetch() -> bytes:
            watch()
            delta = bytearray()
            path = f"/v1/blobs/{_segment(ref.sha256)}/deltas/{_segment(base)}"
            call = Call("GET", path, headers={"accept-encoding": "identity"})
            with self._asked(call) as response:
                for chunk in call.paced(self._moved.arriving(response), ref.size):
                    delta += chunk
                    if len(delta) >= ref.size:
                        raise BadAnswer(f"GET {path}: the delta is as long as the blob")
                    watch()
            return bytes(delta)

        try:
            return self._attempts.make(fetch)
        except Refused as error:
            if error.status == NO_SUCH_THING:
                return None
            raise

    def model(self, population: str, name: str, labels: Mapping[str, str]) -> Signed | None:
        """The release of a model's version that this device is to use; None if there is none for it.

        labels: those that the device tells.
        """
        query = f"?{urlencode(labels)}" if labels else ""
        call = Call("GET", f"/v1/populations/{_segment(population)}/models/{_segment(name)}{query}")
        try:
            answer: messages.ReleasedModel = self._message(call, messages.ReleasedModel)
        except Refused as error:
            if error.slug == "no-model":
                return None
            raise
        return answer.release

    def report(self, assignment: str, body: bytes, sha256: str) -> messages.Receipt:
        """Upload the report, by its digest in hex. Repeating it is safe: the coordinator counts a digest once."""
        path = f"{_ASSIGNMENTS}{_segment(assignment)}/report"
        if len(body) > LARGEST_WHOLE:
            return self._resumed(path, body, sha256)
        receipt: messages.Receipt = self._message(Call("PUT", path, body, BYTES, sha256=sha256), messages.Receipt)
        return receipt

    def outcome(self, assignment: str) -> messages.Settled:
        """What became of the round of an assignment; that it does not count if the coordinator knows none such."""
        try:
            return cast(
                "messages.Settled",
                self._message(Call("GET", f"{_ASSIGNMENTS}{_segment(assignment)}/outcome"), messages.Settled),
            )
        except Refused as error:
            if error.slug in FORGOTTEN:
                return messages.Settled(counted=False, over=False)
            raise

    def enrol(self, newcomer: Signer, message: Callable[[int], messages.Enrol]) -> messages.Enrolled:
        """Enrol at the coordinator; `message` makes the message for a time. Repeating it is safe."""
        enrolled: messages.Enrolled = self._introduce("/v1/devices", newcomer, message, messages.Enrolled)
        if not KEY_ID.fullmatch(enrolled.device):
            # The id is stored, and is part of the signature of every request.
            raise BadAnswer("the coordinator gave this device an id that no signature can name", permanent=True)
        return enrolled

    def credential(
        self, newcomer: Signer, message: Callable[[int], messages.RequestCredential]
    ) -> messages.IssuedCredential:
        """Request a credential from an enrolment authority. As `enrol`."""
        issued: messages.IssuedCredential = self._introduce(
            "/v1/credentials", newcomer, message, messages.IssuedCredential
        )
        return issued

    def hold(self, assignment: str, wait_s: float) -> None:
        """Hold an assignment for about `wait_s` seconds, without retries. Raises Refused if the report is useless."""
        headers = {"prefer": f"wait={wait_s:.0f}"}
        path = f"{_ASSIGNMENTS}{_segment(assignment)}"
        call = Call("GET", path, headers=headers, timeout_s=wait_s + TIMEOUT_S)
        if self._attempt(call).status != 204:
            raise BadAnswer(f"{call.name}: a hold is answered with 204")

    def say(self, assignment: str, number: int, message: bytes, wait_s: float, *, sha256: str = "") -> bytes | None:
        """Send a message of a secure aggregation, and receive the next one as `hear` does. Repeating it is safe.

        sha256: of the message, in hex, if already known.
        """
        headers = {**BYTES, "prefer": f"wait={wait_s:.0f}"}
        call = Call("PUT", _secagg(assignment, number), message, headers, timeout_s=wait_s + TIMEOUT_S, sha256=sha256)
        answer = self._send(call)
        return None if answer.status == 204 else answer.body

    def hear(self, assignment: str, number: int, wait_s: float) -> bytes | None:
        """A message of a secure aggregation; None when there is none within about `wait_s` seconds."""
        headers = {"prefer": f"wait={wait_s:.0f}"}
        answer = self._send(Call("GET", _secagg(assignment, number), headers=headers, timeout_s=wait_s + TIMEOUT_S))
        return None if answer.status == 204 else answer.body

    def abort(self, assignment: str, message: messages.Abort) -> None:
        """Give the assignment up."""
        self._send(Call("POST", f"{_ASSIGNMENTS}{_segment(assignment)}:abort", messages.encode(message), JSON))

    def leave(self, assignment: str, message: messages.Abort) -> None:
        """Give the assignment up quickly: one attempt, with a short time-out."""
        path = f"{_ASSIGNMENTS}{_segment(assignment)}:abort"
        self._attempt(Call("POST", path, messages.encode(message), JSON, timeout_s=LEAVING_S))

    def _message(self, call: Call, kind: Any) -> Any:
        return decode_answer(call.name, self._send(call), kind)

    def _introduce(self, path: str, newcomer: Signer, message: Callable[[int], Struct], kind: Any) -> Any:
        def ask() -> Answer:
            created = self._now()
            return self._attempt(
                Call("POST", path, messages.encode(message(created)), JSON, signer=newcomer, created=created)
            )

        return decode_answer(f"POST {path}", self._attempts.make(ask), kind)

    def _resumed(self, path: str, body: bytes, sha256: str) -> messages.Receipt:
        """Upload the part that the coordinator does not have yet, with as many attempts as allowed."""
        about = {
            "upload-length": str(len(body)),
            "upload-complete": "?1",
            "repr-digest": digest_field(bytes.fromhex(sha256)),
        }

        def bring_the_rest() -> Answer:
            start = upload_offset(self._attempt(Call("HEAD", path)), len(body))
            headers = {**PARTIAL, **about, "upload-offset": str(start)}
            rest = memoryview(body)[start:]
            return self._attempt(Call("PATCH", path, rest, headers, sha256="" if start else sha256))

        receipt: messages.Receipt = decode_answer(
            f"PATCH {path}", self._attempts.make(bring_the_rest), messages.Receipt
        )
        return receipt

    def _send(self, call: Call) -> Answer:
        return self._attempts.make(lambda: self._attempt(call))

    def _mend(self, error: Refused) -> bool:
        """Remove the cause of a refusal, so that the call is worth another attempt at once; False if impossible."""
        if error.slug in SENT_AGAIN:
            return True
        if error.slug == "unknown-device" and self.identity is not None:
            self.identity.forget()
            return True
        if error.slug == "stale-signature" and error.their_time is not None and not error.after_s:
            self._ahead_s = error.their_time - self.wall()
            return True
        return False

    def _told_to_stop(self) -> bool:
        return self.stopping()

    def _attempt(self, call: Call) -> Answer:
        of_assignment = call.path.startswith(_ASSIGNMENTS)
        try:
            if of_assignment:
                self.spoke_at = math.inf
            with self._asked(call) as response:
                return self._answer(response, call)
        finally:
            if of_assignment:
                self.spoke_at = time.monotonic()

    def _answer(self, response: connection.HttpResponse, call: Call) -> Answer:
        body = call.body_of(self._moved.arriving(response), lambda: self._allowed_s(call))
        return Answer(response.status, response.headers, body)

    def _append(self, ref: BlobRef, partial: PartialDownload, watch: Callable[[], None]) -> None:
        """Fetch the missing part of a blob. If the download breaks, `partial` keeps bytes that belong to the blob."""
        watch()
        start, etag = partial.size, f'"{ref.sha256}"'
        # A compressed download could not be resumed. Only a proxy would compress it.
        headers = {"accept-encoding": "identity"}
        if start:
            headers |= {"range": f"bytes={start}-", "if-range": etag}
        call = Call("GET", f"/v1/blobs/{_segment(ref.sha256)}", headers=headers)
        with self._asked(call) as response:
            if start and not is_continuation(response, start):
                partial.clear()
            try:
                for chunk in call.paced(self._moved.arriving(response), ref.size):
                    partial.append(chunk)
                    if partial.size > ref.size:
                        partial.clear()
                        raise BadAnswer(f"{call.name}: the answer is longer than {ref.size} bytes")
                    watch()
            except BaseException:
                if response.headers.get("etag") != etag:
                    partial.clear()
                raise

    @contextlib.contextmanager
    def _asked(self, call: Call) -> Iterator[connection.HttpResponse]:
        """A successful answer, before its body is read."""
        try:
            signer = self._signer(call)
            request = call.request(self._address, signer, self._now(), self._moved, self._allowed_s(call))
            with contextlib.closing(self._carrier.send(request)) as response:
                if not 200 <= response.status < 300:
                    raise refusal(call.name, self._answer(response, call))
                yield response
        except connection.ConnectionFailed as error:
            raise Unreachable(f"{call.name}: {error}") from error

    def _signer(self, call: Call) -> Signer | None:
        if call.signer is not None or self.identity is None:
            return call.signer
        return self.identity.signer(self)

    def _now(self) -> int:
        """The coordinator's time, as far as known, in whole seconds."""
        return int(self.wall() + self._ahead_s)

    def _allowed_s(self, call: Call) -> float:
        return min(call.timeout_s, LEAVING_S) if self.stopping() else call.timeout_s


def _secagg(assignment: str, number: int) -> str:
    return f"{_ASSIGNMENTS}{_segment(assignment)}/secagg/{number}"


def _segment(name: str) -> str:
    return quote(name, safe="")
