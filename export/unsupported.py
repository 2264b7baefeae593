"""Layers and parameters that are refused, as devices could not train them, or not as torch does."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from export.errors import InvalidModel, UnsupportedModule

# Options of nn.Embedding that are refused, and why.
EMBEDDING_HARM = {
    "max_norm": "changes weights unseen",
    "scale_grad_by_freq": "would count the tokens of padding",
    "sparse": "gives gradients of another form; the result is the same without",
}


def refuse_unsupported(module: nn.Module) -> None:
    """Raise InvalidModel or UnsupportedModule, naming the layer or parameter, unless a module can be trained."""
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedModule(
                f"{path or 'the model'} is {type(layer).__name__}: batch statistics would mix padding and leak between "
                "users; use nn.GroupNorm instead, or keep the statistics of a trained model by eval() on this layer"
            )
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
