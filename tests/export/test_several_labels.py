"""Several labels in an example, of which some are ignored: losses, figures, export and what devices take."""

import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.errors import ExampleRefused
from device_runtime.examples import Collection, ExampleStore
from export.build import export_bundle
from export.model import Model, ModelSpec
from export.tasks import cross_entropy_of_labels, f1_of_labels, labels_right, of_tokens
from fedcore.algorithms import create
from fedcore.errors import PlanError
from fedcore.plan import IGNORED, Field, Plan
from simulator.errors import DatasetError
from simulator.population import Population

LABELS = Field("y", "int64", (4,), 3, ignored=IGNORED)


class PerPlace(nn.Module):
    """Logits of three classes at four places."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(5, 12)

    def forward(self, x):
        return self.dense(x).reshape(-1, 4, 3)


def whole(logits, label):
    """As users write it: torch skips labels of -100 by itself."""
    each = nn.CrossEntropyLoss(reduction="none")(logits.transpose(1, 2), label)
    return each.sum(1) / (label >= 0).sum(1).clamp(min=1)


def flat(logits, label):
    each = nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
    return each.reshape(label.shape).sum(1)


def spec(loss, label=LABELS):
    return ModelSpec("places", PerPlace, loss, (Field("x", "float32", (5,)),), label)


@pytest.mark.parametrize("loss", [whole, flat, of_tokens(IGNORED)[0]])
def test_losses_that_skip_labels_are_exported_in_both_formats(loss, tmp_path, executorch):
    bundle = export_bundle(Model(spec(loss)), create("fedavg"), tmp_path, targets=("onnx", "executorch"))
    assert bundle.plan.examples.fields[1].ignored == IGNORED
    assert Plan.decode(bundle.plan.encode()) == bundle.plan


def test_a_label_that_is_ignored_counts_in_neither_loss_nor_accuracy():
    loss, right = of_tokens(IGNORED)
    logits, label = torch.randn(2, 4, 3, generator=torch.manual_seed(0)), torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2]])
    some = torch.where(torch.tensor([True, False, True, True]), label, IGNORED)
    kept = [0, 2, 3]
    torch.testing.assert_close(loss(logits, some), loss(logits[:, kept], label[:, kept]))
    torch.testing.assert_close(right(logits, some), right(logits[:, kept], label[:, kept]))
    none = torch.full_like(label, IGNORED)
    assert (loss(logits, none).tolist(), right(logits, none).tolist()) == ([0, 0], [0, 0])


def test_labels_of_several_kinds_have_binary_losses_and_figures():
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, -0.5, -1.0], [1.0, 1.0, -2.0]])
    label = torch.tensor([[1, 1, IGNORED], [0, 0, 0], [0, 1, 1]])
    each = nn.functional.binary_cross_entropy_with_logits(logits, label.clamp(min=0).float(), reduction="none")
    expected = torch.stack((each[0, :2].mean(), each[1].mean(), each[2].mean()))
    torch.testing.assert_close(cross_entropy_of_labels(logits, label), expected)
    torch.testing.assert_close(labels_right(logits, label), torch.tensor([1 / 2, 1.0, 1 / 3]))
    torch.testing.assert_close(f1_of_labels(logits, label), torch.tensor([2 / 3, 1.0, 1 / 2]))


def test_devices_take_what_is_ignored_and_nothing_else_below_0(tmp_path):
    store = ExampleStore.open(tmp_path)
    store.declare(Collection("default", (LABELS,)))
    store.append("default", {"y": [0, IGNORED, 2, IGNORED]})
    with pytest.raises(ExampleRefused, match="field 'y' holds a value outside 0 … 2"):
        store.append("default", {"y": [0, -99, 2, 1]})
    assert LABELS.holds(np.array([-100, -99, -1, 0, 2, 3])).tolist() == [True, False, False, True, True, False]


def test_users_of_a_simulation_may_have_labels_that_are_ignored():
    x = np.zeros((1, 5), np.float32)
    for value, refused in ((IGNORED, False), (-1, True)):
        users = Population.of(["ann"], [{"x": x, "y": np.array([[0, 1, 2, value]])}])
        if refused:
            with pytest.raises(DatasetError, match="field 'y' holds values outside 0 … 2"):
                users.check(spec(whole).fields)
        else:
            users.check(spec(whole).fields)


@pytest.mark.parametrize(("dtype", "high"), [("uint8", 3), ("float32", None), ("int64", None)])
def test_only_labels_with_classes_can_be_ignored(dtype, high):
    with pytest.raises(PlanError, match="field 'y' ignores -100: it must be int32 or int64, and have a high"):
        Field("y", dtype, (), high, ignored=IGNORED)
