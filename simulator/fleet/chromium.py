"""A real, headless Chromium and its driver, which run devices in browsers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simulator.errors import BrowserMissing

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
