"""Devices in browsers: one headless Chromium, in which each device is a page.

It reads and writes the lines of a fork server. A device is the worker of the page that its coordinator serves. Each has
its own browser context, as if in a separate browser, with its own keys, examples and caches.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from device_runtime.config import secret_in
from fedcore.validation import decoder
from ingress.limits import is_this_machine
from simulator.errors import BrowserMissing, FleetError
from simulator.fleet.fork_server import Start

if TYPE_CHECKING:
    from selenium import webdriver


PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage")
_OF_ROOT = ("--no-sandbox",)
"""Chromium starts no sandbox as root."""


def program() -> str | None:
    """The path of the first installed Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def programs() -> tuple[str, str]:
    """The paths of Chromium and of its driver. Raises BrowserMissing, and ModuleNotFoundError without selenium."""
    import selenium  # noqa: F401  # the extra `browser`

    browser, driver = program(), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise BrowserMissing("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def chromium(*arguments: str, capabilities: Mapping[str, object]) -> Iterator[webdriver.Chrome]:
    """A browser for as long as the block runs, with a fresh profile unless arguments name one.

    capabilities: of WebDriver, by name. Raises BrowserMissing.
    """
    browser, driver = programs()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (*_ARGUMENTS, *(_OF_ROOT if os.geteuid() == 0 else ()), *arguments):
        options.add_argument(argument)
    for name, value in capabilities.items():
        options.set_capability(name, value)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()


MOST = 32
"""The most devices in one Chromium: each has its own processes, which use 250 MB while it trains."""
CAPABILITIES = {"webSocketUrl": True}
"""WebDriver BiDi, which can wait for many pages at a time."""
_SCRIPT = Path(__file__).with_name("browser_session.js")
_STILL = "icon.svg"
"""A file of the page without a script."""
_PATIENCE_S = 10.0
_BEGIN = "(given) => {{ globalThis.ended = ({session})(JSON.parse(given)).then(JSON.stringify); }}"
# The driver waits for no answer longer than 30 seconds.
_AWAIT = "() => Promise.race([globalThis.ended, new Promise((wake) => setTimeout(wake, 20_000, null))])"

_START = decoder(Start)


def command() -> list[str]:
    """The command line of the process. Raises BrowserMissing, and ModuleNotFoundError without selenium."""
    programs()
    return [sys.executable, "-m", "simulator.fleet.browsers"]


def check_page(coordinator: str) -> None:
    """Raise FleetError, saying what to do, unless browsers can take part at a page of this coordinator's."""
    parts = urlsplit(coordinator)
    here = is_this_machine(parts.hostname or "")
    if parts.scheme != "https" and not here:
        raise FleetError(f"browsers keep keys only for https and for this machine, not for {coordinator}")
    try:
        opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * here)
        with opener.open(_page(coordinator), timeout=_PATIENCE_S):
            return
    except urllib.error.HTTPError as error:
        raise FleetError(
            f"{coordinator} serves no page for devices in browsers ({error.code}): `make page` builds it, and the "
            "coordinator's setting `page` names its folder (docs/operations.md)"
        ) from error
    except OSError as error:
        raise FleetError(f"no coordinator answers at {coordinator}: {error}") from error


def run_session(browser: webdriver.Chrome, window: str, arguments: dict[str, Any]) -> bytes:
    """The outcome of one session in a window with a still file of the page, as JSON. Needs CAPABILITIES.

    arguments: coordinator, population, policy, labels, examples (`fields`) and the enrolment secret (`base64_of`).
    Raises WebDriverException when the page is gone.
    """
    script = browser.script
    script.execute(_BEGIN.format(session=_SCRIPT.read_text()), json.dumps(arguments), context_id=window)
    while (answer := script.execute(_AWAIT, context_id=window))["type"] == "null":
        pass
    return str(answer["value"]).encode()


def fields(path: Path) -> dict[str, dict[str, Any]]:
    """The arrays of an .npz file in the form of JSON."""
    with np.load(path) as arrays:
        return {
            name: {
                "dtype": array.dtype.name,
                "shape": array.shape,
                "data": base64.b64encode(array.tobytes()).decode(),
            }
            for name, array in arrays.items()
        }


def base64_of(secret: bytes | None) -> str | None:
    """An enrolment secret in the form of JSON."""
    return None if secret is None else base64.b64encode(secret).decode()


def _page(coordinator: str) -> str:
    return f"{coordinator.rstrip('/')}/page/{_STILL}"


class BrowserHost:
    """Runs sessions of devices at the same time, in windows of one browser, and relays their outcomes."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self._browser = browser
        self._windows: dict[str, str] = {}
        self._telling = threading.Lock()

    def run(self) -> None:
        """Start sessions until the end of standard input."""
        for line in sys.stdin.buffer:
            threading.Thread(target=self._session, args=(_START.decode(line),), daemon=True).start()

    def _session(self, start: Start) -> None:
        from selenium.common.exceptions import WebDriverException

        arguments = {
            "coordinator": start.coordinator,
            "population": start.population,
            "policy": msgspec.to_builtins(start.policy) or {},
            "examples": fields(Path(start.examples)),
            "labels": start.device.labels,
            "secret": base64_of(secret_in(start.enrolment_secret)),
        }
        try:
            outcome = msgspec.Raw(run_session(self._browser, self._window(start), arguments))
        except WebDriverException as error:
            detail = (error.msg or "").partition("\n")[0]
            outcome = msgspec.Raw(msgspec.json.encode({"reason": "page", "detail": detail, "retryable": "transient"}))
        self._tell({"client": start.client, "outcome": outcome, "exit_code": 0})

    def _window(self, start: Start) -> str:
        """The window of a device. Its state lasts as long as the browser runs."""
        if start.state not in self._windows:
            apart = self._browser.browser.create_user_context()
            window = self._browser.browsing_context.create(type="window", user_context=apart)
            self._browser.browsing_context.navigate(window, _page(start.coordinator), wait="complete")
            self._windows[start.state] = window
        return self._windows[start.state]

    def _tell(self, ended: dict[str, Any]) -> None:
        with self._telling:
            sys.stdout.buffer.write(msgspec.json.encode(ended) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole group, and so the browser; the fleet decides when to stop.
    os.setpgid(0, 0)
    os.environ["no_proxy"] = "localhost"  # where the driver of the browser is
    with chromium(capabilities=CAPABILITIES) as opened:
        BrowserHost(opened).run()
