"""The cost of the page of devices: bytes to load it, CPU time until it can train, and its memory in real sessions."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from benchmarks.js_runtimes import Chromium, Page, Site
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms.algorithm import Algorithm
from fedcore.plan import Field
from fedcore.signing import SigningKey
from muster.local.browser_demo import Person, phone
from muster.local.server import LocalCoordinator, local_coordinator

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


class PageCost(msgspec.Struct, frozen=True, kw_only=True):
    """first_load_mb: 10⁶ bytes that a browser which knows nothing is sent, compressed, engine included. ready_cpu_s: of
    all its processes, until the graphs of `model` are loaded.

    The rest is the private memory of the page's process, in 2²⁰ bytes: of an empty page, of the page before it takes
    part, at most in its sessions, and after its worker ended.
    """

    model: str
    first_load_mb: float
    ready_cpu_s: float
    empty_mb: float
    page_mb: float
    training_mb: float
    ended_mb: float


def page_cost(site: Site, work: Path, algorithm: Algorithm, blocks: int) -> PageCost:
    """Load the page, and train on it in rounds of a real coordinator, in as many fresh browsers each.

    The least CPU time counts, and the browser that took most memory. work: the folder of a model, of its name. Raises
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
    return PageCost(model=work.name, **least, **most)


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
