"""A model whose loss hangs on more than parameters and example is refused, and the cause is named."""

import gc
import time

import pytest
import torch

from export.build import export_bundle
from export.errors import InvalidModel
from export.model import GradientOracle, Model
from export.models import load
from fedcore.algorithms import create
from tests.export import impure


@pytest.mark.parametrize("name", impure.REFUSED)
def test_an_impure_model_is_not_exported_and_the_cause_is_named(name, tmp_path):
    spec, words = impure.REFUSED[name]
    with pytest.raises(InvalidModel, match=words):
        export_bundle(Model(spec), create("fedavg"), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "kinks" else []) for name in impure.TAKEN]
)
def test_a_pure_model_is_exported_whatever_it_keeps(name, tmp_path):
    bundle = export_bundle(Model(impure.TAKEN[name]()), create("fedavg", {"batch_size": 4}), tmp_path)
    assert bundle.certificate.formats


def test_a_tied_parameter_stays_tied_however_often_it_is_held():
    model = Model(impure.tied())
    batch = {"x": torch.randint(11, (5, 4)), "y": torch.randint(11, (5,))}
    own = list(model.module.parameters())
    for number in range(3):
        params = torch.from_numpy(model.initial) * (1 + number)
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(params, own)
        loss = model.spec.loss(model.module(batch["x"]), batch["y"]).mean()
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, own)])
        torch.testing.assert_close(GradientOracle(model, batch, torch.ones(5))(params)[1], expected)
    assert model.module.head.weight is model.module.shared.weight is model.module.encoder.table.weight


def test_what_the_garbage_collector_calls_is_not_the_models_doing(tmp_path):
    """Others hang functions on it, such as Hypothesis, which reads a clock in each."""

    def read_a_clock(phase, info):
        time.perf_counter()

    before = gc.get_threshold()
    gc.callbacks.append(read_a_clock)
    try:
        gc.set_threshold(1)
        assert export_bundle(Model(load("logreg")), create("fedavg"), tmp_path / "plan").plan
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(read_a_clock)
        gc.set_threshold(*before)
