"""Batch normalisation: all its layers named, two ways out that export, and statistics that were never trained."""

import numpy as np
import pytest
import torch
from torch import nn

from export.build import export_bundle
from export.errors import UnsupportedModule
from export.layers import batch_norms, freeze_statistics, to_group_norm, untrained
from export.model import Model, ModelSpec, cross_entropy
from fedcore.algorithms import create
from fedcore.plan import Field


def block(channels):
    return nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())


def network():
    return nn.Sequential(block(2), block(6), nn.Flatten(), nn.Linear(96, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def spec(make):
    return ModelSpec("normed", make, cross_entropy, (Field("x", "float32", (2, 4, 4)),), Field("y", "int64", (), 3))


def test_every_layer_is_named_with_both_ways_out():
    with pytest.raises(UnsupportedModule) as caught:
        Model(spec(network))
    message = str(caught.value)
    for words in ("layer '0.1'", "layer '1.1'", "layer '4'", "to_group_norm(module)", "freeze_statistics(module)"):
        assert words in message


def test_many_layers_are_named_in_part():
    with pytest.raises(UnsupportedModule, match=r"layer '4.1' and 3 more are batch normalisation"):
        Model(spec(lambda: nn.Sequential(block(2), *(block(6) for _ in range(7)), nn.Flatten(), nn.Linear(96, 3))))


@pytest.mark.parametrize("way", [to_group_norm, freeze_statistics])
def test_both_ways_export(way, tmp_path):
    bundle = export_bundle(Model(spec(lambda: way(network()))), create("fedavg", {}), tmp_path / "plan")
    frozen = () if bundle.plan.frozen is None else bundle.plan.frozen.vectors
    assert len(frozen) == (0 if way is to_group_norm else 6)
    assert batch_norms(way(network())) == []


def test_group_norm_keeps_scales_and_shifts_and_divides_the_channels():
    torch.manual_seed(0)
    module = network()
    with torch.no_grad():
        module[0][1].weight.copy_(torch.arange(6.0))
    changed = to_group_norm(module)
    assert isinstance(changed[0][1], nn.GroupNorm)
    assert changed[0][1].weight.tolist() == np.arange(6.0).tolist()
    assert (changed[0][1].num_groups, changed[4].num_groups) == (2, 1)


def test_statistics_that_were_never_trained_are_found():
    module = freeze_statistics(network())
    assert untrained(module) == ["0.1", "1.1", "4"]
    module[4].running_mean.add_(0.5)
    module[1][1].running_var.mul_(2)
    assert untrained(module) == ["0.1"]
