"""Chromium with a phone's screen, and a person's actions on the page of devices."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray
from selenium import webdriver

from simulator.fleet.chromium import chromium

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
