"""Shared by all tests: one thread per process, and where real data lies, if anywhere."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
DATA = Path(os.environ.get("MUSTER_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def data():
    """The folder of real data sets; tests that need it skip without it."""
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}; set MUSTER_DATA to the folder that holds wisdm/, mnist_10k/")
    return DATA
