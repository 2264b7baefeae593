"""The environment of all tests, and their collection; their fixtures are in tests/fixtures.py."""

import gc
import logging
import os
import signal
from pathlib import Path

import pytest

from muster.local.server import memory_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests talk to this machine alone, whatever proxy the environment names.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,127.0.0.2,::1,localhost"
# A shell that runs the tests in the background ignores SIGINT, and every process that they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests start coordinators side by side: each takes a free port for its operators.
os.environ.setdefault("MUSTER_ADMIN_PORT", "0")
os.environ.setdefault("MUSTER_ACCEPT_UNATTESTED", "1")
# Node keeps what it made of TypeScript: to start with it takes a third of the CPU time.
os.environ.setdefault("NODE_COMPILE_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "node"))
if roomy := memory_folder():
    # Thousands of small databases sync their files all the time.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", roomy)


def pytest_configure(config):
    """Load the fixtures, and with them the libraries, in processes that run tests; one that leads others runs none."""
    if not config.getoption("numprocesses"):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_sessionstart(session):
    """Capture warnings and worse, as the setting `log_level` would.

    pytest applies that to the root logger too, many times in each test, and each time Python empties the caches of
    thousands of loggers: that took one to two hundredths of the time of all tests.
    """
    logging_plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (logging_plugin.caplog_handler, logging_plugin.report_handler):
        handler.setLevel(logging.WARNING)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spare the garbage collector half a million objects, of modules and tests, that stay to the end.

    Looking through them again and again, while more come, takes a quarter of the time of collecting tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
