"""Pretrained models with adapters in the engine: several clients at once give what each gives alone."""

import pytest
import torch

from export.huggingface.folder import spec_of
from export.model import GradientOracle, Model
from simulator.engines.oracle import CohortOracle
from tests.export.test_huggingface import COMMON, CONTINUES, FAMILIES, WORDS, pretrained

CLIENTS, BATCH, TOKENS = 3, 4, 10


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize(
    "family", [name if name in COMMON else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_clients_at_once_have_the_gradients_of_each_alone(family, bits, tmp_path):
    pytest.importorskip("transformers")
    model, generator = Model(spec_of(pretrained(family, tmp_path, bits=bits))), torch.manual_seed(0)
    size = (CLIENTS, BATCH, TOKENS)
    batch = {"tokens": torch.randint(2, WORDS, size, generator=generator, dtype=torch.int32)}
    batch["tokens"][1, 0, 6:] = 0
    if FAMILIES[family][1] != CONTINUES:
        batch["label"] = torch.randint(0, 3, size[:2], generator=generator)
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
