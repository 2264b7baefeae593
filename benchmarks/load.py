"""Load for a coordinator: thousands of devices in one process, and a task whose devices do not train.

Each device signs with its own key over real HTTP. It has no state folder, policy, journal or runtime, and its report is
zeros. So one machine can load a coordinator with more devices than it could run (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, UnsetType

from coordinator.store.tasks import TaskSettings
from fedcore import algorithms, checkpoint
from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Evidence, Footprint, Manifest, Parity
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan, in_turn
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop
from fedcore.wire import messages
from fedcore.wire.signatures import DIGEST, PublicKey, SignableRequest, Signer, content_digest
from muster.local.server import LocalCoordinator, local_coordinator

T = TypeVar("T")
Behaviour: TypeAlias = Literal["steady", "silent", "killed"]
POPULATION = "light"
RETRIES = 3
RETRIED = frozenset({429, 503})
ENROLLING = 16
_HOLD_SHARE = 0.2
_JSON, _BYTES = "application/json", "application/octet-stream"
_CAPABILITIES = messages.StatedCapabilities(runtime="muster-load", version="1", engine="none", formats=("onnx",))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The devices. silent: the share that never reports; killed: the share that dies in the middle of an upload.

    Both are shares of devices, not of sessions: a device keeps its behaviour. uploading: the most reports sent at the
    same time. pause_s: the pause between a receipt and the next check-in. holds: whether devices hold assignments while
    they work, as they should where that takes long. labels: those that all of them tell. seed: of behaviours and
    delays.
    """

    coordinator: str
    devices: int
    silent: float = 0.0
    killed: float = 0.0
    uploading: int = 1000
    wait_s: float = 60.0
    pause_s: float = 0.0
    holds: bool = True
    labels: dict[str, str] | UnsetType = UNSET
    seed: int = 0


@dataclass(slots=True)
class LoadDevice:
    """One device: its signer, and how it ends sessions."""

    signer: Signer
    behaviour: Behaviour


