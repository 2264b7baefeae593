"""A real browser for tests and screenshots, and what must hold of every page that it shows."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.support.ui import WebDriverWait

AXE = Path(__file__).parents[2] / "device_runtime" / "js" / "node_modules" / "axe-core" / "axe.min.js"


@contextmanager
def chromium():
    """A real browser without a window. Skips where none is installed."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield found
    finally:
        found.quit()


def look_as(browser, width, scheme="light", height=740):
    """Give the browser a screen of so many points, of a phone if they are few, and light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def shows(browser, *words):
    """Wait until the page shows the words, all at once."""

    def all_there(_):
        # Asked of the document of this moment: an element that was found may be of the page that is being left.
        text = " ".join((browser.execute_script("return document.body && document.body.innerText") or "").split())
        return all(word in text for word in words)

    try:
        WebDriverWait(browser, 60, poll_frequency=0.2).until(all_there)
    except TimeoutException:
        shown = browser.execute_script("return document.body && document.body.innerText")
        raise AssertionError(f"the page never showed {words}: {shown}") from None


def assert_sound(browser, origin, width=360):
    """Nothing was asked of another site, nothing was refused or failed, and nothing is wider than the screen."""
    asked = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    elsewhere, logged = [url for url in asked if not url.startswith(origin)], browser.get_log("browser")
    within, across = browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert (elsewhere, logged, within) == ([], [], width), (browser.current_url, elsewhere, logged, within)
    assert across <= width, (browser.current_url, across)  # less by a scroll bar, where those take room


def broken_words(browser):
    """Words of letters alone that the page shows on two lines, a part on each."""
    return browser.execute_script("""
      const broken = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
      for (let node; (node = walker.nextNode()); )
        for (const word of node.data.matchAll(/(?<!\\S)\\p{L}{1,20}(?=[.,:;]?(\\s|$))/gu)) {
          const range = document.createRange();
          range.setStart(node, word.index), range.setEnd(node, word.index + word[0].length);
          const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
          if (lines.size > 1) broken.push(word[0]);
        }
      return broken;""")


def violations(browser):
    """What axe-core finds wrong with the page: each rule with the elements that break it."""
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
    found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")["violations"]
    return {one["id"]: [node["html"][:200] for node in one["nodes"]] for one in found}
