"""Low-rank adapters: a frozen module with small trained factors beside its layers.

LoRA (Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen 2021), equation 3: h = W x + s B A x with A (r, in) and
B (out, r); W is frozen. B starts at zero, so training starts from the module as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from export.errors import InvalidModel
from export.few_bits import DenseInFewBits
from export.patterns import matching

M = TypeVar("M", bound=nn.Module)
DOWN, UP = "lora_down", "lora_up"


def lora(
    module: M,
    rank: int,
    layers: Sequence[str] = ("*",),
    train: Sequence[str] = (),
    scale: float = 1.0,
    *,
    freeze_a: bool = False,
) -> M:
    """The same module, frozen, with adapters in the dense and convolutional layers that `layers` names.

    rank: r, the size between A and B. layers: paths of layers, or patterns of them such as "blocks.*.mlp.*". train:
    names or patterns of parameters that are trained as a whole, such as "head.*"; their layers get no adapters. scale:
    s, which the paper calls α / r. freeze_a: train B alone, under a random A: then the mean of devices' products is the
    product of their means, and reports have half the size (FFA-LoRA: Sun, Li, Li, Ding 2024).
    Adapters become `lora_down` and `lora_up` in their layer; other names stay, so a checkpoint of the module fits.
    Raises InvalidModel for a rank below 1, and for a pattern that matches no layer or parameter.
    """
    if rank < 1:
        raise InvalidModel(f"adapters of rank {rank}; the least is 1")
    adapted = {path: layer for path, layer in module.named_modules() if type(layer) in FORMS}
    chosen = matching("layer that can be adapted (a Linear, or a Conv2d)", layers, adapted)
    trained = matching("parameter", train, [name for name, _ in module.named_parameters()])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    for path in chosen:
        if not adapted[path].weight.requires_grad:
            _adapt(adapted[path], rank, scale, freeze_a=freeze_a)
    return module


def _dense(layer: nn.Linear | DenseInFewBits, rank: int) -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)


def _convolution(layer: nn.Conv2d, rank: int) -> tuple[nn.Conv2d, nn.Conv2d]:
    window: dict[str, Any] = {
        name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    down = nn.Conv2d(layer.in_channels, rank, bias=False, **window)
    return down, nn.Conv2d(rank, layer.out_channels, 1, bias=False)


# No derived classes: they may compute without their own forward, as the projection of an attention does.
FORMS: dict[type[nn.Module], Callable[[Any, int], tuple[nn.Module, nn.Module]]] = {
    nn.Linear: _dense,
    nn.Conv2d: _convolution,
    DenseInFewBits: _dense,
}


def _adapt(layer: nn.Module, rank: int, scale: float, *, freeze_a: bool) -> None:
    down, up = FORMS[type(layer)](layer, rank)
    down.requires_grad_(not freeze_a)
    nn.init.zeros_(up.weight)  # type: ignore[arg-type]
    layer.register_module(DOWN, down)
    layer.register_module(UP, up)
    layer.register_forward_hook(functools.partial(_add, scale))


def scale_of(layer: nn.Module) -> float:
    """s of a layer with adapters."""
    hooks = (hook for hook in layer._forward_hooks.values() if isinstance(hook, functools.partial))
    return float(next(hook.args[0] for hook in hooks if hook.func is _add))


def _add(scale: float, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    change: Tensor = layer.get_submodule(UP)(layer.get_submodule(DOWN)(inputs[0]))
    return output + scale * change
