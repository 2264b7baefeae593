"""Coordinators and authorities in a thread of this process, for as long as a block runs, and a proxy in their way."""

import threading
from contextlib import contextmanager
from functools import partial

from authority.service import AuthorityServer
from coordinator.server import DeviceServer, Service


@contextmanager
def serving(settings):
    """A coordinator; gives the URL for devices."""
    with serving_both(settings) as addresses:
        yield addresses.devices


def serving_both(settings):
    """A coordinator; gives both URLs."""
    return _running("coordinator", partial(DeviceServer, Service.open(settings)))


def authority_serving(config):
    """An authority; gives its URL."""
    return _running("authority", partial(AuthorityServer, config))


def proxied(monkeypatch):
    """An environment that names a proxy for everything, at which nobody answers."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@contextmanager
def _running(name, server_that_calls):
    """Gives what the server calls its argument with. Raises RuntimeError when the server ends before."""
    ready = threading.Event()
    found = []

    def on_ready(value):
        found.append(value)
        ready.set()

    server = server_that_calls(on_ready)
    thread = threading.Thread(target=server.run, name=name)
    thread.start()
    try:
        while not ready.wait(0.01):
            if not thread.is_alive():
                raise RuntimeError(f"the {name} did not start; its log says why")
        yield found[0]
    finally:
        server.should_exit = True
        thread.join()
