"""The engine against its peers: their environments and processes, and one of them on a small workload."""

import os
import select
import sys
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.engine import BARE, PEERS, RUNNERS, compare, measure_cores, measure_scaling, run
from benchmarks.engine_workloads import WORKLOADS, Workload, grown, logreg, steps_of
from benchmarks.runner import EngineOptions
from benchmarks.usage import PeerError, python_with, started
from simulator.errors import EngineError

SMALL = Workload(logreg, 3, (15, 45), clients=50)
# A round burns 0.3 CPU seconds in a process that outlives its parent and is in a session of its own.
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(600)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {BURN!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid)
"""
RUNNER = f"""
import subprocess, sys
sys.path.insert(0, {str(RUNNERS)!r})
from turns import Turns
pid = 0
turns = Turns("1.2", lambda: float(pid))
for number in turns:
    print("what a library says is no answer")
    pid = int(subprocess.run([sys.executable, "-c", {PARENT!r}], stdout=subprocess.PIPE).stdout)
    turns.steps = number + 7
"""


def silent(note, done=0):
    pass


@pytest.fixture
def begin(tmp_path):
    """Starts a runner whose code is given."""

    def begin(code):
        runner = tmp_path / "runner.py"
        runner.write_text(code)
        return started("a peer", Path(sys.executable), runner, tmp_path)

    return begin


def test_cpu_time_of_a_peer_has_its_orphans_and_they_end_with_it(begin):
    with begin(RUNNER) as peer:
        assert peer.version == "1.2"
        for steps in (7, 8):
            seconds, taken = peer.round()
            assert taken == steps
            assert seconds > 0.3
        orphan = os.pidfd_open(int(peer.loss()))
        assert not select.select([orphan], [], [], 0)[0]
    assert select.select([orphan], [], [], 60)[0]
    os.close(orphan)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no such library')", "no such library"),
        ("print('hello')", "hello"),
        ("pass", "it said nothing"),
    ],
)
def test_peer_that_does_not_answer_is_quoted(begin, code, words):
    with pytest.raises(PeerError, match=f"a peer failed.*{words}"), begin(code):
        pass


def test_environment_is_made_once_after_a_failed_installation_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    requirements, said = tmp_path / "peer.txt", []
    requirements.write_text("--no-index\nno-such-simulator==1.0\n")
    with pytest.raises(PeerError, match=r"cannot install .*peer\.txt(.|\n)*no-such-simulator(.|\n)*must have pip"):
        python_with(requirements, silent)
    requirements.write_text("--no-index\n")
    first, second = python_with(requirements, said.append), python_with(requirements, said.append)
    assert first == second
    assert first.is_relative_to(tmp_path / "muster" / "peers")
    assert len(said) == 1


def test_every_peer_has_a_runner_and_pinned_requirements():
    for runner, requirements in PEERS.values():
        assert (RUNNERS / runner).is_file()
        lines = (RUNNERS / requirements).read_text().splitlines() if requirements else []
        assert all("==" in line for line in lines if not line.startswith("#"))
        # PyPI's own build of torch brings gigabytes.
        assert all(line.endswith("+cpu") for line in lines if line.startswith("torch=="))


@pytest.fixture
def torch_alone(monkeypatch):
    """Leaves graphs out, whose export takes its time."""
    monkeypatch.setattr(engine, "ENGINES", ("torch",))


@pytest.mark.long
@pytest.mark.usefixtures("torch_alone")
def test_everyone_trains_the_same_clients_to_about_the_same_loss():
    found = compare(1, silent, {"small": SMALL}, {"plain torch loop": PEERS["plain torch loop"]})
    by = {turn["by"]: turn for turn in found["turns"]}
    assert list(by) == ["muster, torch", BARE, "plain torch loop"]
    ours, plain = by["muster, torch"], by["plain torch loop"]
    assert plain["loss"] == pytest.approx(ours["loss"], abs=0.05)
    assert plain["loss"] < 4
    assert ours["muster_is_faster"] == 1
    assert found["best_peer_to_muster"]["small"] == plain["cpu_s_per_round"] / ours["cpu_s_per_round"]
    assert found["to_bare"]["small"] == pytest.approx(ours["to_bare"])


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("steps", "words"), [(1, "local steps"), (None, "did not do the same work")])
def test_peer_that_does_other_work_is_refused(tmp_path, steps, words):
    lazy = tmp_path / "lazy.py"
    right = "sum(-(-len(workload.clients[index][1]) // 20) for index in workload.cohorts[number])"
    lazy.write_text(
        f"import sys\nsys.path.insert(0, {str(RUNNERS)!r})\nfrom turns import Turns, Workload\n"
        "workload = Workload.read(sys.argv[1])\nturns = Turns('1', lambda: 4.2)\n"
        f"for number in turns: turns.steps = {steps or right}\n"
    )
    with pytest.raises(PeerError, match=f"lazy.*{words}"):
        compare(1, silent, {"small": SMALL}, {"lazy": (str(lazy), None)})


def test_cohorts_grow_to_5000_of_as_many_clients_on_a_gpu():
    workloads = grown()
    assert {one.cohort for one in (WORKLOADS | workloads).values()} == {50, 500, 5000}
    assert not set(WORKLOADS.values()) & set(workloads.values())
    assert all(one.clients >= one.cohort for one in workloads.values())
    with pytest.raises(EngineError, match="cannot compute on 'cuda:99'"):
        run(EngineOptions(device="cuda:99"), silent)


def test_rounds_on_all_cores_are_timed_beside_those_of_a_gpu():
    assert measure_cores(SMALL, 1) > 0


def test_steps_are_those_of_batches_of_20():
    users = SMALL.population()
    assert steps_of(users, [0, 1]) == sum(-(-int(users.sizes[client]) // 20) for client in (0, 1))


def test_peers_are_not_compared_on_a_gpu():
    with pytest.raises(EngineError, match="take --device cpu, not cuda"):
        run(EngineOptions(peers=True, device="cuda"), silent)


def test_two_processes_of_the_engine_are_timed_and_weighed():
    found = measure_scaling("torch", 1, SMALL)
    assert found["two_processes_faster_by"] == found["one_process_s"] / found["two_processes_s"] > 0
    assert found["peak_mb_besides_examples"] > 50
