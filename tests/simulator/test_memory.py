"""The allocator of a process that trains."""

import subprocess
import sys
from pathlib import Path

import pytest

# Says where the middle of a tensor of 32 MB is, which begins in the page before the first huge one.
ALLOCATES = """
import torch
from simulator.engines.memory import keep_freed_memory
keep_freed_memory()
tensor = torch.empty(2**23)
print(tensor.data_ptr() + 2**24)
print(open("/proc/self/smaps").read())
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages here")
def test_tensors_of_a_process_that_trains_lie_in_huge_pages():
    ran = subprocess.run([sys.executable, "-c", ALLOCATES], check=True, capture_output=True, text=True)
    place, *lines = ran.stdout.splitlines()
    within = False
    for name, *rest in (line.split() for line in lines if line):
        if not name.endswith(":"):
            first, end = (int(one, 16) for one in name.split("-"))
            within = first <= int(place) < end
        elif within and name == "VmFlags:":
            assert "hg" in rest
            return
    pytest.fail("the tensor is nowhere")
