"""Masks come off in processes of their own: the same bits, also when a process dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from coordinator.secure.unmask_workers import Unmasker
from secagg.errors import UnmaskCheckFailed
from secagg.packing import PackedSegment
from tests.secagg.cohort import Cohort, integers, invitation


def make_work(seed=0):
    """What is left to do of a session of nine, of whom one left after it shared."""
    vectors = {slot: vector / 256 for slot, vector in integers(range(10, 19), 10_001, seed).items()}
    cohort = Cohort(9, invitation(segments=(PackedSegment(10_001, 21, 8, -0.3, 0.7),), min_sum=8), vectors=vectors)
    cohort.reveal(cohort.confirm(cohort.upload(cohort.share(cohort.advertise()), without=(11,))))
    return cohort.server.advance().unmasking


@pytest.fixture
def unmasker():
    others, made = multiprocessing.active_children(), Unmasker()
    yield made
    made.close()
    assert set(multiprocessing.active_children()) <= set(others)


def test_processes_give_the_same_bits_and_survive_a_death(unmasker):
    others, work = multiprocessing.active_children(), make_work()
    expected = work.run()
    for _ in range(2):
        found = unmasker(work).result(timeout=30)
        assert (found.digest, found.total.weight) == (expected.digest, expected.total.weight)
        np.testing.assert_array_equal(found.total.sums, expected.total.sums)
        for worker in set(multiprocessing.active_children()) - set(others):
            os.kill(worker.pid, signal.SIGKILL)


def test_a_refusal_of_another_process_is_the_refusal_that_it_was(unmasker):
    work = make_work()
    work.words[3] += 1
    with pytest.raises(UnmaskCheckFailed):
        unmasker(work).result(timeout=30)


PARENT = textwrap.dedent("""
    import multiprocessing, time
    from coordinator.secure.unmask_workers import Unmasker
    from tests.coordinator.test_unmasking import make_work

    if __name__ == "__main__":
        unmasker = Unmasker()
        unmasker(make_work()).result()
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        time.sleep(60)
""")


def test_processes_end_when_their_coordinator_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        parent.kill()
    until = time.monotonic() + 10
    while any(_lives(worker) for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.01)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False
