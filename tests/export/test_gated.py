"""Gated layers that keep less for the gradient compute what those of the library do."""

import copy

import pytest
import torch

from export.huggingface.modules import Gated, with_gated_layers


@pytest.fixture
def layer():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    return LlamaMLP(transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=24))


def gradients(layer, x):
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


def test_values_and_gradients_are_those_of_the_library(layer):
    gated, x = torch.nn.ModuleDict({"mlp": copy.deepcopy(layer)}), torch.randn(5, 8)
    with_gated_layers(gated)
    assert isinstance(gated["mlp"], Gated)
    assert list(gated["mlp"].state_dict()) == list(layer.state_dict())
    torch.testing.assert_close(gated["mlp"](x), layer(x))
    torch.testing.assert_close(gradients(gated["mlp"], x), gradients(layer, x))


def test_two_arrays_are_kept_for_the_gradient(layer):
    def kept(layer):
        arrays = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: arrays.setdefault(one.data_ptr(), one), lambda one: one
        ):
            out = layer(torch.randn(5, 8))
        del out
        return sum(one.shape == (5, 24) for one in arrays.values())

    assert (kept(layer), kept(Gated(layer))) == (4, 3)  # the product is kept too, where the layer after it is trained


def test_every_layer_of_a_usual_size_is_one():
    """In sums of that many products, values near zero differ by more than a share of themselves."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, intermediate_size=1536)
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": LlamaMLP(config)}) for _ in range(8)])
    with_gated_layers(layers)
    assert all(isinstance(layer["mlp"], Gated) for layer in layers)


def test_a_layer_that_holds_large_values_within_bounds_stays(layer):
    class Bounded(type(layer)):
        def forward(self, x):
            gate, up = self.gate_proj(x).clamp(max=10), self.up_proj(x).clamp(-10, 10)
            return self.down_proj(self.act_fn(gate) * up)

    bounded = torch.nn.ModuleDict({"mlp": Bounded(layer.config)})
    with_gated_layers(bounded)
    assert isinstance(bounded["mlp"], Bounded)


def test_a_layer_with_another_activation_stays(layer):
    layer.act_fn = torch.nn.GELU()
    model = torch.nn.ModuleDict({"mlp": layer})
    with_gated_layers(model)
    assert model["mlp"] is layer
