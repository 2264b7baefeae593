"""Shared by all tests: one thread per process, and where real data lies, if anywhere."""

import fcntl
import functools
import gc
import os
import platform
import shutil
import signal
from pathlib import Path

import httpcore2
import pytest
import torch
import typer.main
import typer.testing

from coordinator import server
from device_runtime.errors import ConfigError
from device_runtime.native.build import build
from device_runtime.native.library import FOLDER, default_folder, shim_name
from export import footprints
from muster.local.memory_folder import memory_folder
from tests.coordinator.fork_server import coordinator_fork_server
from tests.coordinator.operators import made_when_asked
from tests.footprints import footprint_fork_server
from tests.statements import statements_written_once

os.environ.setdefault("OMP_NUM_THREADS", "1")
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
DATA = Path(os.environ.get("MUSTER_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_modifyitems(items):
    if "MUSTER_LONG" not in os.environ:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set MUSTER_LONG=1"))


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


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def commands_made_once():
    """The command line is made of its functions once in this process, not at each call: that takes 50 ms."""
    made_once = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made_once)
        patch.setattr(typer.testing, "_get_command", made_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def certificates_read_once():
    """HTTP clients of this process share the system's certificates: each would read them again, which takes 25 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def statements():
    """Databases of this process share the SQL that is written for them."""
    with pytest.MonkeyPatch.context() as patch:
        statements_written_once(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def operators_when_asked():
    """Coordinators of this process make the port for operators with its first request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "admin_app", made_when_asked(server.admin_app))
        yield


@pytest.fixture(autouse=True, scope="session")
def measured_alone():
    """Exports of this process measure in forked processes; this is what measures in one that is started."""
    started = footprints.measured_alone
    with footprint_fork_server() as forked, pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprints, "measured_alone", forked)
        yield started


@pytest.fixture(scope="session")
def coordinators():
    """What coordinator processes are forked from."""
    with coordinator_fork_server() as opened:
        yield opened


@pytest.fixture
def data():
    """The folder of real data sets; tests that need it skip without it."""
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}; set MUSTER_DATA to the folder that holds wisdm/, mnist_10k/")
    return DATA


def built(arch, folder):
    """ExecuTorch's library for `arch`, built in `folder`; a skip where this machine cannot build it."""
    compiler = "g++" if arch == platform.machine() else f"{arch}-linux-gnu-g++"
    if not shutil.which(compiler):
        pytest.skip(f"no compiler {compiler}")
    try:
        return build(arch, folder)
    except ConfigError as error:
        if str(error).startswith("pip failed"):
            pytest.skip(f"no executorch from PyPI: {error}")
        raise


def of_all_workers(tmp_path_factory):
    """This run's temporary folder, which the workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def executorch(tmp_path_factory):
    """ExecuTorch's library, for this process and those it starts: the user's own if current, else a fresh one."""
    arch = platform.machine()
    folder = default_folder(arch)
    with pytest.MonkeyPatch.context() as patch:
        if not (folder / shim_name(arch)).is_file():
            folder = of_all_workers(tmp_path_factory) / "executorch"
            with folder.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait for it
                if not (folder / shim_name(arch)).is_file():
                    built(arch, folder)
        patch.setenv(FOLDER, str(folder))
        yield folder
