"""The demo in a browser: a coordinator's page in Chromium with a phone's screen, and devices on it."""

from __future__ import annotations

import base64
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray
from selenium import webdriver

from export.build import export_bundle
from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.errors import InvalidSetting
from fedcore.signing import SigningKey
from muster.local.demo_tasks import DATASET, MODEL, SETTINGS, demo_settings, for_algorithm
from muster.local.fleet import local_fleet
from muster.local.server import local_coordinator, memory_folder
from simulator import datasets
from simulator.engine import evaluate
from simulator.fleet import fork_servers
from simulator.fleet.browsers import chromium
from simulator.fleet.fleet import Fleet
from simulator.fleet.profile import counted_kinds
from simulator.training import overall

SCREEN = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
"""A small phone's, in CSS pixels."""
_AGENT = "Mozilla/5.0 (Linux; Android 16; Phone) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/{} Mobile Safari/537.36"
_TIMEOUT_S = 120.0
# A text may show for only a second, and a busy machine may look less often: the page notes every text.
_TEXT_WITH = """
const [name, words] = arguments, element = document.getElementById(name), all = (window.texts ??= {});
if (!all[name]) {
  all[name] = [];
  const note = () => all[name].push(element.innerText);
  new MutationObserver(note).observe(element, { characterData: true, childList: true, subtree: true });
  note();
}
const at = all[name].findIndex((text) => text.includes(words));
if (at < 0) return null;
all[name].splice(0, at);
return all[name][0];
"""


class PageFailed(Exception):
    """A page did not show what it should."""


@contextmanager
def phone() -> Iterator[webdriver.Chrome]:
    """A browser with a fresh profile, until the block ends. Raises BrowserMissing."""
    with chromium(capabilities={"goog:loggingPrefs": {"browser": "ALL"}}) as opened:
        version = opened.capabilities["browserVersion"]
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
        opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        opened.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": _AGENT.format(version)})
        yield opened


class Person:
    """A person on the page of a coordinator, by a link that names a population and the signers of its plans."""

    def __init__(self, browser: webdriver.Chrome, url: str, population: str, *signers: str) -> None:
        self._browser = browser
        self._url = f"{url}/page/?{urlencode({'population': population, 'signer': signers}, doseq=True)}"
        self.open()

    def open(self) -> None:
        """Open the page, or reload it."""
        self._browser.get(self._url)
        self.waits_for("state", "Ready")

    def text(self, name: str) -> str:
        """The text of the element with an id."""
        return str(self._browser.execute_script("return document.getElementById(arguments[0]).innerText", name))

    def waits_for(self, name: str, words: str) -> str:
        """Wait until an element shows these words, or has shown them since the last wait; returns its text.

        Raises PageFailed.
        """
        until = time.monotonic() + _TIMEOUT_S
        while not (text := self._browser.execute_script(_TEXT_WITH, name, words)):
            if time.monotonic() > until:
                text, state = self.text(name), self.text("state")
                raise PageFailed(f"the page never says {words!r}; {name} says {text!r}, and its state {state!r}")
            time.sleep(0.05)
        return str(text)

    def press(self, name: str) -> None:
        """Press a button."""
        self._browser.execute_script("document.getElementById(arguments[0]).click()", name)

    def draw(self, inked: NDArray[np.bool_], digit: int) -> None:
        """Draw a digit with the pointer and keep it. inked: cells to draw, (8, 8). Raises PageFailed."""
        before = int(self.text("count"))
        self.sketch(inked)
        self.press(f"keep-{digit}")
        self.waits_for("count", str(before + 1))

    def sketch(self, inked: NDArray[np.bool_]) -> None:
        """Draw with the pointer, and keep nothing. inked: cells to draw, (8, 8). Raises PageFailed."""
        until = time.monotonic() + _TIMEOUT_S
        self._dots(inked)
        while self._browser.execute_script("return document.getElementById('keep-0').disabled"):
            if time.monotonic() > until:
                raise PageFailed("no ink shows on the pad")
            self._dots(inked)  # the page had moved under the pointer

    def stroke(self, *points: tuple[float, float]) -> None:
        """Draw a line through points of the pad: rows and columns, in cells from its upper left corner."""
        left, top, side = self._browser.execute_script(
            "const pad = document.getElementById('pad'); pad.scrollIntoView({block: 'center'});"
            "const {left, top, width} = pad.getBoundingClientRect(); return [left, top, width / 8]"
        )
        for kind, visited in (("mousePressed", points[:1]), ("mouseMoved", points[1:]), ("mouseReleased", points[-1:])):
            for row, column in visited:
                place = {"x": left + column * side, "y": top + row * side}
                event = {"type": kind, **place, "button": "left", "buttons": 1, "clickCount": 1}
                self._browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def _dots(self, inked: NDArray[np.bool_]) -> None:
        for row, column in np.argwhere(inked):
            self.stroke((row + 0.5, column + 0.5))  # a line would ink the cells between

    def counted(self) -> int:
        """The number of the page's reports that were counted, by its journal."""
        return self.text("entries").count("A report on")

    def save_screenshot(self, path: Path) -> None:
        """Save a screenshot of the whole page, a PNG."""
        self._browser.execute_script("scrollTo(0, 0)")
        shot = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self._browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]))


