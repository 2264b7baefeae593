"""A device in a browser as a program: one session in a real Chromium, whose profile is the device's state.

The worker is that of the page, and served here. The coordinators of the suite know nothing of origins, so the browser
is told not to ask them; tests/device_runtime/test_browser.py is about those.
"""

import argparse
import functools
import json
import shutil
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from selenium import webdriver

from muster.doctor import BROWSERS

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-web-security",
)  # fmt: skip
SESSION = Path(__file__).with_name("session.js")


def main():
    parser = argparse.ArgumentParser()
    for name in ("page", "coordinator", "population", "examples", "state", "policy"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    state = Path(given.state)
    state.mkdir(parents=True, exist_ok=True)
    policy = json.loads(Path(given.policy).read_text())
    with served(Path(given.page), state) as origin, chromium(state) as browser:
        browser.set_script_timeout(110)
        browser.get(f"{origin}/icon.svg")  # any file that does nothing
        words = (f"{given.coordinator}/", given.population, policy, rows(np.load(given.examples)))
        print(json.dumps(browser.execute_async_script(SESSION.read_text(), *words)))


def rows(arrays):
    """Every example as its fields. Values are texts: JSON has no NaN."""
    count = min(len(array) for array in arrays.values())
    return [
        {
            name: {
                "dtype": str(array.dtype),
                "shape": array.shape[1:],
                "values": [str(one) for one in np.ravel(array[row]).tolist()],
            }
            for name, array in arrays.items()
        }
        for row in range(count)
    ]


@contextmanager
def chromium(state):
    """A Chromium with a profile in the device's state."""
    profile = state / "profile"
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)), "chromium")
    for argument in (f"--user-data-dir={profile}", *ARGUMENTS):
        options.add_argument(argument)
    for lock in profile.glob("Singleton*"):
        lock.unlink()
    service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


@contextmanager
def served(page, state):
    """The page's files at an origin that a device keeps, as its state belongs to it."""
    kept = state / "port"
    handler = functools.partial(Files, directory=str(page))
    with ThreadingHTTPServer(("127.0.0.1", int(kept.read_text()) if kept.exists() else 0), handler) as server:
        kept.write_text(str(server.server_port))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Files(SimpleHTTPRequestHandler):
    """The files of the page, without a word about each."""

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    main()
