"""Every device of this repository keeps the promises of the specification; a sample is brief enough for every run."""

import contextlib
import functools
import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from simulator.fleet import fork_servers
from tests.conformance import attested, plain, secure  # noqa: F401  # they make promises
from tests.conformance.__main__ import main
from tests.conformance.device import known, started
from tests.conformance.promises import OF_EACH, PROMISES, RUNTIMES, is_brief, stage
from tests.device_runtime.node import node, sessions
from tests.forked import DEVICE, forked
from tests.tree import ROOT

pytestmark = pytest.mark.promise("Devices in Python, Node and browsers keep the protocol with any coordinator")

LONG = pytest.mark.long
LOCALES = {
    "turkish": "-Duser.language=tr -Duser.country=TR",
    "arabic": "-Duser.language=ar -Duser.country=EG -Duser.extensions=u-nu-arab",
}


@pytest.fixture(scope="session")
def command_line(tmp_path_factory):
    """Gives the command line of a device by its name; a skip where it cannot run."""

    @functools.cache
    def found(runtime):
        if runtime in {"node", "browser"}:
            node()
        if runtime == "jvm" and not fork_servers.JVM_PROGRAM.exists():
            pytest.skip("there is no program of the device in Kotlin: `make android` builds it")
        if runtime == "browser" and shutil.which("chromedriver") is None:
            pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
        return known(runtime, tmp_path_factory.mktemp("page") / "built")

    return found


@pytest.fixture(scope="module")
def in_node():
    """As `started`, of the command lines of Node, in one process for all of them: each would load the same again."""
    with contextlib.ExitStack() as opened:

        @functools.cache
        def run():
            return opened.enter_context(sessions())

        yield lambda words: SimpleNamespace(stdout=json.dumps(run()(words[words.index("run") :])), stderr="")


@pytest.mark.parametrize(
    ("one", "runtime"),
    [
        pytest.param(one, runtime, id=f"{one.name}-{runtime}", marks=() if is_brief(one, runtime) else LONG)
        for one in PROMISES
        for runtime in RUNTIMES
    ],
)
def test_a_device_keeps_what_the_specification_promises(one, runtime, command_line, in_node, tmp_path):
    run = {"python": forked(DEVICE).run, "node": in_node}
    with stage(command_line(runtime), tmp_path, run.get(runtime, started)) as (coordinator, device):
        one.scenario(coordinator, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_device_in_kotlin_keeps_them_shrunk_and_renamed_as_in_an_app(command_line, monkeypatch, capsys):
    program = fork_servers.JVM_PROGRAM
    words = command_line("jvm").replace(
        f"-jar {program}", f"-cp {program.parent}/shrunk.jar dev.muster.device.jvm.Command"
    )
    subprocess.run([program.parents[1] / "shrink"], check=True)
    monkeypatch.setattr("sys.argv", ["conformance", "--device", words])
    assert main() == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", LOCALES.values(), ids=LOCALES)
def test_the_device_in_kotlin_keeps_them_in_any_language_and_time_zone(options, command_line, tmp_path):
    words = command_line("jvm").replace(" -jar ", f" {options} -Duser.timezone=Asia/Kathmandu -jar ")
    for one in PROMISES:
        if one.brief:
            (folder := tmp_path / one.name).mkdir()
            with stage(words, folder) as (coordinator, device):
                one.scenario(coordinator, device)


def test_every_promise_names_a_section_of_the_specification():
    wire = (ROOT / "docs" / "spec" / "wire.md").read_text()
    assert [one.name for one in PROMISES if f"\n## §{one.section} " not in wire] == []
    assert len({one.name for one in PROMISES}) == len(PROMISES)


def test_the_table_says_which_tests_put_a_promise_to_a_runtime(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["conformance", "--table"])
    assert main() == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [row[1] for row in rows] == [one.what for one in PROMISES]
    assert [row[-1] for row in rows].count("test |") == len(OF_EACH)
    assert {row[3] for row in rows} == {"test"}
