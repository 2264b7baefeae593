"""The weights from which a model starts: a safetensors file, frozen weights in few bits, and low-rank adapters.

A weight is (code − middle) · scale: symmetric, with a scale for each output of a layer in 8 bits, and for each block of
32 of its inputs in 4 (the absmax quantisation of Dettmers, Lewis, Belkada, Zettlemoyer, "LLM.int8()", NeurIPS 2022,
and in blocks of Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA", NeurIPS 2023, with uniform codes). Codes are frozen
vectors of bytes: with their scales a quarter of the weights as floats in 8 bits, and a sixth in 4.

Memory, not only bytes: a graph that may make all numbers before it multiplies does so, and holds the whole model as
floats. So a panel of a matrix is taken at rows that depend on the value that it multiplies, and on the panel before;
the backward pass takes them anew.

Shapes: B rows of a value, I inputs, O outputs, P rows of a panel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from export.errors import InvalidModel, reason

# A checkpoint from which a model starts: a safetensors file, with patterns of names.


def matching(what: str, patterns: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The names that a pattern matches, in their order. Raises InvalidModel for a pattern that matches none.

    what: the names are of, for the message.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidModel(f"no {what} is called {pattern!r}; there are {', '.join(names) or 'none'}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


SHOWN = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A safetensors file with the values of a module's tensors, under their names in its state_dict.

    sha256: the digest of the file, in hex. Trained parameters may be absent, such as those of a new head, and then keep
    their values; all other tensors of the module must be in the file.
    """

    path: Path | str
    sha256: str

    def load_into(self, module: nn.Module) -> None:
        """Set the module's tensors. Raises InvalidModel when file or digest are wrong, or the tensors do not fit."""
        tensors, wanted = self._read(), module.state_dict()
        self._refuse("has tensors that the model lacks", [name for name in tensors if name not in wanted])
        for name, value in tensors.items():
            if (
                value.shape != wanted[name].shape
                or not value.dtype.is_floating_point == wanted[name].is_floating_point()
            ):
                raise InvalidModel(
                    f"checkpoint {self.path} has {name} as {_kind(value)}, the model as {_kind(wanted[name])}"
                )
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        # A tensor that the module has under two names needs to be in the file once.
        loaded_pointers = {wanted[name].data_ptr() for name in tensors}
        lacking = [name for name in wanted if name not in trained and wanted[name].data_ptr() not in loaded_pointers]
        self._refuse("lacks tensors that are not trained", lacking)
        for name, value in tensors.items():
            wanted[name].copy_(value)

    def _read(self) -> Mapping[str, Tensor]:
        import safetensors.torch  # the engine loads without it

        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise InvalidModel(f"checkpoint {self.path} cannot be read: {reason(error)}") from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256:
            raise InvalidModel(
                f"checkpoint {self.path} has the SHA-256 {digest}, expected is {self.sha256}: it is another file, or "
                "was changed"
            )
        try:
            tensors: Mapping[str, Tensor] = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise InvalidModel(f"checkpoint {self.path} is not a safetensors file: {reason(error)}") from error
        return tensors

    def _refuse(self, what: str, names: list[str]) -> None:
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise InvalidModel(f"checkpoint {self.path} {what}: {', '.join(names[:SHOWN])}{more}")


def _kind(value: Tensor) -> str:
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")


# Frozen weights in 8 or 4 bits, and low-rank adapters of frozen layers.


M = TypeVar("M", bound=nn.Module)
BITS, EXACT = (8, 4), 32
BLOCK = 32
"""Inputs that share a scale in 4 bits."""
SMALLEST = 256
"""Weights of fewer values stay as they are."""
PANEL = 1 << 20
"""Numbers of a panel, at most."""
_in_order: ContextVar[bool] = ContextVar("in_order", default=False)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """A block whose operators say in which order panels are made: for graphs that a runtime orders by itself."""
    token = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(token)


