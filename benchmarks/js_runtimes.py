"""Runtimes of the device in TypeScript as processes that do blocks of work: Node, and a page in Chromium.

Of the page also its cost: bytes to load it, CPU time until it can train, and its memory in real sessions.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

import msgspec
import uvicorn
from selenium import webdriver
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.usage import cpu_s, cpu_s_of_all, family_of
from coordinator.api.page import PAGE, PageFiles
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms.algorithm import Algorithm
from fedcore.plan import Field
from fedcore.signing import SigningKey
from muster.local.browser_demo import PageFailed, Person, phone
from muster.local.server import LocalCoordinator, local_coordinator
from simulator.fleet import fork_servers

_WORK, _WORKER = "/work", f"{PAGE}/bench.js"
_PATIENCE_S = 600
_MB = 1024
"""Kilobytes, as /proc counts."""
_START = """
window.device?.terminate();
window.device = new Worker(arguments[0], { type: "module" });"""
_ASK = """
const [what, done] = arguments;
device.onmessage = ({ data }) => done(data);
device.onerror = ({ message }) => done({ failed: message });
device.postMessage(what);"""
ROUNDS, EXAMPLES = 2, 100
_LOOKS_EVERY_S = 0.01
_SETTLES_S = 5.0
_BYTES_OF_A_MB = 1e6
_KEEP = """
const [name, fields, count, done] = arguments;
const random = ({ dtype, shape, high }) => {
  const size = shape.reduce((product, axis) => product * axis, 1);
  const whole = () => Math.floor(Math.random() * (high ?? 256));
  const values = {
    float32: () => Float32Array.from({ length: size }, Math.random),
    int64: () => BigInt64Array.from({ length: size }, () => BigInt(whole())),
    int32: () => Int32Array.from({ length: size }, whole),
    uint8: () => Uint8Array.from({ length: size }, whole),
  };
  return { shape, values: values[dtype]() };
};
const opening = indexedDB.open(name);
opening.onsuccess = () => {
  const transaction = opening.result.transaction("examples", "readwrite");
  transaction.oncomplete = () => {
    opening.result.close();
    done();
  };
  for (let place = 0; place < count; place++) {
    const made = Object.fromEntries(fields.map((field) => [field.name, random(field)]));
    const kept = { collection: "default", at: Date.now() / 1000, fields: made };
    transaction.objectStore("examples").add(kept);
  }
};"""
"""Puts random examples where the page keeps a person's own."""


@dataclass(frozen=True, slots=True)
class Done:
    """A block of work: what the runtime answered, and the CPU seconds of all its processes."""

    answer: dict[str, Any]
    cpu_s: float


class JsRuntime(Protocol):
    """What does blocks of work, in turn (`device_runtime/js/bench/blocks.ts`).

    engine: its name, once work is loaded.
    """

    engine: str

    def load(self, folder: Path) -> Done:
        """Load the work in a folder."""

    def ask(self, **what: object) -> Done:
        """Do another block."""


class Node:
    """A process of Node, a new one for each work: a device has one model. Raises FleetError where Node is missing."""

    def __init__(self) -> None:
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def load(self, folder: Path) -> Done:
        """Load the work in a folder."""
        self._process.communicate()
        self._start()
        return self.ask(load=str(folder))

    def _start(self) -> None:
        """Start a process, and wait until its engine is there."""
        words = [fork_servers.program(), "--no-warnings", str(fork_servers.JS_FOLDER / "bench" / "node.ts")]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asked, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self.engine: str = self.ask().answer["engine"]

    def ask(self, **what: object) -> Done:
        """Do another block."""
        before = cpu_s(self._process.pid)
        self._asked.write(json.dumps(what) + "\n")
        self._asked.flush()
        answer = json.loads(self._answers.readline())
        return Done(answer, cpu_s(self._process.pid) - before)


