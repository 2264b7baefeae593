"""A browser as a phone has it: a real Chromium with a phone's screen, for the demo and for tests of web pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver

from muster.doctor import BROWSERS

SCREEN = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
"""A small phone's, in CSS pixels."""
_AGENT = "Mozilla/5.0 (Linux; Android 16; Phone) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/{} Mobile Safari/537.36"
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class BrowserMissing(Exception):
    """There is no Chromium, or no driver of it."""


@contextmanager
def phone() -> Iterator[webdriver.Chrome]:
    """A browser with nothing kept from before, for as long as the block runs. Raises BrowserMissing."""
    program, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if program is None or driver is None:
        raise BrowserMissing("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        version = opened.capabilities["browserVersion"]
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
        opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        opened.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": _AGENT.format(version)})
        yield opened
    finally:
        opened.quit()
