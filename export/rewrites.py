"""Functions of torch in a form that a device can run, put in their place while a model runs.

Both are modes, so a user's module needs no change: `Dropout` draws from integers given from outside, in training
anywhere; `Traceable` replaces what torch would trace into operators that no device runtime has, or into slow ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from export.errors import InvalidModel, UnsupportedOperator
from export.lstm import lstm

INT32 = 2**32
# Where torch's transformers take the hint that a mask is causal: layer, name and position.
HINTS = ((nn.TransformerEncoder, "is_causal", 3), (nn.TransformerDecoder, "tgt_is_causal", 6))


class Dropout(TorchFunctionMode):
    """Dropout whose choice is a function of `noise`, int32 (B,), the place in the example, and the dropout's turn.

    Without noise nothing is dropped. `turns` counts the dropouts so far. Spec: docs/spec/plan.md §2.2.
    """

    def __init__(self, noise: Tensor | None) -> None:
        super().__init__()
        self._noise, self.turns = noise, 0

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in {functional.dropout, torch.dropout}:
            return self._dropout(*args, **kwargs)
        if func is torch.lstm and args[5]:
            return self._within(_lstm, (*args[:5], args[5] * self._on, *args[6:]), {})
        if func is functional.scaled_dot_product_attention and (args[4:5] or (kwargs.get("dropout_p"),))[0]:
            return self._within(_attention, args, kwargs)
        if func is functional.multi_head_attention_forward:
            return self._within(_opened(func, dropout=self._by_heads), args, kwargs)
        return func(*args, **kwargs)

    @property
    def _on(self) -> bool:
        return self._noise is not None

    def _within(self, form: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a function that drops something inside, which a mode does not see of its own accord."""
        with self:
            return form(*args, **kwargs)

    def _dropout(
        self, inputs: Tensor, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
    ) -> Tensor:
        if self._noise is None or not (training and train) or p == 0:
            return inputs
        if inputs.shape[0] != self._noise.shape[0]:
            raise InvalidModel("dropout on values whose first axis is not the batch; move the batch to the front")
        self.turns += 1
        if p == 1:
            return inputs * 0.0
        kept = keep(self._noise, self.turns, tuple(inputs.shape[1:]), p, inputs.device)
        return inputs * (kept.to(inputs.dtype) * (1 / (1 - p)))

    def _by_heads(self, weights: Tensor, p: float) -> Tensor:
        """Dropout of attention weights (B·heads, T, S) of `multi_head_attention_forward`."""
        if self._noise is None:
            return weights
        return self._dropout(weights.reshape(self._noise.shape[0], -1, *weights.shape[1:]), p).flatten(0, 1)