class Site:
    """The files of the page, and work below a folder, on a port of this process.

    page: the folder of the page. sent_bytes: of its files so far, as they were sent, without the worker of benchmarks.
    """

    def __init__(self, page: Path, work: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.page, self.sent_bytes = page, 0
        self._files: ASGIApp = PageFiles(page)
        self.app = Starlette(routes=[Mount(_WORK, StaticFiles(directory=work)), Mount(PAGE, self._counted)])

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if scope["path"] != _WORKER:
                self.sent_bytes += len(message.get("body", b""))
            await send(message)

        await self._files(scope, receive, counted)


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """The page, built into a folder, and served with the work below that folder. Raises FleetError without Node."""
    page, program = folder / "page", fork_servers.program()
    for script in ("page", "bench"):
        words = [program, "--no-warnings", str(fork_servers.JS_FOLDER / script / "build.ts"), str(page)]
        subprocess.run(words, check=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        files = Site(page, folder, listening.getsockname()[1])
        server = uvicorn.Server(uvicorn.Config(files.app, log_config=None))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        serving.start()
        try:
            yield files
        finally:
            server.should_exit = True
            serving.join()


class Chromium:
    """The processes of a browser."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        # The driver starts a single process, and that one all others.
        self._pid = family_of(cast(subprocess.Popen[bytes], browser.service.process).pid)[1]

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the browser so far."""
        return cpu_s_of_all(self._pid)

    def memory_mb(self) -> float:
        """Private memory of the page's process: of those that render, the one with most, in 2²⁰ bytes.

        It counts what has no file behind it, in memory or swapped out, as Chromium's own task manager does. The code of
        the browser, which its processes share, is not in it.
        """
        return max(_private_kb(pid) for pid in family_of(self._pid) if _renders(pid)) / _MB


class Page:
    """The page of devices in a browser, with a worker that does blocks of work on the engine of the page's own."""

    def __init__(self, browser: webdriver.Chrome, site: Site) -> None:
        browser.set_script_timeout(_PATIENCE_S)
        self._browser, self.site = browser, site
        self.chromium = Chromium(browser)

    def open(self) -> None:
        """Load the page, with all that it keeps for later."""
        Person(self._browser, self.site.url, "bench")
        self._browser.execute_async_script("navigator.serviceWorker.ready.then(arguments[0])")

    def load(self, folder: Path) -> Done:
        """Load the work in a folder, which the site serves, in a worker of its own."""
        before = self.chromium.cpu_s()
        self._browser.execute_script(_START, _WORKER)
        answer = self.ask(load=f"{_WORK}/{folder.name}").answer
        self.engine: str = answer["engine"]
        return Done(answer, self.chromium.cpu_s() - before)

    def ask(self, **what: object) -> Done:
        """Do another block. Raises PageFailed."""
        before = self.chromium.cpu_s()
        answer: dict[str, Any] = self._browser.execute_async_script(_ASK, what)
        if "failed" in answer:
            raise PageFailed(f"the worker of benchmarks failed: {answer['failed']}")
        return Done(answer, self.chromium.cpu_s() - before)


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A page in a fresh browser, open, with the work below a folder. Raises BrowserMissing, FleetError without Node."""
    with phone() as browser, site(folder) as served:
        opened = Page(browser, served)
        opened.open()
        yield opened


def _renders(pid: int) -> bool:
    return b"--type=renderer" in (Path("/proc") / str(pid) / "cmdline").read_bytes()


def _private_kb(pid: int) -> int:
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def page_cost(site: Site, work: Path, algorithm: Algorithm, blocks: int) -> dict[str, Any]:
    """Load the page, and train on it in rounds of a real coordinator, in as many fresh browsers each.

    The least CPU time counts, and the browser that took most memory. work: the folder of a model, of its name.
    first_load_mb: 10⁶ bytes that a browser which knows nothing is sent, compressed, engine included. ready_cpu_s: of
    all its processes, until the graphs are loaded. The rest is the private memory of the page's process, in 2²⁰ bytes:
    of an empty page, of the page before it takes part, at most in its sessions, and after its worker ended. Raises
    BrowserMissing.
    """
    model, folder = Model(load(work.name)), work / "task"
    bundle = export_bundle(model, algorithm, folder / "bundle")
    loads = [_first_load(site, work) for _ in range(blocks)]
    with local_coordinator(folder, page=site.page) as local:
        memories = []
        for block in range(blocks):
            settings = TaskSettings(population=f"block-{block}", goal=1, rounds=ROUNDS, over_selection=1.0)
            local.create_task(bundle, settings, SigningKey.new(folder / f"{block}.pem"))
            memories.append(_memory(local, settings.population, bundle.plan.examples.fields))
    least = min(loads, key=lambda load: load["ready_cpu_s"])
    most = max(memories, key=lambda memory: memory["training_mb"])
    return {"model": work.name, **least, **most}


def _first_load(site: Site, work: Path) -> dict[str, float]:
    with phone() as browser:
        page = Page(browser, site)
        sent_bytes, begun_s = site.sent_bytes, page.chromium.cpu_s()
        page.open()
        opened_s = page.chromium.cpu_s() - begun_s
        loaded_s = page.load(work).cpu_s
        sent_mb = (site.sent_bytes - sent_bytes) / _BYTES_OF_A_MB
        return {"first_load_mb": sent_mb, "ready_cpu_s": opened_s + loaded_s}


def _memory(local: LocalCoordinator, population: str, fields: tuple[Field, ...]) -> dict[str, float]:
    with phone() as browser:
        chromium = Chromium(browser)
        browser.get("about:blank")
        empty_mb = chromium.memory_mb()
        person = Person(browser, local.url, population)
        page_mb = chromium.memory_mb()
        kept_in = f'muster ["{local.url}/","{population}"]'
        browser.execute_async_script(_KEEP, kept_in, msgspec.to_builtins(fields), EXAMPLES)
        with _Peak(chromium) as peak:
            person.press("take-part")
            person.waits_for("state", f"Done: round {ROUNDS},")
        person.press("pause")
        time.sleep(_SETTLES_S)
        ended_mb = chromium.memory_mb()
        return {"empty_mb": empty_mb, "page_mb": page_mb, "training_mb": peak.most_mb, "ended_mb": ended_mb}


class _Peak:
    """The most memory while a block runs, by looking often."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium, self.most_mb = chromium, 0.0
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> _Peak:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY_S):
            self.most_mb = max(self.most_mb, self._chromium.memory_mb())
