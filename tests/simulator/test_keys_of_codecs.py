"""The attack on a secure sum by another codec key for one device, on real images: real HTTP, real devices."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from coordinator.driver.writing import make_assignments
from coordinator.driver.writing.make_assignments import for_device
from coordinator.secure.round import SecureRound
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import StreamKey
from fedcore.codecs import RoundKey
from fedcore.compression import Compression
from muster.local.server import FOR_ONE_MACHINE, LocalCoordinator
from tests.coordinator.fork_server import authority
from tests.servers import serving_both
from tests.simulator.test_secure_rounds import DEVICES, World

ALGORITHM = create("fedavg", {"batch_size": 8, "weighting": "uniform"})
SLOT, TASKS_SEED, SEEDS = 4, 0, range(1, 100)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    model, quarter = Model(load("logreg", (1, 8, 8), 10), 3), Compression.parse("subsample=0.25")
    return export_bundle(model, ALGORITHM, tmp_path_factory.mktemp("plan") / "plan", compression=quarter)


@contextmanager
def served_here(folder):
    """A coordinator in a thread of this process, which a test can have lie."""
    database, blobs = f"sqlite:///{folder / 'muster.db'}", folder / "blobs"
    with authority(folder) as parties, open_coordinator_store(database, blobs) as store:
        settings = Settings(database=database, blobs=blobs, port=0, **FOR_ONE_MACHINE, **parties)
        with serving_both(settings) as (devices, operators):
            yield LocalCoordinator(devices, operators, 0, database, blobs, store)


def sent(plan, seed, values_D):
    """What travels of a vector in round 1, under the key of a seed."""
    return plan.report.encode({"delta": values_D}, RoundKey(seed, 1))["delta"]


@pytest.mark.long
def test_a_device_with_another_codec_key_than_the_rest_is_read_in_no_sum(tmp_path, bundle, monkeypatch, capsys):
    """Pixels that are black in all images move no weight: where the rest send those weights, one device is alone."""
    sums, total = [], SecureRound.total
    monkeypatch.setattr(SecureRound, "total", lambda self, layout: sums.append(total(self, layout)) or sums[-1])
    with served_here(tmp_path) as local:
        here, plan = World(tmp_path, local, bundle, rounds=1, phase_s=4.0), bundle.plan
        shards = [dict(np.load(home / "examples.npz")) for home in here.folders]
        moving = np.ptp(np.concatenate([one["x"].reshape(-1, 64) for one in shards]), axis=0) > 0
        moves_D = np.concatenate([np.tile(moving, 10), np.ones(10)]).astype(np.float32)

        def alone(seed):
            """Where in the sum a device under this seed would be alone."""
            return np.flatnonzero((sent(plan, TASKS_SEED, moves_D) == 0) & (sent(plan, seed, moves_D) > 0))

        false = max(SEEDS, key=lambda seed: alone(seed).size)

        def lying(given, one):
            return msgspec.structs.replace(for_device(given, one), seed=false if one.slot == SLOT else given.seed)

        monkeypatch.setattr(make_assignments, "for_device", lying)
        for process in [here.start(index) for index in range(DEVICES)]:
            process.join()
            assert process.exitcode == 0
        here.ended(1)
        outcomes = [here.outcome(index) for index in range(DEVICES)]
        [victim] = [index for index, one in enumerate(outcomes) if one.slot == SLOT]
        blobs = {name: local.store.blobs.get(ref.sha256) for name, ref in plan.graphs["onnx"].items()}
        before = {"params": local.store.checkpoint(here.task, 0)["params"]}
    graphs = {name: OnnxRuntime().load(blob, name) for name, blob in blobs.items()}
    own = execute(plan, graphs, before, shards[victim], StreamKey(false, 1, SLOT)).values[alone(false)]
    error = np.abs(sums[0][alone(false)] / own - 1)
    with capsys.disabled():
        print(f"\nalone at {own.size} values of {sent(plan, 0, moves_D).size}; read to {np.sort(error).round(4)}")
    assert own.size >= 6
    assert error.min() > 0.9
    assert {one.outcome for index, one in enumerate(outcomes) if index != victim} == {"reported"}
    assert (outcomes[victim].outcome, outcomes[victim].reason, outcomes[victim].steps) == (
        "aborted", "secagg-refused", 0
    )  # fmt: skip