class Refusal(Exception):
    """The coordinator answered with this status."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Call:
    """A request to the coordinator."""

    method: str
    path: str
    body: bytes = b""
    digest: str = ""
    prefer_s: float | None = None
    etag: str = ""


class LoadFleet(AbstractAsyncContextManager["LoadFleet"]):
    """The devices. `endings` counts sessions by ending, `requests` requests by status (0: broken connection).

    `trained` counts finished reports; they are held back while `may_upload` is not set.
    """

    def __init__(self, config: LoadConfig) -> None:
        self.config = config
        self.endings: Counter[str] = Counter()
        self.requests: Counter[int] = Counter()
        self.devices: list[LoadDevice] = []
        self._random = random.Random(config.seed)
        self._authority = urlsplit(config.coordinator).netloc
        self._plans: dict[str, list[tuple[bytes, str]]] = {}
        self._checkpoint = ""
        self.trained = 0
        self.may_upload = asyncio.Event()
        self.may_upload.set()
        self._cache_lock = asyncio.Lock()
        self._uploads = asyncio.Semaphore(config.uploading)
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            self.config.coordinator,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=self.config.wait_s + 60),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def enrol(self) -> None:
        """Enrol every device, a few at a time."""
        turn = asyncio.Semaphore(ENROLLING)

        async def enrol(behaviour: Behaviour) -> LoadDevice:
            async with turn:
                return await self._enrol(behaviour)

        self.devices += await asyncio.gather(*map(enrol, _behaviours(self.config)))
        self._random.shuffle(self.devices)

    async def run(self, while_: Callable[[], Awaitable[T]]) -> T:
        """Run every device until `while_` has ended, then cut off sessions in progress. Returns `while_`'s result."""
        self._over.clear()
        tasks = [asyncio.create_task(self._run(device)) for device in self.devices]
        try:
            return await while_()
        finally:
            self._over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def check_in(self, device: LoadDevice) -> messages.Accepted | messages.Rejected:
        """One check-in without retries. Raises Refusal, or aiohttp's errors."""
        answer: messages.CheckInAnswer = await self._message(device, self._checking_in(), messages.CheckInAnswer)
        return answer

    def signed_check_in(self, device: LoadDevice) -> bytes:
        """A signed check-in as bytes, for another client to send within five minutes."""
        call = self._checking_in()
        fields = {"Host": self._authority, "Content-Length": str(len(call.body))} | self._headers(device, call)
        lines = [f"{call.method} {call.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + call.body

    def _checking_in(self) -> Call:
        path = f"/v1/populations/{POPULATION}/checkins"
        hello = messages.CheckIn(capabilities=_CAPABILITIES, examples={"default": 8}, labels=self.config.labels)
        return Call("POST", path, messages.encode(hello))

    async def _enrol(self, behaviour: Behaviour) -> LoadDevice:
        key = Ed25519PrivateKey.generate()
        newcomer = LoadDevice(Signer(PublicKey.of(key).text, key), behaviour)
        call = Call("POST", "/v1/devices", messages.encode(messages.Enrol(attestation=messages.Unattested())))
        enrolled: messages.Enrolled = await self._retrying(lambda: self._message(newcomer, call, messages.Enrolled))
        return LoadDevice(Signer(enrolled.device, key), behaviour)

    async def _run(self, device: LoadDevice) -> None:
        while not self._over.is_set():
            try:
                ending, rest_s = await self._session(device)
            except Refusal as refusal:
                ending, rest_s = f"refused {refusal.status}", max(1.0, refusal.retry_after_s)
            except (aiohttp.ClientError, TimeoutError, OSError):
                ending, rest_s = "unreachable", 1.0
            self.endings[ending] += 1
            await asyncio.sleep(rest_s)

    async def _session(self, device: LoadDevice) -> tuple[str, float]:
        """One session. Returns its ending, and the device's rest after it."""
        answer, _ = await self._drawn(device)
        if isinstance(answer, messages.Rejected):
            return answer.reason, self._delay_s(answer)
        if device.behaviour == "silent":
            await self._report(device, answer)
            return "silent", answer.report_within_s
        hold = asyncio.create_task(self._hold(device, answer)) if self.config.holds else None
        try:
            return await self._work(device, answer)
        finally:
            if hold is not None:
                hold.cancel()

    async def _drawn(self, device: LoadDevice) -> tuple[messages.AssignmentAnswer, messages.RetryWindow]:
        """Check in and wait. Returns the assignment or the rejection, and the device's window after the session."""
        check_in = await self._retrying(lambda: self.check_in(device))
        if isinstance(check_in, messages.Rejected):
            return check_in, check_in.retry
        call = Call("POST", f"/v1/sessions/{check_in.session}/assignments", prefer_s=self.config.wait_s)
        return await self._retrying(lambda: self._message(device, call, messages.AssignmentAnswer)), check_in.retry

    async def _hold(self, device: LoadDevice, assignment: messages.Assignment) -> None:
        """Hold the assignment during the session. A device that is not needed learns so when it sends its report."""
        wait_s = _HOLD_SHARE * (assignment.lost_after_s or assignment.report_within_s)
        call = Call("GET", f"/v1/assignments/{assignment.assignment}", prefer_s=self.config.wait_s)
        rest_s = wait_s
        while True:
            await asyncio.sleep(rest_s)
            began = time.monotonic()
            try:
                await self._ask(device, call)
                rest_s = max(0.0, wait_s - (time.monotonic() - began))
            except Refusal as refusal:
                if refusal.status not in RETRIED:
                    return
                rest_s = wait_s
            except (aiohttp.ClientError, OSError):
                rest_s = wait_s

    async def _work(self, device: LoadDevice, assignment: messages.Assignment) -> tuple[str, float]:
        body, digest = await self._report(device, assignment)
        upload = Call("PUT", f"/v1/assignments/{assignment.assignment}/report", body, digest)
        if device.behaviour == "killed":
            await self._die_uploading(device, upload)
            return "killed", assignment.report_within_s
        self.trained += 1
        await self.may_upload.wait()
        async with self._uploads:
            await self._retrying(lambda: self._message(device, upload, messages.Receipt))
        return "reported", self.config.pause_s

    def _delay_s(self, rejected: messages.Rejected) -> float:
        return self._random.uniform(rejected.retry.min_s, rejected.retry.max_s)

    async def _report(self, device: LoadDevice, assignment: messages.Assignment) -> tuple[bytes, str]:
        """A report of zeros and its digest.

        One device fetches the plan for all. Every device requests the checkpoint; only the first one receives it.
        """
        model, plan = assignment.checkpoint, assignment.plan.sha256
        async with self._cache_lock:
            if plan not in self._plans:
                trips = Plan.decode(await self._blob(device, assignment.plan)).trips
                self._plans[plan] = [_zeros(trip.report) for trip in trips]
            cached = self._checkpoint == model.sha256
            if not cached:
                await self._blob(device, model)
                self._checkpoint = model.sha256
        if cached:
            await self._blob(device, model, cached=True)
        return in_turn(self._plans[plan], assignment.round)

    async def _blob(self, device: LoadDevice, ref: BlobRef, *, cached: bool = False) -> bytes:
        """A blob's bytes; none if they are cached, since blobs never change."""
        call = Call("GET", f"/v1/blobs/{ref.sha256}", etag=f'"{ref.sha256}"' if cached else "")
        data: bytes = await self._retrying(lambda: self._ask(device, call))
        return data if cached else ref.check(data)

    async def _die_uploading(self, device: LoadDevice, call: Call) -> None:
        """Send half a body, then close the connection."""

        async def half() -> AsyncIterator[bytes]:
            yield call.body[: len(call.body) // 2]
            await asyncio.sleep(0.01)
            raise ConnectionAbortedError

        headers = self._headers(device, call) | {"Content-Length": str(len(call.body))}
        try:
            async with self._http.request(call.method, call.path, data=half(), headers=headers):
                pass
        except (aiohttp.ClientError, OSError):
            self.requests[0] += 1

    async def _retrying(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to `ask`, retried as the protocol allows: on 429, 503 and broken connections, three times."""
        for attempt in range(RETRIES + 1):
            wait_s = 0.5 * 2**attempt * self._random.uniform(0.5, 1.0)
            try:
                return await ask()
            except Refusal as refusal:
                if refusal.status not in RETRIED or attempt == RETRIES:
                    raise
                wait_s = max(wait_s, refusal.retry_after_s)
            except (aiohttp.ClientError, OSError):
                if attempt == RETRIES:
                    raise
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _message(self, device: LoadDevice, call: Call, kind: Any) -> Any:
        return messages.decode(await self._ask(device, call), kind)

    async def _ask(self, device: LoadDevice, call: Call) -> bytes:
        try:
            headers = self._headers(device, call)
            async with self._http.request(call.method, call.path, data=call.body or None, headers=headers) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, OSError):
            self.requests[0] += 1
            raise
        self.requests[answer.status] += 1
        if answer.status >= 400:
            after = answer.headers.get("Retry-After", "")
            raise Refusal(answer.status, float(after) if after.isdecimal() else 0.0)
        return data

    def _headers(self, device: LoadDevice, call: Call) -> dict[str, str]:
        headers = {}
        if call.body:
            headers["Content-Type"] = _BYTES if call.method == "PUT" else _JSON
            headers["Content-Digest"] = call.digest or content_digest(call.body)
        if call.prefer_s is not None:
            headers["Prefer"] = f"wait={call.prefer_s:.0f}"
        if call.etag:
            headers["If-None-Match"] = call.etag
        digest = headers.get("Content-Digest")
        signable = SignableRequest(call.method, self._authority, call.path, {DIGEST: digest}.get)
        return headers | device.signer.headers(signable, int(time.time()))


def _zeros(layout: ReportLayout) -> tuple[bytes, str]:
    """The body and digest of a report of zeros with weight 1."""
    body = checkpoint.encode({"report": layout.weigh(np.zeros(layout.size - 1, np.float32), 1.0)})
    return body, content_digest(body)


def _behaviours(config: LoadConfig) -> Iterator[Behaviour]:
    """The behaviours of all devices, by shares; the rest are steady."""
    silent, killed = (round(share * config.devices) for share in (config.silent, config.killed))
    for number in range(config.devices):
        yield "silent" if number < silent else "killed" if number < silent + killed else "steady"


# A task without graphs to run, for loading a coordinator: the devices of such a task report zeros.


FORMAT = "onnx"


@contextmanager
def null_coordinator(size: int, task: TaskSettings, **settings: Any) -> Iterator[tuple[LocalCoordinator, str]]:
    """A coordinator process with one such task on `size` parameters, in a temporary folder; the task's id.

    `settings` are the coordinator's. Raises ServerError.
    """
    with tempfile.TemporaryDirectory(prefix="muster-null-") as folder:
        bundle = null_bundle(Path(folder) / "plan", size)
        with local_coordinator(Path(folder), **settings) as local:
            yield local, local.store.register_task(bundle, task).id


def null_bundle(folder: Path, size: int) -> Bundle:
    """A bundle of FedAvg on `size` parameters, weighing devices alike. Its graphs are text, and never run."""
    params = VectorSpec("params", size)
    graphs = {name: name.encode() for name in ("train.begin", "train.step", "report")}
    metrics = Segment("train.metrics", 2, "sum", ("examples", "loss"))
    plan = Plan(
        name="null",
        schema=ParamSchema((TensorSpec("w", (size,)),)),
        broadcast=(params,),
        examples=ExampleSpec((Field("x", "float32", (1,)),)),
        passes=(PassPlan("train", Loop(batch_size=1), (params,), ("loss",)),),
        report=ReportLayout((Segment("delta", size, "mean"), Segment("weight", 1, "sum"), metrics), "uniform"),
        graphs={FORMAT: {name: BlobRef.of(graph) for name, graph in graphs.items()}},
    ).encode()
    algorithm = AlgorithmRef("fedavg", {"weighting": "uniform"})
    start = np.zeros(size, np.float32)
    state = checkpoint.encode(algorithms.create(algorithm.name, algorithm.settings).init(start))
    footprint = Footprint(step_cpu_ms=1.0, peak_rss_mb=1.0, graph_bytes=sum(map(len, graphs.values())))
    parity = (Parity("train.step", 1, 0.0, 0.0),)
    evidence = Evidence(runtime="none", version="none", tolerance=1.0, parity=parity, footprint=footprint)
    certificate = msgspec.json.encode(Certificate("none", {FORMAT: evidence}))
    manifest = Manifest(
        name="null",
        model="none",
        algorithm=algorithm,
        plan=BlobRef.of(plan),
        state=BlobRef.of(state),
        certificate=BlobRef.of(certificate),
    )
    return Bundle.write(folder, manifest, [plan, state, certificate, *graphs.values()])
