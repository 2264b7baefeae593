"""Models as `muster export` writes them, on a device: they predict what torch does, in both formats."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from device_runtime.backends import FORMATS
from device_runtime.models.model import Model as ReleasedModel
from device_runtime.permission.policy import Policy
from export.build import build_plan
from export.model import Model
from export.models import load
from export.predict import build_predict
from export.trial_examples import draw_examples
from fedcore.algorithms import create
from fedcore.plan import BlobRef
from tests.device_runtime import linear
from tests.device_runtime.executorch import program
from tests.device_runtime.released import NAME, POLICY, ROWS, released


def moved(model):
    """Parameters without zeros, which the module has too."""
    params_D = model.initial + np.random.default_rng(3).normal(0, 0.02, model.initial.shape).astype(np.float32)
    trained = [value for value in model.module.parameters() if value.requires_grad]
    nn.utils.vector_to_parameters(torch.from_numpy(params_D), trained)
    return params_D


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["digits_cnn", pytest.param("char_lstm", marks=pytest.mark.long)])
def test_an_exported_model_predicts_on_a_device_what_torch_does(coordinator, config, executorch, name, form):
    model = Model(load(name))
    predict, graphs = build_predict(model, (form,))
    trained = structs.replace(build_plan(model, create("fedavg"), ())[0], graphs={form: TRAINED}, predict=predict)
    released(coordinator, 1, params=moved(model), plan=trained, graph=graphs[predict.graphs[form]])
    examples = draw_examples(model.spec, 5, np.random.default_rng(5))
    given = {item.name: examples[item.name] for item in model.spec.inputs}
    with torch.no_grad():
        wanted = model.module.eval()(*(torch.from_numpy(values) for values in given.values())).numpy()
    config = replace(config, policy=POLICY, backend=FORMATS[form])
    with ReleasedModel(config, NAME) as one:
        assert one.refresh()
    with ReleasedModel(config, NAME) as one:
        found = one.predict(given)["output"]
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


TRAINED = {name: BlobRef.of(name.encode()) for name in ("train.begin", "train.step", "report")}


def test_any_number_of_examples_fits_a_graph_of_four(coordinator, config, executorch):
    arguments = torch.zeros(3), torch.zeros(4, 3)
    blob = program(lambda params, x: x @ params, arguments, ["params", "example.x"], ["output"])
    plan = linear.predicting(blob, linear.plan(fmt="executorch"), batch_size=4, graphs={"executorch": BlobRef.of(blob)})
    params = np.array([1, 2, 3], np.float32)
    released(coordinator, 1, params=params, plan=plan, graph=blob)
    with ReleasedModel(replace(config, policy=POLICY, backend="executorch"), NAME) as model:
        assert model.refresh()
        for count in (1, 3, 4, 5, 11):
            rows = np.tile(ROWS, (4, 1))[:count]
            assert model.predict({"x": rows})["output"].tolist() == [1.0, 2.0, 3.0, *[1.0, 2.0, 3.0] * 3][:count]


def test_unsigned_programs_are_not_asked_for(coordinator, config, executorch):
    with ReleasedModel(replace(config, policy=Policy(), backend="executorch"), NAME) as model:
        with pytest.raises(Exception, match="unsigned_programs") as error:
            model.refresh()
        assert error.value.reason == "policy"
    assert coordinator.calls == []
