"""Fixtures of all tests: what processes share, where real data lies, if anywhere, and ExecuTorch's library."""

import fcntl
import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpcore2
import pytest
import torch
import typer.main
import typer.testing

from coordinator import server
from device_runtime.backends.executorch import FOLDER, build, default_folder, shim_name
from device_runtime.errors import ConfigError
from export import parity
from tests.coordinator.fork_server import coordinator_fork_server
from tests.coordinator.operators import made_when_asked
from tests.footprints import footprint_fork_server
from tests.forked import start_fleet
from tests.statements import write_statements_once

DATA = Path(os.environ.get("MUSTER_DATA", Path(__file__).parents[2] / "shared" / "data"))


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
    write_statements_once()


@pytest.fixture(autouse=True, scope="session")
def operators_when_asked():
    """Coordinators of this process make the port for operators with its first request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "admin_app", made_when_asked(server.admin_app))
        yield


@pytest.fixture(autouse=True, scope="session")
def fleets():
    """Fork servers of emulated devices are forked themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "simulator.fleet.fork_servers.subprocess",
            SimpleNamespace(
                Popen=start_fleet,
                PIPE=subprocess.PIPE,
                run=subprocess.run,
                CalledProcessError=subprocess.CalledProcessError,
            ),
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def measured_alone():
    """Exports of this process measure in forked processes; this is what measures in one that is started."""
    started = parity.measured_alone
    with footprint_fork_server() as forked, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "measured_alone", forked)
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
