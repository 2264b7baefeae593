"""Every device of this repository keeps the promises of the specification; a sample is brief enough for every run."""

import functools
import shutil

import pytest

from tests.conformance import plain, secure  # noqa: F401  # they make promises
from tests.conformance.device import known
from tests.conformance.promises import PROMISES, stage
from tests.device_runtime.node import node
from tests.tree import ROOT

LONG = pytest.mark.long


@functools.cache
def command_line(runtime):
    """The command line of a device by its name; a skip where it cannot run."""
    if runtime != "python":
        node()
    if runtime == "browser" and shutil.which("chromedriver") is None:
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    return known(runtime)


@pytest.mark.parametrize("runtime", ["python", "node", pytest.param("browser", marks=LONG)])
@pytest.mark.parametrize(
    "one", [one if one.brief else pytest.param(one, marks=LONG) for one in PROMISES], ids=lambda one: one.name
)
def test_a_device_keeps_what_the_specification_promises(one, runtime, tmp_path):
    with stage(command_line(runtime), tmp_path) as (coordinator, device):
        one.scenario(coordinator, device)


def test_every_promise_names_a_section_of_the_specification():
    wire = (ROOT / "docs" / "spec" / "wire.md").read_text()
    assert [one.name for one in PROMISES if f"\n## §{one.section} " not in wire] == []
    assert len({one.name for one in PROMISES}) == len(PROMISES)
