"""Heavy hitters over HTTP: a fleet against the engine, light devices against plain counts, and what a task needs."""

import asyncio

import numpy as np
import pytest
import torch

from benchmarks.load import POPULATION, LoadConfig, LoadFleet
from coordinator.errors import BudgetExceeded, InvalidTask
from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings, open_coordinator_store
from export.build import export_bundle
from export.model import Model
from export.questions.heavy_hitters import heavy_hitters
from fedcore import checkpoint
from fedcore.algorithms.heavy_hitters import CELL
from fedcore.plan import Field, Plan
from fedcore.wire.signatures import content_digest
from simulator.population import Population
from tests.questions.words import HIGH, LETTERS, as_rows, counts, f1, zipf
from tests.sampled import sampled

WORD = Field("word", "uint8", (LETTERS,), HIGH)
SHORT = Field("word", "uint8", (3,), HIGH)
SMALL = {"candidates": 16, "step_bits": 6}
PATIENCE_S = 240.0


def users_of(words):
    return Population.of(list(map(str, range(len(words)))), [{"word": as_rows(one, 3)} for one in words], HIGH)


@pytest.mark.parametrize("secagg", sampled([None, Secagg()], [Secagg()]), ids=["plain", "secure"])
def test_a_fleets_tree_is_the_engines_to_the_bit(secagg, federate):
    users = users_of([[b"the", b"of", b"a", b"zz"][: 1 + user % 4] for user in range(12)])
    asked = heavy_hitters("word", [SHORT], minimum_devices=2, most_rows=2, **SMALL)
    backend = {"onnx": "onnxruntime"}
    run = federate(Model(asked.spec()), asked.algorithm(), users, backend, rounds=asked.rounds, secagg=secagg)
    assert run.difference == 0
    assert all(way > 0 for way in run.ways)
    assert run.metrics[-1]["heavyhitters.devices"] == 8


class Voting(LoadFleet):
    """Light devices that vote, each for its word, as its graphs would; `lies` of them report 10^6 everywhere."""

    def __init__(self, config, asked, users, lies=0):
        super().__init__(config)
        self._model, self._words, self._lies = Model(asked.spec()), torch.from_numpy(users.fields["word"]), lies
        self._numbers, self._cells, self._plan = {}, {}, None

    async def _report(self, device, assignment):
        blob = assignment.checkpoint
        async with self._cache_lock:
            if self._plan is None:
                self._plan = Plan.decode(await self._blob(device, assignment.plan))
            if blob.sha256 not in self._cells:
                received = checkpoint.decode(await self._blob(device, blob), self._plan.broadcast)
                tensors = self._model.tensors(torch.from_numpy(received["params"]))
                everyone = torch.ones(len(self._words))
                cells = self._model.measure(tensors, {"word": self._words}, everyone)[CELL]
                self._cells = {blob.sha256: cells.int().tolist()}
            number = self._numbers.setdefault(device.signer, len(self._numbers))
            votes = np.zeros(self._plan.report.size - 1, np.float32)
            if number < self._lies:
                votes[:] = 1e6
            elif cell := self._cells[blob.sha256][number]:
                votes[cell - 1] = 1
        body = checkpoint.encode({"report": self._plan.report.weigh(votes, 1.0)})
        return body, content_digest(body)


def ask_light(tmp_path, coordinators, asked, users, lies=0):
    """The answer of light devices, all of which take part in every round."""
    devices = len(users)
    bundle = export_bundle(Model(asked.spec()), asked.algorithm(), tmp_path / "plan")
    settings = TaskSettings(
        population=POPULATION,
        goal=devices,
        rounds=asked.rounds,
        over_selection=1.0,
        selection_timeout_s=PATIENCE_S,
        reporting_deadline_s=PATIENCE_S,
    )
    bounds = {"connection_limit": 2 * devices, "queue_limit": 2 * devices, "max_wait_s": PATIENCE_S}
    with coordinators.local(tmp_path, **bounds) as local:
        task = local.store.register_task(bundle, settings).id

        async def over():
            while not local.store.task(task).state.ended:
                await asyncio.sleep(0.2)

        async def run():
            config = LoadConfig(coordinator=local.url, devices=devices, wait_s=PATIENCE_S, uploading=50)
            async with Voting(config, asked, users, lies) as fleet:
                await fleet.enrol()
                await fleet.run(over)

        asyncio.run(run())
        assert local.store.task(task).state is TaskState.COMPLETED
        return local.store.answer(task)


@pytest.mark.parametrize("devices", [60, pytest.param(2_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_light_devices_find_the_top_of_a_zipf_law(devices, tmp_path, coordinators):
    users = zipf(devices, 1_000 if devices > 100 else 12, seed=1)
    top = 20 if devices > 100 else 5
    asked = heavy_hitters("word", [WORD], minimum_devices=5 if devices > 100 else 2)
    found = ask_light(tmp_path, coordinators, asked, users)
    assert f1([row[0] for row in found.rows], users, top) >= 0.9
    exact = counts(users)
    assert all(count == exact[word] for word, count, _ in found.rows)
    assert (found.devices, found.round, found.over, found.minimum_devices) == (
        devices,
        asked.rounds,
        True,
        asked.minimum_devices,
    )


def test_a_device_that_votes_a_million_times_counts_as_one(tmp_path, coordinators):
    users = users_of([[b"zz"]] + [[b"the"]] * 9 + [[b"of"]] * 6 + [[b"a"]] * 4)
    asked = heavy_hitters("word", [SHORT], minimum_devices=3, **SMALL)
    found = ask_light(tmp_path, coordinators, asked, users, lies=1)
    assert [row[:2] for row in found.rows] == [("the", 10), ("of", 7), ("a", 5)]


def test_a_task_needs_the_rounds_of_its_tree(tmp_path):
    asked = heavy_hitters("word", [SHORT], minimum_devices=3, **SMALL)
    bundle = export_bundle(Model(asked.spec()), asked.algorithm(), tmp_path / "plan")
    with open_coordinator_store(f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs") as store:
        with pytest.raises(InvalidTask, match=r"heavy hitters of word take 3 rounds, not 1: after fewer no long value"):
            store.register_task(bundle, TaskSettings(population="phones", goal=20, rounds=1))
        store.set_budget("phones", 8.0, 1e-6, minimum_devices=5)
        with pytest.raises(BudgetExceeded, match="shows groups of 3: ask with --minimum-devices 5"):
            store.register_task(bundle, TaskSettings(population="phones", goal=20, rounds=3))
