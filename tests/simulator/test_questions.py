"""Questions, frequent answers, and texts, in fleets."""

import asyncio
import json
import resource
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from msgspec.structs import replace

from benchmarks.load import POPULATION, LoadConfig, LoadFleet
from coordinator.errors import BudgetExceeded, InvalidTask
from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings, open_coordinator_store
from export.build import export_bundle
from export.huggingface.folder import Pretrained, spec_of
from export.model import Model
from export.questions.builtin import BuiltIn, compile_built_in
from export.questions.heavy_hitters import heavy_hitters
from fedcore import checkpoint
from fedcore.algorithms.heavy_hitters import CELL
from fedcore.batching import StreamKey, permutation
from fedcore.plan import Field, Plan
from fedcore.wire.signatures import content_digest
from muster.asking import fields_in
from research.pretrained_adapters import generated, tiny
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.datasets.bundled import MARKS
from simulator.errors import DatasetError
from simulator.planned import as_devices_hold, ask_population, with_tokens
from simulator.population import Population, as_bytes
from simulator.simulation import Overrides, simulate
from tests.questions.words import HIGH, LETTERS, as_rows, counts, f1, zipf
from tests.sampled import sampled
from tests.simulator.federation import GOAL

Y = Field("y", "int64", (), 10)


def asked_of(users, text, fields, seed=0, **promise):
    word, *rest = text.split()
    made = compile_built_in(BuiltIn.parse([word, *rest]), fields, minimum_devices=1, private=bool(promise))
    return ask_population(made, users, seed=seed, **promise)


def population(clients, source):
    sizes = source.integers(1, 30, clients)
    shards = [{"y": source.integers(0, 10, size)} for size in sizes]
    return Population.of([f"user {user}" for user in range(clients)], shards, 10)


def test_clients_without_rows_are_in_no_size():
    users = Population(("a", "b", "c"), {"y": np.arange(4)}, np.array([0, 3, 3, 4]))
    found = asked_of(users, "sizes", [Y])
    assert [row[:3] for row in found.rows] == [(1, 1, 0.5), (2, 1, 0.5)]
    assert found.devices == 2


def test_rows_of_a_client_are_those_that_its_device_would_draw():
    users = population(50, np.random.default_rng(0))
    found = asked_of(users, "labels y MAX 5 ROWS PER DEVICE", [Y], seed=7)
    counts = np.zeros(10, int)
    for client in range(50):
        rows = users.shard(client)["y"]
        drawn = permutation(StreamKey(7, 1, client), 0, 0, len(rows))[:5]
        counts += np.bincount(rows[drawn], minlength=10)
    assert [row[1] for row in found.rows] == counts.tolist()


@pytest.mark.parametrize("secagg", sampled([None, Secagg()], [Secagg()]), ids=["plain", "secure"])
def test_a_fleets_answer_is_the_engines_to_the_bit(secagg, federate):
    users, _ = datasets.users("digits", None, 12)
    text = "labels y MAX 9 ROWS PER DEVICE"
    made = compile_built_in(BuiltIn.parse(text.split()), [Y], minimum_devices=1, secure=secagg is not None)
    run = federate(Model(made.spec()), made.algorithm(), users, {"onnx": "onnxruntime"}, rounds=2, secagg=secagg)
    assert run.difference == 0
    assert all(way > GOAL for way in run.ways)


def test_noise_is_as_large_as_the_answer_says_it_is():
    users = population(200, np.random.default_rng(1))
    exact = asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y])
    within, total = 0, 0
    for seed in range(20):
        found = asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y], epsilon=4.0, delta=1e-4, seed=seed)
        drawn = {row[0]: row for row in asked_of(users, "labels y MAX 3 ROWS PER DEVICE", [Y], seed=seed).rows}
        for row, error in zip(found.rows, found.errors, strict=True):
            within += sum(abs(row[place] - drawn[row[0]][place]) <= error[place] for place in (1, 2))
            total += 2
    assert len(exact.rows) == 10
    assert total > 300
    assert within / total > 0.92


def test_20000_clients_answer_within_100_mb():
    source = np.random.default_rng(2)
    users = population(20_000, source)
    asked_of(users.subset(range(10)), "labels y", [Y])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = asked_of(users, "labels y", [Y])
    assert [row[1] for row in found.rows] == np.bincount(users.fields["y"]).tolist()
    assert found.devices == 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


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


def said(users, client):
    return [text.decode() for text in users.shard(users.clients.index(client))["text"]]