def keep(noise: Tensor, turn: int, shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Which values to keep: bool (B, *shape), true with probability 1 − p. noise: int32 (B,).

    Row noise plus a constant per place, mixed twice by x·(2x + 1) modulo 2³², of which the high bits are compared with
    a threshold: the round function of RC6 (Rivest, Robshaw, Sidney, Yin 1998), which needs no operator but + and ×.
    """
    start = np.frombuffer(hashlib.sha256(f"muster.dropout.v1 {turn}".encode()).digest()[:4], "<u4")
    places = start + np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
    # Made with NumPy, so that a trace sees a constant.
    x = noise.reshape(-1, *(1 for _ in shape)) + torch.from_numpy(places.view(np.int32).reshape(1, *shape)).to(device)
    for _ in range(2):
        x = x * (x + x + 1)
    return x >= min(round(p * INT32), INT32 - 1) - INT32 // 2


class Traceable(TorchFunctionMode):
    """LSTM layers, attention and cross-entropy as functions of few plain operators."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        form = FORMS.get(func)
        return (form or func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def unhinted(module: nn.Module) -> Iterator[None]:
    """Transformers of torch that do not look whether their mask is causal, which would branch on its values.

    They take the mask as it is then, which comes to the same.
    """
    with contextlib.ExitStack() as hooks:
        for layer in module.modules():
            for kind, name, place in HINTS:
                if isinstance(layer, kind):
                    hook = layer.register_forward_pre_hook(_hinting(name, place), with_kwargs=True)
                    hooks.callback(hook.remove)
        yield


def _hinting(name: str, place: int) -> Callable[..., tuple[Any, Any]]:
    def hook(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        unsaid = len(args) <= place and kwargs.get(name) is None
        return args, {**kwargs, name: False} if unsaid else kwargs

    return hook


def _opened(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.nn.functional that does not hand itself to modes, so that what it calls meets them.

    others: what it calls by these names instead.
    """
    scope = {**function.__globals__, "has_torch_function": lambda arguments: False, **others}
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(args[1], tuple | list):
        raise UnsupportedOperator("an LSTM over a packed sequence; pad the sequences and mask the loss instead")
    if args[1][0].shape[-1] != args[1][1].shape[-1]:
        raise UnsupportedOperator("an LSTM with a projection (proj_size); use a dense layer after it")
    return lstm(*args)


def _attention(  # noqa: PLR0913, torch's own signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by its definition."""
    if enable_gqa:
        raise UnsupportedOperator("attention with enable_gqa; repeat the keys and values instead")
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.from_numpy(np.tri(*scores.shape[-2:], dtype=np.bool_)).to(query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (functional.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _avg_pool(axes: int) -> Callable[..., Tensor]:
    """Average pooling over the last axes, whose windows lie side by side, as a mean."""

    def form(  # noqa: PLR0913, PLR0917, torch's own signature
        inputs: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel, pads = _each(kernel_size, axes), _each(padding, axes)
        if kernel != _each(stride or kernel_size, axes) or any(pads) or ceil_mode or divisor_override:
            raise UnsupportedOperator(
                "average pooling with padding, ceil_mode, a divisor or overlapping windows; give it a stride of the "
                "kernel's size and pad before it, or use a convolution with that stride"
            )
        counts = [size // length for size, length in zip(inputs.shape[-axes:], kernel, strict=True)]
        covered: list[Any] = [slice(count * length) for count, length in zip(counts, kernel, strict=True)]
        cut = inputs[(..., *covered)]
        apart = [size for pair in zip(counts, kernel, strict=True) for size in pair]
        return cut.reshape(*inputs.shape[:-axes], *apart).mean(list(range(1 - 2 * axes, 0, 2)))

    return form


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """A number per axis, of which torch takes one for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * (axes // len(numbers))


def _batch_norm(  # noqa: PLR0913, PLR0917, torch's own signature
    inputs: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A factor and a summand for every channel (axis 1), from statistics that training leaves as they are."""
    if training:
        raise UnsupportedOperator("batch normalisation by the statistics of a batch, which padding would be part of")
    factor = (running_var + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    summand = -running_mean * factor
    summand = summand if bias is None else summand + bias
    shape = (-1, *(1 for _ in inputs.shape[2:]))
    return inputs * factor.reshape(shape) + summand.reshape(shape)


def _instance_norm(  # noqa: PLR0913, PLR0917, torch's own signature
    inputs: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Group normalisation of every channel by itself."""
    if running_mean is not None or not use_input_stats:
        raise UnsupportedOperator("instance normalisation with running statistics; leave out track_running_stats")
    return functional.group_norm(inputs, inputs.shape[1], weight, bias, eps)


def _one_hot(label: Tensor, num_classes: int = -1) -> Tensor:
    """Comparisons. torch also looks whether every label is in range, which the range of a field says."""
    if num_classes < 0:
        raise UnsupportedOperator("one_hot that counts the classes in the batch; give it num_classes")
    return (label.unsqueeze(-1) == torch.arange(num_classes, device=label.device)).to(torch.int64)


class _CrossEntropy(torch.autograd.Function):
    """The gradient is the softmax, less 1 at the label; logits (N, C), label (N,)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """The loss (N,), and the logarithms of the softmax (N, C)."""
        scores = logits.log_softmax(-1)
        return -scores.gather(1, label.unsqueeze(1)).squeeze(1), scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass needs."""
        ctx.save_for_backward(output[1], inputs[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of the logits."""
        scores, label = ctx.saved_tensors
        scale = grads[0].unsqueeze(1)
        return (scores.exp() * scale).scatter_add(1, label.unsqueeze(1), -scale), None


def _cross_entropy(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """The usual case by itself; every other one as torch has it."""
    unusual = kwargs.get("weight") is not None or kwargs.get("label_smoothing", 0.0) or target.is_floating_point()
    unusual = unusual or kwargs.get("ignore_index", -100) >= 0
    if unusual or kwargs.get("reduction") != "none" or logits.dim() != 2:
        return functional.cross_entropy(logits, target, **kwargs)
    loss: Tensor = _CrossEntropy.apply(logits, target.long())[0]  # type: ignore[no-untyped-call]
    return loss


FORMS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    functional.scaled_dot_product_attention: _attention,
    functional.cross_entropy: _cross_entropy,
    functional.avg_pool1d: _avg_pool(1),
    functional.avg_pool2d: _avg_pool(2),
    functional.avg_pool3d: _avg_pool(3),
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.one_hot: _one_hot,
}