def in_few_bits(module: M, bits: int, chosen: Callable[[str], bool] = lambda path: True) -> M:
    """The same module, whose dense layers and embeddings hold their weights in 8 or 4 bits and are frozen.

    chosen: whether the layer of a path is one of them. A weight that layers share stays shared. In 4 bits, a weight
    whose inputs are no multiple of 64 takes 8. Layers with hooks, or that change their weight as by `max_norm`, stay as
    they are. Raises InvalidModel for other bits.
    """
    if bits not in BITS:
        raise InvalidModel(f"weights in {bits} bits; there are 8 and 4")
    codes, forms = dict[int, Codes](), dict[int, nn.Module]()
    every = module.named_modules(remove_duplicate=False)  # a layer may have several paths
    found = [(path, layer) for path, layer in every if type(layer) in FORMS or _scale(layer)]
    for path, layer in found:
        if not path:
            raise InvalidModel("a single layer cannot be put into few bits; put it into a module")
        if layer.weight.numel() < SMALLEST or _does_more(layer) or not chosen(path):
            continue
        weight = layer.weight
        if id(weight) not in codes:
            codes[id(weight)] = Codes(_rows(layer), bits)
        parent, _, name = path.rpartition(".")
        form = FORMS.get(type(layer), EmbeddingInFewBits)(layer, codes[id(weight)])
        setattr(module.get_submodule(parent), name, forms.setdefault(id(layer), form))
    return module


