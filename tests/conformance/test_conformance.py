"""Every device of this repository keeps the promises of the specification; a sample is brief enough for every run."""

import functools
import shutil

import pytest

from tests.conformance import plain, secure  # noqa: F401  # they make promises
from tests.conformance.device import known, started
from tests.conformance.promises import PROMISES, stage
from tests.device_runtime.node import node
from tests.forked import DEVICE, forked
from tests.tree import ROOT

LONG = pytest.mark.long
IN_A_BROWSER = ("sends_a_kept_report", "sums_securely", "refuses_a_loop")


def is_brief(one, runtime):
    """Whether a promise is put to a device in every run of the tests: in a browser each takes seconds of CPU time."""
    return one.brief and (runtime != "browser" or one.name in IN_A_BROWSER)


@pytest.fixture(scope="session")
def command_line(tmp_path_factory):
    """Gives the command line of a device by its name; a skip where it cannot run."""

    @functools.cache
    def found(runtime):
        if runtime != "python":
            node()
        if runtime == "browser" and shutil.which("chromedriver") is None:
            pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
        return known(runtime, tmp_path_factory.mktemp("page") / "built")

    return found


@pytest.mark.parametrize(
    ("one", "runtime"),
    [
        pytest.param(one, runtime, id=f"{one.name}-{runtime}", marks=() if is_brief(one, runtime) else LONG)
        for one in PROMISES
        for runtime in ("python", "node", "browser")
    ],
)
def test_a_device_keeps_what_the_specification_promises(one, runtime, command_line, tmp_path):
    run = forked(DEVICE).run if runtime == "python" else started
    with stage(command_line(runtime), tmp_path, run) as (coordinator, device):
        one.scenario(coordinator, device)


def test_every_promise_names_a_section_of_the_specification():
    wire = (ROOT / "docs" / "spec" / "wire.md").read_text()
    assert [one.name for one in PROMISES if f"\n## §{one.section} " not in wire] == []
    assert len({one.name for one in PROMISES}) == len(PROMISES)
