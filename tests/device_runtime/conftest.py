import functools

import numpy as np
import pytest

from device_runtime.backends import open_backend
from device_runtime.config import DeviceConfig
from device_runtime.protocol import call
from device_runtime.trainer import InProcess
from simulator import datasets
from tests.device_runtime import linear
from tests.device_runtime.coordinator import serving
from tests.device_runtime.opened import ELSEWHERE
from tests.device_runtime.process import World, muster
from tests.device_runtime.proxy import road_to

ENDLESS = 300_000
"""Epochs of the long plan: tens of seconds of work, which no test waits for."""


@pytest.fixture
def coordinator():
    with serving() as running:
        yield running


@pytest.fixture
def examples():
    return linear.examples(10)


@pytest.fixture
def config(coordinator, examples, tmp_path, monkeypatch):
    """A device with ten examples that does not dawdle between attempts."""
    monkeypatch.setattr(call, "FIRST_DELAY_S", 0.001)
    np.savez(tmp_path / "examples.npz", **examples)
    return DeviceConfig(
        coordinator=coordinator.url,
        population="phones",
        examples=tmp_path / "examples.npz",
        state=tmp_path / "state",
        wait_s=5.0,
        trainer=lambda name: InProcess(open_backend(name)),  # in a sandbox each session takes a quarter of a second
    )


@pytest.fixture(scope="session")
def plans(tmp_path_factory):
    """A short plan, and one that trains for as long as a test needs."""
    folder = tmp_path_factory.mktemp("plans")
    for name, epochs in (("short", 1), ("long", ENDLESS)):
        muster("export", "logreg", "--algorithm", "fedavg", "--set", f"epochs={epochs}", "--out", folder / name)
    return folder


@pytest.fixture
def silence_s():
    """How long a device may be silent before it is lost; None is the coordinator's own choice."""


@pytest.fixture
def world(tmp_path, coordinators, plans, silence_s):
    np.savez(tmp_path / "mine.npz", **datasets.load("digits").shard(0))
    with coordinators.local(tmp_path, silence_s=silence_s) as local, road_to(local.url) as road:
        yield World(tmp_path, plans, road, ["--db", local.database, "--blobs", local.blobs])


@pytest.fixture(params=ELSEWHERE, ids=lambda runtime: runtime.runtime)
def elsewhere(request, coordinator, tmp_path):
    """Opens the device's model in another language than Python."""
    return functools.partial(request.param, tmp_path, coordinator.url)
