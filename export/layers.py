"""The layers of a model: the active one, so that a message can name it, and those that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.fx import Node as TracedNode, traceback
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from export.errors import InvalidModel, UnsupportedModule

KEY = "layer"
# A value that no layer has as its path.
LOSS = "/"


def layer_of(node: TracedNode) -> str:
    """The origin of a traced operator, for a message: " (in layer 'x')", or empty if it is in the loss."""
    return _words(node.meta.get("custom", {}).get(KEY, LOSS))


class Layers:
    """Marks traced operators with the path of the layer that computed them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._paths: list[str] = [LOSS]
        self._marked: set[Node] = set()

    @property
    def here(self) -> str:
        """The active layer, in the words of `layer_of`."""
        return _words(self._paths[-1])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Hook into every layer while a trace is made."""
        with traceback.preserve_node_meta(), ExitStack() as hooks:
            for path, layer in self.module.named_modules():
                hooks.callback(layer.register_forward_pre_hook(self._enter(path)).remove)
                hooks.callback(layer.register_forward_hook(self._leave(path)).remove)
            yield
            self._paths = [LOSS]

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any) -> None:
            self._mark(inputs, self._paths[-1])
            self._paths.append(path)
            self._note()

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, outputs: Any) -> None:
            self._mark(outputs, path)
            self._paths.pop()
            self._note()

        return hook

    def _mark(self, values: Any, path: str) -> None:
        """Mark the backward operators of `values` that are not marked yet with the layer, too."""
        pending = [value.grad_fn for value in tree_leaves(values) if isinstance(value, Tensor)]
        while pending:
            node = pending.pop()
            if node is not None and node not in self._marked:
                self._marked.add(node)
                node.register_prehook(lambda gradients: self._backward(path))
                pending += [following for following, _ in node.next_functions]

    def _backward(self, path: str) -> None:
        self._paths[-1] = path
        self._note()

    def _note(self) -> None:
        traceback.get_current_meta()["custom"] = {KEY: self._paths[-1]}


def _words(path: str) -> str:
    if path == LOSS:
        return ""
    return f" (in layer {path!r})" if path else " (in the model's own forward)"


# Layers and parameters that are refused, as devices could not train them, and what may stand for them.


# Batch normalisation, which devices cannot train: changed to group normalisation, or held at known statistics.
#
# Group normalisation: Wu, He, "Group normalization", 2018. Statistics of a batch would mix padding with examples, and
# those of one user would reach the next.

M = TypeVar("M", bound=nn.Module)
GROUPS = 32
"""The groups of a layer, as in the paper; fewer where the channels are not a multiple."""


def to_group_norm(module: M, groups: int = GROUPS) -> M:
    """The same module with group normalisation in place of all batch normalisation, its scales and shifts kept.

    Its outputs change, so it has to be trained further.
    """
    for layer in list(module.modules()):
        for name, child in layer.named_children():
            if isinstance(child, _BatchNorm):
                setattr(layer, name, _grouped(child, groups))
    return module


def freeze_statistics(module: M) -> M:
    """The same module, whose batch normalisation keeps the statistics that it has, in training too."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return module


def batch_norms(module: nn.Module) -> list[str]:
    """The paths of all layers of batch normalisation that would compute statistics in training."""
    return [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    ]


def untrained(module: nn.Module) -> list[str]:
    """The paths of layers whose statistics are those that every layer begins with: means of 0 and variances of 1."""
    return [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.running_mean is not None
        and layer.running_var is not None
        and not layer.running_mean.any()
        and bool((layer.running_var == 1).all())
    ]


def _grouped(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    # A dense layer's channels have one value each, so a group of one channel would be 0 always.
    chosen = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(groups, channels)
    made = nn.GroupNorm(chosen, channels, layer.eps, layer.affine)
    if layer.affine:
        with torch.no_grad():
            made.weight.copy_(layer.weight)
            made.bias.copy_(layer.bias)
    return made


MOST_NAMED = 5
HOOKED = (
    "torch.utils.checkpoint, or another hook on saved tensors, computes in the backward pass, when the step's weights "
    "have left the model; leave it out of forward"
)
# Options of nn.Embedding that are refused, and why.
EMBEDDING_HARM = {
    "max_norm": "changes weights unseen",
    "scale_grad_by_freq": "would count the tokens of padding",
    "sparse": "gives gradients of another form; the result is the same without",
}


def refuse_unsupported(module: nn.Module) -> None:
    """Raise InvalidModel or UnsupportedModule, naming the layer or parameter, unless a module can be trained."""
    found = batch_norms(module)
    if found:
        raise UnsupportedModule(
            f"{_few(found)} batch normalisation: statistics of a batch would mix padding and leak between users; in "
            "make(), call export.layers.to_group_norm(module) for nn.GroupNorm instead, or "
            "freeze_statistics(module) to "
            "keep those of a trained model"
        )
    for path, layer in module.named_modules():
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise UnsupportedModule(
                f"{path or 'the model'} is {type(layer).__name__}: of the random layers only nn.Dropout and Dropout1d "
                "to Dropout3d draw the same numbers everywhere; use those"
            )
        _refuse_unsaid(path, layer)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or parameter.device.type != "cpu":
            raise InvalidModel(f"parameter {path} has no values on the CPU; give layers their sizes, and no device")
        if parameter.dtype != torch.float32:
            raise InvalidModel(f"parameter {path} is {parameter.dtype}; every parameter must be float32")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            layer = path.rpartition(".")[0]
            raise InvalidModel(
                f"parameter {path} of {f'layer {layer!r}' if layer else 'the model'} has a gradient hook, which the "
                "export would leave out; remove it, or change the gradient in forward or by a backward hook of a layer"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidModel("the model has no parameters to train: it has none, or all are frozen")


def _few(paths: list[str]) -> str:
    """The layers, by their paths, and how many more there are."""
    named = [f"layer {path!r}" if path else "the model" for path in paths[:MOST_NAMED]]
    more = [f"{len(paths) - MOST_NAMED} more"] if len(paths) > MOST_NAMED else []
    return f"{' and '.join([', '.join(named), *more])} {'is' if len(paths) == 1 else 'are'}"


def _refuse_unsaid(path: str, layer: nn.Module) -> None:
    """Refuse layers that would silently behave differently on a device, or that hide their operators."""
    if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
        raise UnsupportedModule(
            f"{path or 'the model'} was compiled by torch.jit or torch.compile; give the plain module, the export "
            "compiles it for devices"
        )
    if isinstance(layer, nn.RNNBase) and not isinstance(layer, nn.LSTM) and layer.dropout:
        raise UnsupportedModule(
            f"{path or 'the model'} is {type(layer).__name__} with dropout, which would be lost; put nn.Dropout "
            "between single layers, or use nn.LSTM"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option, harm in EMBEDDING_HARM.items():
            if getattr(layer, option):
                raise UnsupportedModule(f"{path or 'the model'} is {type(layer).__name__} with {option}, which {harm}")