def test_texts_of_files_are_bytes_as_long_as_the_longest(tmp_path):
    np.savez(tmp_path / "ann.npz", text=np.array(["na, gut", "ça va"]), label=np.array([0, 1]))
    columns = {"text": ["日本語のとても長い文です", "x"], "label": [2, 0], "user": ["bob", "eve"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "others.parquet")
    users = datasets.load(str(tmp_path))
    assert users.kinds == {"label": "int64[]", "text": f"uint8[{len(columns['text'][0].encode())}]"}
    assert [said(users, name) for name in ("ann", "bob", "eve")] == [["na, gut", "ça va"], [columns["text"][0]], ["x"]]
    assert users.classes == 3


def test_a_long_text_among_short_ones_costs_its_own_bytes_alone():
    notes = [["a short note about the train"] * 30 for _ in range(100)] + [["x" * 200_000]]
    shards = [{"text": np.array(texts, object), "label": np.zeros(len(texts), np.int64)} for texts in notes]
    tracemalloc.start()
    users = Population.of([f"user-{number}" for number in range(101)], shards)
    some = users.subset(range(1, 101)).pooled()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert (users.kinds["text"], sum(map(len, some.fields["text"]))) == ("uint8[200000]", 99 * 30 * 28 + 200_000)
    assert as_devices_hold(users.shard(0))["text"].shape == (30, 28)
    assert as_devices_hold(users.shard(100))["text"].shape == (1, 200_000)


def test_questions_of_users_with_texts_read_their_bytes_or_leave_them_out():
    shards = [{"text": np.array(["ab", "", "ab"]), "label": np.array([0, 1, 2])} for _ in range(3)]
    users = Population.of(["ann", "bob", "eve"], shards)
    fields = fields_in(users, "mine").fields
    asked = compile_built_in(BuiltIn("labels", ("label",)), fields, minimum_devices=1)
    assert [list(row[:2]) for row in ask_population(asked, users).rows] == [[0, 3], [1, 3], [2, 3]]
    text = next(field for field in fields if field.name == "text")
    assert (text.dtype, text.shape, text.high) == ("uint8", (2,), 256)
    spec = SimpleNamespace(fields=(text,), tokenizers=())
    assert with_tokens(users, spec).shard(0)["text"].tolist() == [[97, 98], [0, 0], [97, 98]]
    with pytest.raises(DatasetError, match="field 'text' has a text of 2 bytes; the model reads 1"):
        with_tokens(users, SimpleNamespace(fields=(replace(text, shape=(1,)),), tokenizers=()))


def test_a_role_says_sentences_and_the_marks_that_end_them(tmp_path):
    lines = ["Who goes there? Stand, and unfold\nyourself. Ha!", "Long live the king! and then no mark"]
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare" / "clients.jsonl"
    roles = [{"client": "Guard", "lines": lines}, {"client": "Ghost", "lines": ["Swear."]}]
    path.write_text("\n".join(map(json.dumps, roles)))
    users = datasets.load("shakespeare_marks", tmp_path)
    assert users.clients == ("Guard",)
    assert said(users, "Guard") == ["Who goes there", "Stand, and unfold yourself", "Long live the king"]
    assert [MARKS[mark] for mark in users.fields["label"]] == ["?", ".", "!"]
    path.write_text(json.dumps(roles[1]))
    with pytest.raises(DatasetError, match="no role says a sentence of 3 words or more"):
        datasets.load("shakespeare_marks", tmp_path)


def test_a_pretrained_model_learns_from_texts_of_users(tmp_path):
    pytest.importorskip("transformers")
    model = f"hf:{tiny(tmp_path)},classes=3,tokens=6"
    settings = {"client_lr": 0.03, "epochs": 10, "client_optimizer": "adam"}
    config = SimulationConfig(model=model, settings=settings, rounds=5, cohort=8, processes=1)
    result = simulate(config, given=Overrides(users=generated()))
    assert result.test_accuracy > 0.95


def test_a_head_of_its_own_is_all_that_is_trained_without_adapters(tmp_path):
    pytest.importorskip("transformers")
    model = f"hf:{tiny(tmp_path)},classes=3,tokens=6,rank=0"
    config = SimulationConfig(model=model, rounds=1, cohort=2, processes=1)
    assert simulate(config, given=Overrides(users=generated())).parameters == 3 * 16 + 3


def test_a_text_that_is_no_utf_8_is_named(tmp_path):
    pytest.importorskip("transformers")
    spec = spec_of(Pretrained(str(tiny(tmp_path)), classes=3, tokens=6))
    shard = {"text": np.frombuffer(b"who\xff", np.uint8).reshape(2, 2), "label": np.zeros(2, np.int64)}
    with pytest.raises(DatasetError, match="field 'text' of example 1 is not text in UTF-8"):
        with_tokens(Population.of(["a"], [shard]), spec)


def test_what_is_no_text_is_named():
    with pytest.raises(DatasetError, match="the text of example 1 has half a character"):
        as_bytes(np.array(["fine", "\ud800"]))
    with pytest.raises(DatasetError, match="example 1 has a NoneType in the place of a text"):
        Population.of(["a"], [{"text": np.array(["fine", None], object)}])
