"""Pretrained models with adapters in the engine: several clients at once give what each gives alone."""

import numpy as np
import pytest
import torch

from export.huggingface.folder import spec_of
from export.model import GradientOracle, Model
from fedcore.plan import IGNORED
from simulator.configuration import SimulationConfig
from simulator.engine import evaluate
from simulator.engines.oracle import CohortOracle
from simulator.population import Population
from simulator.simulation import Overrides, simulate
from tests.export.test_huggingface import CASES, CLASSIFIES, EMBEDS, FAMILIES, WORDS, pretrained

CLIENTS, BATCH = 3, 4


@pytest.mark.parametrize("bits", [pytest.param(32, marks=pytest.mark.long), 8])
@pytest.mark.parametrize(("family", "task"), CASES)
def test_clients_at_once_have_the_gradients_of_each_alone(family, task, bits, tmp_path):
    pytest.importorskip("transformers")
    model, generator = Model(spec_of(pretrained(family, tmp_path, task, bits=bits))), torch.manual_seed(0)
    batch = {
        item.name: torch.randint(item.high, (CLIENTS, BATCH, *item.shape), generator=generator)
        for item in model.spec.fields
    }
    batch[model.spec.inputs[0].name][1, 0, 6:] = WORDS
    mask = torch.ones(CLIENTS, BATCH)
    mask[2, 2:] = 0
    noise = 0.1 * torch.randn(CLIENTS, model.schema.size, generator=generator)
    params = torch.from_numpy(model.initial) + noise
    cohort = CohortOracle(model, batch, mask)
    losses, gradients, _ = cohort(params)
    for client in range(CLIENTS):
        oracle = GradientOracle(model, {name: value[client] for name, value in batch.items()}, mask[client])
        loss, gradient, _ = oracle(params[client])
        torch.testing.assert_close(losses[client], loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(gradients[client], gradient, atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(cohort.sums_KM[client], oracle.sums, atol=1e-4, rtol=1e-5)


def test_users_compare_their_own_pairs_alone(tmp_path):
    pytest.importorskip("transformers")
    model, random = Model(spec_of(pretrained("Bert", tmp_path, EMBEDS))), np.random.default_rng(0)
    shards = [
        {name: random.integers(2, WORDS, (count, 10), np.int32) for name in ("anchor", "positive")} for count in (5, 40)
    ]
    found = evaluate(model, model.initial, Population.of(["ann", "bob"], shards))

    def loss(shard, first, after):
        batch = {name: torch.from_numpy(rows[first:after]) for name, rows in shard.items()}
        return model.measure({}, batch, torch.ones(after - first))["loss"].sum().item()

    ann, bob = shards
    expected = [loss(ann, 0, 5) / 5, (loss(bob, 0, 32) + loss(bob, 32, 40)) / 40]
    assert found["loss"].tolist() == pytest.approx(expected, rel=1e-5)


def test_vectors_of_texts_that_belong_together_come_near_each_other(tmp_path, monkeypatch):
    """Both have a rare word in common, among frequent ones."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(FAMILIES, "Bert", ({**FAMILIES["Bert"][0], "initializer_range": 0.3}, CLASSIFIES))
    pretrained("Bert", tmp_path)
    random, shards = np.random.default_rng(0), []
    for _ in range(20):
        rare, pairs = random.permutation(np.arange(30, 46)), random.integers(5, 12, (2, 16, 10), np.int32)
        for texts in pairs:
            texts[np.arange(16), random.integers(10, size=16)] = rare
        shards.append(dict(zip(("anchor", "positive"), pairs, strict=True)))
    model = f"hf:{tmp_path / 'Bert'},task=embedding,tokens=10,layers=query+key+value+dense"
    settings = {"client_lr": 0.03, "epochs": 4, "batch_size": 16, "client_optimizer": "adam"}
    config = SimulationConfig(model=model, settings=settings, rounds=10, cohort=12, processes=1)
    users = Population.of([f"u{number}" for number in range(20)], shards)
    result = simulate(config, given=Overrides(users=users))
    assert result.test_accuracy > 0.3, "a sixteenth is chance, and a tenth before training"


def test_labels_are_learned_from_those_that_are_known(tmp_path, monkeypatch):
    """A text has a label for each of three words that are in it; a third of the labels are unknown."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(FAMILIES, "Bert", ({**FAMILIES["Bert"][0], "initializer_range": 0.3}, CLASSIFIES))
    pretrained("Bert", tmp_path)
    random, shards = np.random.default_rng(0), []
    for _ in range(10):
        texts = random.integers(10, 14, (16, 6), np.int32)
        label, known = (texts[:, :, None] == [10, 11, 12]).any(1).astype(np.int64), random.random((16, 3)) < 0.7
        known[:, 0] |= ~known.any(1)
        shards.append({"tokens": texts, "label": np.where(known, label, IGNORED)})
    model = f"hf:{tmp_path / 'Bert'},task=multi-label,classes=3,tokens=6,layers=query+key+value+dense"
    settings = {"client_lr": 0.03, "epochs": 4, "client_optimizer": "adam"}
    config = SimulationConfig(model=model, settings=settings, rounds=10, cohort=8, processes=1)
    result = simulate(config, given=Overrides(users=Population.of([f"u{number}" for number in range(10)], shards)))
    assert result.test_accuracy > 0.88, "to give all labels is right for 0.82 of them"
