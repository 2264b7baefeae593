"""The cost of the page of devices: bytes to load it, CPU time until it can train, and memory while it trains."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from muster.bench.js_runtimes import Page, Site
from muster.browser import phone

TRAININGS = 3
_LOOKS_EVERY_S = 0.01
_SETTLES_S = 3.0
_BYTES_OF_A_MB = 1e6


class PageCost(msgspec.Struct, frozen=True, kw_only=True):
    """first_load_mb: 10⁶ bytes that a browser which knows nothing is sent, compressed, engine included. ready_cpu_s: of
    all its processes, until the graphs of `model` are loaded.

    The rest is the private memory of the page's process, in 2²⁰ bytes: of an empty page, of the page before and with
    its loaded graphs, at most while it trains, and after its worker ended.
    """

    model: str
    first_load_mb: float
    ready_cpu_s: float
    empty_mb: float
    page_mb: float
    loaded_mb: float
    training_mb: float
    ended_mb: float


def page_cost(site: Site, folder: Path) -> PageCost:
    """Load the page into a fresh browser, and train on the work in a folder. Raises BrowserMissing."""
    with phone() as browser:
        page = Page(browser, site)
        browser.get("about:blank")
        empty_mb, sent_bytes, begun_s = page.memory_mb(), site.sent_bytes, page.cpu_s()
        page.open()
        opened_s, page_mb = page.cpu_s() - begun_s, page.memory_mb()
        loaded = page.load(folder)
        loaded_mb = page.memory_mb()
        with _Peak(page) as peak:
            for _ in range(TRAININGS):
                page.ask(train=None)
        page.end_worker()
        time.sleep(_SETTLES_S)
        return PageCost(
            model=folder.name,
            first_load_mb=(site.sent_bytes - sent_bytes) / _BYTES_OF_A_MB,
            ready_cpu_s=opened_s + loaded.cpu_s,
            empty_mb=empty_mb,
            page_mb=page_mb,
            loaded_mb=loaded_mb,
            training_mb=peak.most_mb,
            ended_mb=page.memory_mb(),
        )


class _Peak:
    """The most memory of a page while a block runs, by looking often."""

    def __init__(self, page: Page) -> None:
        self._page, self.most_mb = page, 0.0
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
            self.most_mb = max(self.most_mb, self._page.memory_mb())