class Codes(nn.Module):
    """A matrix (O, I) as codes and scales. In 4 bits a byte has the codes of inputs i, and of I / 2 + i times 16."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight_OI: Tensor, bits: int) -> None:
        super().__init__()
        rows, inputs = weight_OI.shape
        self.bits = bits if bits == 8 or inputs % (2 * BLOCK) == 0 else 8
        middle = float(self.middle)
        grouped = weight_OI.detach().reshape(rows, -1, inputs if self.bits == 8 else BLOCK)
        scales = grouped.abs().amax(-1, keepdim=True) / (middle - 1)
        codes = (grouped / scales.where(scales > 0, torch.ones(()))).round().reshape(rows, inputs) + middle
        if self.bits == 4:
            codes = codes[:, : inputs // 2] + 16 * codes[:, inputs // 2 :]
            scales[:, : scales.shape[1] // 2] *= 16  # for codes as sixteenths
        self.register_buffer("codes", codes.to(torch.uint8))
        self.register_buffer("scales", scales.squeeze(-1).contiguous())

    @property
    def middle(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        rows, bytes_of_row = self.codes.shape
        return rows, bytes_of_row * 8 // self.bits

    @property
    def numbers(self) -> Tensor:
        """The matrix, (O, I)."""
        return torch.cat(_parts(self.codes, self.scales, self.bits), 1)

    def rows(self, places_P: Tensor) -> Tensor:
        """Rows of the matrix, (P, I)."""
        return rows_at(self.codes, self.scales, self.bits, places_P)


def rows_at(codes: Tensor, scales: Tensor, bits: int, places_P: Tensor) -> Tensor:
    """Rows of a matrix, (P, I)."""
    return torch.cat(_parts(codes.index_select(0, places_P), scales.index_select(0, places_P), bits), 1)


def _parts(codes: Tensor, scales: Tensor, bits: int) -> list[Tensor]:
    """The numbers of codes, and of scales (P, 1) or (P, I / 32): (P, I), or in 4 bits each half of the inputs."""
    numbers = codes.to(torch.float32)
    if bits == 8:
        return [(numbers - 128.0) * scales]
    sixteenths = numbers * (1 / 16)
    upper = torch.floor(sixteenths)
    lower_scales, upper_scales = scales.chunk(2, 1)
    halves = (sixteenths - (upper + 0.5), lower_scales), (upper - 8.0, upper_scales)
    return [(half.reshape(*by.shape, BLOCK) * by[..., None]).reshape(half.shape) for half, by in halves]


class Panel(NamedTuple):
    """Rows of a matrix."""

    first: int
    behind: int


def panels(rows: int, inputs: int) -> list[Panel]:
    """All rows of a matrix, in panels."""
    size = max(PANEL // inputs, 1)
    return [Panel(first, min(first + size, rows)) for first in range(0, rows, size)]


def made(codes: Tensor, scales: Tensor, bits: int, panel: Panel, after: Tensor) -> list[Tensor]:
    """The rows of a panel, (P, I), in 4 bits each half of the inputs. Within `in_order` they are made after `after`."""
    if not _in_order.get():
        rows = slice(panel.first, panel.behind)
        return _parts(codes[rows], scales[rows], bits)
    nothing = (after.detach().amax() > torch.inf).to(torch.int64)  # no number is: 0, which no runtime foresees
    places_P = torch.arange(panel.first, panel.behind) + nothing
    return _parts(codes.index_select(0, places_P), scales.index_select(0, places_P), bits)


def product(x_BI: Tensor, rows: list[Tensor]) -> Tensor:
    """x Wᵀ (B, P) of x (B, I) and the rows of a panel."""
    first, *rest = [x @ part.t() for x, part in zip(x_BI.chunk(len(rows), -1), rows, strict=True)]
    return first + rest[0] if rest else first


def part_of(gradient_BP: Tensor, rows: list[Tensor]) -> Tensor:
    """g W (B, I) of a gradient (B, P) and the rows of a panel."""
    return torch.cat([gradient_BP @ part for part in rows], -1)


class _Product(torch.autograd.Function):
    """x Wᵀ of x (B, I) and W in few bits, and its gradient g W, each panel by panel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BI: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        """(B, O)."""
        parts: list[Tensor] = []
        for panel in panels(codes.shape[0], x_BI.shape[-1]):
            parts.append(product(x_BI, made(codes, scales, bits, panel, parts[-1] if parts else x_BI)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # torch's signature
        """Keep the codes for the gradient."""
        x_BI, codes, scales, ctx.bits = inputs
        ctx.inputs = x_BI.shape[-1]
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient_BO: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient with respect to x, (B, I)."""
        codes, scales = ctx.saved_tensors
        after, total = gradient_BO, torch.zeros(())
        for panel in panels(codes.shape[0], ctx.inputs):
            part = part_of(gradient_BO[..., panel.first : panel.behind], made(codes, scales, ctx.bits, panel, after))
            after = total = total + part if panel.first else part
        return total, None, None, None


class _InFewBits(nn.Module):
    """A frozen layer in few bits."""

    def __init__(self, weight: Codes) -> None:
        super().__init__()
        self.weight_in_bits = weight

    @property
    def weight(self) -> Tensor:
        """The weight (O, I), for those that look at it."""
        return self.weight_in_bits.numbers


class DenseInFewBits(_InFewBits):
    """A frozen dense layer in few bits."""

    def __init__(self, layer: Any, weight: Codes) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, O) of (…, I)."""
        weight = self.weight_in_bits
        flat = x.reshape(-1, self.in_features)
        out: Tensor = _Product.apply(flat, weight.codes, weight.scales, weight.bits)  # type: ignore[no-untyped-call]
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class EmbeddingInFewBits(_InFewBits):
    """A frozen embedding in few bits."""

    def __init__(self, layer: nn.Embedding, weight: Codes) -> None:
        super().__init__(weight)
        self.scale = _scale(layer)

    def forward(self, places: Tensor) -> Tensor:
        """(…, I) of places (…)."""
        rows = self.weight_in_bits.rows(places.reshape(-1))
        rows = rows if self.scale is None else rows * self.scale
        return rows.reshape(*places.shape, rows.shape[-1])


# Low-rank adapters: a frozen module with small trained factors beside its layers.
#
# LoRA (Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen 2021), equation 3: h = W x + s B A x with A (r, in) and B
# (out, r); W is frozen. B starts at zero, so training starts from the module as it is.

FORMS: dict[type[nn.Module], Callable[[Any, Codes], nn.Module]] = {
    nn.Linear: DenseInFewBits,
    nn.Embedding: EmbeddingInFewBits,
}


def _scale(layer: Any) -> float | None:
    """What a derived class of embedding multiplies its rows by, as Gemma's; None for all that does anything else."""
    found: Any = getattr(layer, "embed_scale", None)
    if found is None or not isinstance(layer, nn.Embedding):
        return None
    scale, places = float(found), torch.arange(min(layer.num_embeddings, 16), device=layer.weight.device)
    with torch.no_grad():
        return scale if torch.equal(layer(places), layer.weight[places] * scale) else None


def _does_more(layer: Any) -> bool:
    """Whether a layer does what its form in few bits would not."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks) or getattr(layer, "max_norm", None) is not None


def _rows(layer: Any) -> Tensor:
    """The weight of a layer as (O, I)."""
    weight: Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear | nn.Embedding) else weight.t()  # GPT-2's own is the other way round


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
    adapted = {path: layer for path, layer in module.named_modules() if type(layer) in ADAPTED_FORMS}
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
ADAPTED_FORMS: dict[type[nn.Module], Callable[[Any, int], tuple[nn.Module, nn.Module]]] = {
    nn.Linear: _dense,
    nn.Conv2d: _convolution,
    DenseInFewBits: _dense,
}


def _adapt(layer: nn.Module, rank: int, scale: float, *, freeze_a: bool) -> None:
    down, up = ADAPTED_FORMS[type(layer)](layer, rank)
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
