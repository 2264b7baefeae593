"""Functions of torch in a form that a device can run, substituted while a model runs.

All are modes, so a user's module needs no change: `KeyedNoise` draws from given integers, in training anywhere;
`Traceable` replaces functions that torch would trace into slow operators, or into ones that no device runtime has; and
`IgnoredLabels` skips labels that do not count.
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

from export.convolution import adaptive_avg_pool, adaptive_max_pool, avg_pool, interpolate
from export.errors import InvalidModel, UnsupportedOperator
from export.operator_forms import lstm

INT32 = 2**32
# The arguments of torch's transformers that hint at a causal mask: layer, name and position.
HINTS = ((nn.TransformerEncoder, "is_causal", 3), (nn.TransformerDecoder, "tgt_is_causal", 6))


class KeyedNoise(TorchFunctionMode):
    """Dropout and random numbers as functions of `noise`, int32 (B,), the place in the example, and the turn.

    Without noise nothing is dropped, and every draw is its mean: 0 of `randn_like`, a half of `rand_like`. `turns`
    counts what was drawn so far. Spec: docs/spec/plan.md §2.2.
    """

    def __init__(self, noise: Tensor | None) -> None:
        super().__init__()
        self._noise, self.turns = noise, 0
        self._draws: dict[Any, Callable[..., Tensor]] = {
            functional.dropout: self._dropout,
            torch.dropout: self._dropout,
            functional.dropout1d: self._channels(3),
            functional.dropout2d: self._channels(2, 3, 4),
            functional.dropout3d: self._channels(5),
            torch.rand_like: self._uniform,
            torch.randn_like: self._normal,
        }

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._draws:
            return self._draws[func](*args, **kwargs)
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
        """Run a function that applies dropout inside, which a mode does not see by itself."""
        with self:
            return form(*args, **kwargs)

    def _dropout(
        self, inputs: Tensor, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
    ) -> Tensor:
        if self._noise is None or not (training and train) or p == 0:
            return inputs
        self._take_turn(self._noise, "dropout on", inputs)
        if p == 1:
            return inputs * 0.0
        mask = keep(self._noise, self.turns, tuple(inputs.shape[1:]), p, inputs.device)
        return inputs * (mask.to(inputs.dtype) * (1 / (1 - p)))

    def _channels(self, *ranks: int) -> Callable[..., Tensor]:
        """Dropout of whole channels, axis 1, for these ranks; torch treats other ranks as values of one example."""

        def dropout(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if inputs.dim() not in ranks:
                raise InvalidModel(
                    f"dropout of channels on values of {inputs.dim()} axes, of which torch takes the first for "
                    "channels; put an axis of channels after the batch"
                )
            mask = self._dropout(inputs.new_ones(inputs.shape[:2]), p, training)
            return inputs * mask.reshape(*mask.shape, *(1 for _ in inputs.shape[2:]))

        return dropout

    def _take_turn(self, noise: Tensor, what: str, inputs: Tensor) -> None:
        if inputs.shape[0] != noise.shape[0]:
            raise InvalidModel(f"{what} values whose first axis is not the batch; move the batch to the front")
        self.turns += 1

    def _uniform(self, inputs: Tensor) -> Tensor:
        """Above 0, up to 1, in the shape of `inputs`."""
        if self._noise is None:
            return torch.full_like(inputs, 0.5)
        self._take_turn(self._noise, "random numbers like", inputs)
        mixed = mix(self._noise, self.turns, tuple(inputs.shape[1:]), inputs.device, rounds=4)
        return (mixed.to(inputs.dtype) * (1 / INT32) + 0.5).clamp(min=1 / INT32)

    def _normal(self, inputs: Tensor) -> Tensor:
        """Of mean 0 and deviation 1, from two uniform numbers (Box and Muller 1958)."""
        if self._noise is None:
            return torch.zeros_like(inputs)
        length = (-2 * self._uniform(inputs).log()).sqrt()
        return length * (2 * math.pi * self._uniform(inputs)).cos()

    def _by_heads(self, weights: Tensor, p: float) -> Tensor:
        """Dropout of attention weights (B·heads, T, S) of `multi_head_attention_forward`."""
        if self._noise is None:
            return weights
        return self._dropout(weights.reshape(self._noise.shape[0], -1, *weights.shape[1:]), p).flatten(0, 1)


def keep(noise: Tensor, turn: int, shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """The values to keep: bool (B, *shape), true with probability 1 − p. noise: int32 (B,)."""
    return mix(noise, turn, shape, device, rounds=2) >= min(round(p * INT32), INT32 - 1) - INT32 // 2


def mix(noise: Tensor, turn: int, shape: tuple[int, ...], device: torch.device, rounds: int) -> Tensor:
    """An integer for every place: int32 (B, *shape). noise: int32 (B,).

    Row noise plus a constant per place, mixed by x·(2x + 1) modulo 2³², whose high bits are used: the round function of
    RC6 (Rivest, Robshaw, Sidney, Yin 1998), which needs only + and ×.
    """
    start = np.frombuffer(hashlib.sha256(f"muster.dropout.v1 {turn}".encode()).digest()[:4], "<u4")
    places = start + np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
    # Made with NumPy, so that a trace sees a constant.
    x = noise.reshape(-1, *(1 for _ in shape)) + torch.from_numpy(places.view(np.int32).reshape(1, *shape)).to(device)
    for _ in range(rounds):
        x = x * (x + x + 1)
    return x


class Traceable(TorchFunctionMode):
    """LSTM layers, attention and cross-entropy as functions of few plain operators."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        form = FORMS.get(func)
        return (form or func)(*args, **(kwargs or {}))


