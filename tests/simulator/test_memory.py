"""The allocator of our own processes that train is told to keep memory, in huge pages; a host's is left alone."""

import sys
from pathlib import Path

import pytest

from tests.forked import forked

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages here"
)
# The flags of the memory that the middle of a tensor of 32 MB is in; it begins in the page before the first huge one.
FLAGS = """
import sys, torch
from fedcore.validation import decoder

def flags():
    tensor, within = torch.empty(2**23), False
    place = tensor.data_ptr() + 2**24
    for name, *rest in (line.split() for line in open("/proc/self/smaps") if line.strip()):
        if not name.endswith(":"):
            first, end = (int(one, 16) for one in name.split("-"))
            within = first <= place < end
        elif within and name == "VmFlags:":
            return rest
"""
TRAIN = """
from simulator.configuration import SimulationConfig
from simulator.simulation import simulate
for processes in (1, 2):
    simulate(SimulationConfig(model="logreg", rounds=1, cohort=3, processes=processes))
"""
COMMAND = """
from muster.cli import main
sys.argv = "muster simulate --model logreg --rounds 1 --cohort 3 --processes 1".split()
try:
    main()
except SystemExit as ended:
    assert not ended.code
"""
LOADED = "simulator.simulation simulator.engines.processes muster.commands.simulate"
"""What these programs load: none of it tells the allocator anything."""
FORK_AND_WORK = """
from simulator.engines import processes
from simulator.engines.processes import compute_apart
from simulator.engines.sums import SumsLayout
from simulator.errors import EngineError

def trainer():
    raise EngineError(" ".join(flags()))

try:
    makes = [trainer] * 2
    processes.Processes(makes, [SumsLayout({}, {}, False)], [{}]).train(1, {}, [[]])
except EngineError as error:
    print(error)
print(*compute_apart(flags, decoder(list[str])))
"""


def flags_printed(program):
    """The flags in each line that a program prints."""
    ran = forked(LOADED).run([sys.executable, "-c", FLAGS + program])
    assert ran.returncode == 0, ran.stderr
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.long
def test_tensors_of_a_command_that_trains_lie_in_huge_pages():
    assert "hg" in flags_printed(COMMAND + "print(*flags())")[-1]


def test_tensors_of_a_worker_and_of_a_fork_lie_in_huge_pages():
    assert [("hg" in flags) for flags in flags_printed(FORK_AND_WORK)] == [True, True]


def test_a_host_that_simulates_has_its_allocator_as_it_was():
    assert "hg" not in flags_printed(TRAIN + "print(*flags())")[-1]
