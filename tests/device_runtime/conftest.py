import numpy as np
import pytest

from device_runtime import transport
from device_runtime.session import DeviceConfig
from tests.device_runtime import linear
from tests.device_runtime.coordinator import serving


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
    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.001)
    np.savez(tmp_path / "examples.npz", **examples)
    return DeviceConfig(
        coordinator=coordinator.url,
        population="phones",
        examples=tmp_path / "examples.npz",
        state=tmp_path / "state",
        wait_s=5.0,
    )