class IgnoredLabels(TorchFunctionMode):
    """Cross-entropy of labels of which some are ignored: 0 for these, and nothing is looked up by them."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.cross_entropy or kwargs.get("reduction") != "none" or len(args) < 2:
            return func(*args, **kwargs)
        logits, target, *more = args
        if target.is_floating_point():  # shares of all classes
            return func(*args, **kwargs)
        ignored = target == kwargs.get("ignore_index", -100)
        return torch.where(ignored, 0.0, func(logits, torch.where(ignored, 0, target), *more, **kwargs))


@contextlib.contextmanager
def unhinted(module: nn.Module) -> Iterator[None]:
    """Keep torch's transformers from checking whether their mask is causal, which would branch on its values.

    They use the mask itself instead, with the same result.
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
    """A function of torch.nn.functional that does not dispatch itself to modes, so that its inner calls reach them.

    others: replacements of functions that it calls, by name.
    """
    scope = {**function.__globals__, "has_torch_function": lambda arguments: False, **others}
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(args[1], tuple | list):
        raise UnsupportedOperator("an LSTM over a packed sequence; pad the sequences and mask the loss instead")
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
    """A factor and a summand for every channel (axis 1), from statistics that training does not change."""
    if training:
        raise UnsupportedOperator("batch normalisation by the statistics of a batch, which padding would be part of")
    factor = (running_var + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    summand = -running_mean * factor
    summand = summand if bias is None else summand + bias
    shape = (-1, *(1 for _ in inputs.shape[2:]))
    return inputs * factor.reshape(shape) + summand.reshape(shape)


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """A weight from its direction and its length, for each slice along `dim`, or for all values if `dim` is -1."""
    axes = [axis for axis in range(direction.dim()) if axis != dim % direction.dim() or dim == -1]
    return direction * (length / direction.square().sum(axes, keepdim=True).sqrt())


def _embedding_bag(  # noqa: PLR0913, PLR0917, torch's own signature
    inputs: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of the table, looked up and combined over the axis of the bag; padding does not count."""
    if offsets is not None or inputs.dim() != 2:
        raise UnsupportedOperator("an EmbeddingBag with offsets; give it bags of one length, filled with padding_idx")
    if mode == "max" and padding_idx is not None:
        raise UnsupportedOperator("an EmbeddingBag of maxima with padding_idx; take sums or means")
    rows = functional.embedding(inputs, weight, padding_idx)
    if mode == "max":
        return rows.max(1).values
    shares = torch.ones_like(inputs, dtype=rows.dtype) if per_sample_weights is None else per_sample_weights
    if padding_idx is not None:
        shares = shares * (inputs != padding_idx).to(rows.dtype)
    summed = (rows * shares.unsqueeze(-1)).sum(1)
    return summed if mode == "sum" else summed / shares.sum(1, keepdim=True).clamp(min=1)


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
    """Group normalisation with one channel per group."""
    if running_mean is not None or not use_input_stats:
        raise UnsupportedOperator("instance normalisation with running statistics; leave out track_running_stats")
    return functional.group_norm(inputs, inputs.shape[1], weight, bias, eps)


def _one_hot(label: Tensor, num_classes: int = -1) -> Tensor:
    """Comparisons. torch also checks that labels are in range, which a field's range already ensures."""
    if num_classes < 0:
        raise UnsupportedOperator("one_hot that counts the classes in the batch; give it num_classes")
    return (label.unsqueeze(-1) == torch.arange(num_classes, device=label.device)).to(torch.int64)


def _gaussian_nll(
    inputs: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """By its definition. torch also checks for negative variances, which would branch on values."""
    spread = var if isinstance(var, Tensor) else torch.full_like(inputs, var)
    if inputs.dim() > spread.dim() == inputs[..., 0].dim():  # one for all of the last axis
        spread = spread.unsqueeze(-1)
    bounded = spread + (spread.clamp(min=eps) - spread).detach()
    loss = (bounded.log() + (inputs - target) ** 2 / bounded + full * math.log(2 * math.pi)) / 2
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


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
        ctx.save_for_backward(output[1], inputs[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        scores, label = ctx.saved_tensors
        scale = grads[0].unsqueeze(1)
        return (scores.exp() * scale).scatter_add(1, label.unsqueeze(1), -scale), None


def _cross_entropy(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """The usual case by `_CrossEntropy`; every other one by torch."""
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
    **{getattr(functional, f"avg_pool{axes}d"): avg_pool(axes) for axes in (1, 2, 3)},
    **{getattr(functional, f"adaptive_avg_pool{axes}d"): adaptive_avg_pool(axes) for axes in (1, 2, 3)},
    **{getattr(functional, f"adaptive_max_pool{axes}d"): adaptive_max_pool(axes) for axes in (1, 2, 3)},
    functional.interpolate: interpolate,
    functional.embedding_bag: _embedding_bag,
    functional.gaussian_nll_loss: _gaussian_nll,
    torch._weight_norm: _weight_norm,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.one_hot: _one_hot,
}
