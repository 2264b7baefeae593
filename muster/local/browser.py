"""A browser as a phone has it, a real Chromium with a phone's screen, and what a person does at the page of devices."""

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
_PATIENCE_S = 120.0
# A text may stand for a second only, which a busy machine can take between two looks: the page notes all of them.
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
    """A page did not come to say what it should."""


@contextmanager
def phone() -> Iterator[webdriver.Chrome]:
    """A browser with nothing kept from before, for as long as the block runs. Raises BrowserMissing."""
    with chromium(capabilities={"goog:loggingPrefs": {"browser": "ALL"}}) as opened:
        version = opened.capabilities["browserVersion"]
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
        opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        opened.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": _AGENT.format(version)})
        yield opened


class Person:
    """Somebody at the page of a coordinator, by a link that names a population and who may release plans for it."""

    def __init__(self, browser: webdriver.Chrome, url: str, population: str, *signers: str) -> None:
        self._browser = browser
        self._url = f"{url}/page/?{urlencode({'population': population, 'signer': signers}, doseq=True)}"
        self.open()

    def open(self) -> None:
        """Open the page, anew if it is open."""
        self._browser.get(self._url)
        self.waits_for("state", "Ready")

    def text(self, name: str) -> str:
        """The text of an element by its id."""
        return str(self._browser.execute_script("return document.getElementById(arguments[0]).innerText", name))

    def waits_for(self, name: str, words: str) -> str:
        """The text of an element, once it holds these words, or held them since the last wait for it.

        Raises PageFailed.
        """
        until = time.monotonic() + _PATIENCE_S
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
        """Draw a digit by pointer, cell by cell, say which it is, and keep it. inked: (8, 8). Raises PageFailed."""
        before, until = int(self.text("count")), time.monotonic() + _PATIENCE_S
        self._stroke(inked, digit)
        while self._browser.execute_script("return document.getElementById('keep').disabled"):
            if time.monotonic() > until:
                raise PageFailed("the pad takes no ink")
            self._stroke(inked, digit)  # the page had moved under the pointer
        self.press("keep")
        self.waits_for("count", str(before + 1))

    def _stroke(self, inked: NDArray[np.bool_], digit: int) -> None:
        left, top, side = self._browser.execute_script(
            "const pad = document.getElementById('pad'); pad.scrollIntoView({block: 'center'});"
            "document.getElementById('digit').value = arguments[0];"
            "const {left, top, width} = pad.getBoundingClientRect(); return [left, top, width / 8]",
            str(digit),
        )
        way = [(left + (x + 0.5) * side, top + (y + 0.5) * side) for y, x in np.argwhere(inked)]
        for kind, places in (("mousePressed", way[:1]), ("mouseMoved", way[1:]), ("mouseReleased", way[-1:])):
            for x, y in places:
                event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
                self._browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def counted(self) -> int:
        """The reports that the page sent and that were counted, by its journal."""
        return self.text("entries").count("A report on")

    def keep_picture(self, path: Path) -> None:
        """Write a picture of the whole page, a PNG."""
        self._browser.execute_script("scrollTo(0, 0)")
        shot = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self._browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]))