POPULATION = "digits"
DRAWN = 6
"""The number of examples drawn on the page."""
_INK = 0.5
"""The level above which a cell is inked."""


@dataclass(frozen=True, slots=True)
class BrowserDemo:
    """The outcome. rounds: committed ones. counted: the rounds with a report from the page.

    devices: on Node. test_accuracy: on held-out users. page: its final state. picture: the path of its screenshot.
    """

    rounds: int
    devices: int
    counted: int
    test_accuracy: float
    page: str
    picture: str


def run_browser_demo(name: str, rounds: int, devices: int, seed: int, picture: Path) -> BrowserDemo:
    """Train with `devices` on Node and a page with hand-drawn digits, and save a screenshot of the page, a PNG.

    name: of the algorithm. Raises FleetError where Chromium or Node is missing, PageFailed, InvalidSetting for an
    algorithm that devices in TypeScript do not run.
    """
    program = fork_servers.program()
    algorithm = create(name, SETTINGS.get(name))
    if keeps_client_state(algorithm):
        raise InvalidSetting(f"{name} keeps vectors on devices, and those in TypeScript keep none: leave --browser out")
    with tempfile.TemporaryDirectory(prefix="muster-demo-", dir=memory_folder()) as place, phone() as browser:
        folder = Path(place)
        build = [program, "--no-warnings", str(fork_servers.JS_FOLDER / "page" / "build.ts"), str(folder / "page")]
        subprocess.run(build, check=True)
        model = Model(load_model(MODEL), seed)
        bundle = export_bundle(model, algorithm, folder / "plan", MODEL)
        train, test = datasets.users(DATASET, None, devices + 1)
        key = SigningKey.new(folder / "release.pem")
        with local_coordinator(folder / "coordinator", secure=True, page=folder / "page") as local:
            settings = demo_settings(POPULATION, len(train), rounds, seed, train, secure=True)
            settings = for_algorithm(settings, algorithm, train)
            task = local.create_task(bundle, settings, key).id
            person = Person(browser, local.url, POPULATION, key.signer)
            drawn = train.shard(devices)
            for levels, digit in zip(drawn["x"][:DRAWN, 0], drawn["y"], strict=False):
                person.draw(levels > _INK, int(digit))
            users, kinds = train.subset(range(devices)), counted_kinds(f"node:{devices}")
            fleet = local_fleet(local, settings, users, key, folder / "devices", kinds=kinds)
            state = _train(fleet, person, rounds)
            person.save_screenshot(picture)
            committed = len(local.committed(task))
            params = local.store.checkpoint(task, committed)["params"]
        accuracy = overall(evaluate(model, params, test)["accuracy"], test)
        return BrowserDemo(committed, devices, person.counted(), accuracy, state, str(picture))


def _train(fleet: Fleet, person: Person, rounds: int) -> str:
    """Let page and fleet train until the task ends; returns the page's state after its last report."""
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(fleet.run)
        person.press("take-part")
        try:
            return person.waits_for("state", f"Done: round {rounds},")
        finally:
            running.result()
