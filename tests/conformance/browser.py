"""A device in a browser as a program: one session in a real Chromium, whose profile is the device's state.

The worker is that of the page, and served here. The coordinators of the suite know nothing of origins, so the browser
is told not to ask them; tests/device_runtime/test_browser.py is about those.
"""

import argparse
import functools
import json
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from device_runtime.config import secret_in
from fedcore.labels import labels_of
from simulator.fleet.browsers import CAPABILITIES, base64_of, chromium, fields, run_session


def main():
    parser = argparse.ArgumentParser()
    for name in ("page", "coordinator", "population", "examples", "state", "policy", "enrolment-secret-file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--label", action="append")
    given = parser.parse_args()
    state = Path(given.state)
    state.mkdir(parents=True, exist_ok=True)
    session = {
        "coordinator": given.coordinator,
        "population": given.population,
        "policy": json.loads(Path(given.policy).read_text()),
        "examples": fields(Path(given.examples)),
        "labels": labels_of(given.label or []),
        "secret": base64_of(secret_in(given.enrolment_secret_file)),
    }
    profile = state / "profile"
    for lock in profile.glob("Singleton*"):
        lock.unlink()
    arguments = (f"--user-data-dir={profile}", "--disable-web-security")
    with served(Path(given.page), state) as origin, chromium(*arguments, capabilities=CAPABILITIES) as browser:
        browser.get(f"{origin}/icon.svg")  # any file that does nothing
        print(run_session(browser, browser.current_window_handle, session).decode())


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
