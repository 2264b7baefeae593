"""Runtimes of the device in TypeScript as processes that do blocks of work: Node, and a page in Chromium."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

import uvicorn
from selenium import webdriver
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.usage import cpu_s, cpu_s_of_all, family_of
from coordinator.api.page import PAGE, PageFiles
from muster.local.browser_demo import PageFailed, Person, phone
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
        words = [fork_servers.program(), "--no-warnings", str(fork_servers.FOLDER / "bench" / "node.ts")]
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
        words = [program, "--no-warnings", str(fork_servers.FOLDER / script / "build.ts"), str(page)]
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
