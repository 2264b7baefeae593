"""Pretrained models of tokens as modules: logits, losses of next tokens, gated layers, and checks of masks."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from export.errors import InvalidModel, reason
from export.weights import made, panels, part_of, product, rows_at

# The loss of next tokens from the values before the last layer, whose weight is in few bits: panel by panel.
#
# Logits of 128 tokens over 49,152 words are 25 MB, and a plain loss holds four such arrays: logits, their logarithms,
# the one-hot truth, and the gradient. Here a step holds one panel of them: sums of exponentials, and of rows that these
# weigh, go from panel to panel, scaled to the largest logit so far. So the gradient is there when the loss is, and each
# panel is made once (as attention in Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", NeurIPS 2022).
#
# Shapes: N tokens, H values of each, V words, P words of a panel.


class DeferredLogits:
    """What logits are made of, in their place. states: (B, T, H)."""

    def __init__(self, states: Tensor, codes: Tensor, scales: Tensor, bits: int) -> None:
        self._states, self._weight = states, (codes, scales, bits)
        self._found: tuple[Tensor, Tensor] | None = None

    def against(self, following: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and whether the largest logit is right, (B, T) each, of tokens (B, T). They are made once."""
        if self._found is None:
            flat = self._states.flatten(0, 1)
            entropy, right, *_ = _TokenLoss.apply(flat, following.flatten(), *self._weight)  # type: ignore[no-untyped-call]
            self._found = entropy.reshape(following.shape), right.reshape(following.shape)
        return self._found


class _TokenLoss(torch.autograd.Function):
    """Cross-entropy (N,) of states (N, H) and a weight in few bits against tokens (N,)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states_NH: Tensor, tokens_N: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, ...]:
        """Cross-entropy (N,), whether the largest logit is right (N,), and the gradient of the first (N, H)."""
        largest = states_NH[:, 0] * 0 - torch.inf
        total, truth, pull_NH = states_NH[:, 0] * 0, states_NH[:, 0] * 0, states_NH * 0
        after = states_NH
        for panel in panels(codes.shape[0], states_NH.shape[-1]):
            rows = made(codes, scales, bits, panel, after)
            part_NP = product(states_NH, rows)
            next_largest = torch.maximum(largest, part_NP.amax(1))
            shrink, weights_NP = (largest - next_largest).exp(), (part_NP - next_largest[:, None]).exp()
            total = total * shrink + weights_NP.sum(1)
            pull_NH = pull_NH * shrink[:, None] + part_of(weights_NP, rows)
            largest = next_largest
            place = (tokens_N - panel.first).clamp(0, part_NP.shape[1] - 1)
            found = part_NP.gather(1, place[:, None]).squeeze(1)
            truth = torch.where(tokens_N - panel.first == place, found, truth)
            after = pull_NH[:, 0] + total + truth  # all that needs this panel
        gradient_NH = pull_NH / total[:, None] - rows_at(codes, scales, bits, tokens_N)
        return largest + total.log() - truth, (truth >= largest).to(torch.float32), gradient_NH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the gradient."""
        ctx.save_for_backward(output[2])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to states, (N, H)."""
        (gradient_NH,) = ctx.saved_tensors
        return gradients[0][:, None] * gradient_NH, None, None, None, None


class Padding(NamedTuple):
    """The numbers that fill short texts, and the token that a model reads in their place, masked."""

    ids: tuple[int, ...]
    stands: int

    def real_of(self, tokens: Tensor) -> Tensor:
        """Where tokens (B, T) are those of a text: 1, and 0 where they fill it."""
        real = (tokens != self.ids[0]).long()
        for one in self.ids[1:]:
            real = real * (tokens != one).long()
        return real


class Text(nn.Module):
    """A pretrained model of tokens. Padding is masked out."""

    def __init__(self, model: Any, padding: Padding) -> None:
        super().__init__()
        self.model, self.padding, self.without_logits = model, padding, False

    def forward(self, tokens: Tensor) -> Tensor | DeferredLogits:
        """Logits: (B, classes), (B, T, classes), or (B, T, vocabulary). Training may do without these."""
        given = self.given(tokens)
        with _as_traced():
            if self.training and self.without_logits:
                last = self.model.get_output_embeddings().weight_in_bits
                return DeferredLogits(
                    self.model.base_model(**given).last_hidden_state, last.codes, last.scales, last.bits
                )
            logits: Tensor = self.model(**given).logits
            return logits

    def given(self, tokens: Tensor) -> dict[str, Tensor]:
        """What the model reads."""
        ids, real = tokens.long(), self.padding.real_of(tokens)
        return {"input_ids": torch.where(real > 0, ids, self.padding.stands), "attention_mask": real}


class LastToken(Text):
    """A pretrained decoder that tells the class of a text from the values of its last token.

    That of `transformers` takes the last token that is not the one of padding, which may be one of the text.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, classes)."""
        given = self.given(tokens)
        with _as_traced():
            logits: Tensor = self.model.score(self.model.base_model(**given).last_hidden_state)
        real = given["attention_mask"]
        last = real * (real.cumsum(1) == real.sum(1, keepdim=True))
        return (logits * last.unsqueeze(-1)).sum(1)


class Sentences(Text):
    """A pretrained model whose values for a text become one vector of length 1."""

    def __init__(self, model: Any, padding: Padding, pooling: str) -> None:
        super().__init__(model, padding)
        self.pooling = pooling

    def forward(self, anchor: Tensor, positive: Tensor | None = None) -> Any:
        """Vectors (B, H) of texts; of pairs of texts, one after the other."""
        if positive is None:
            return self._vectors(anchor)
        both = self._vectors(torch.cat((anchor, positive)))
        return tuple(both.reshape(2, anchor.shape[0], both.shape[1]))

    def _vectors(self, tokens: Tensor) -> Tensor:
        given = self.given(tokens)
        with _as_traced():
            values: Tensor = self.model(**given).last_hidden_state
        real = given["attention_mask"].unsqueeze(-1).to(values.dtype)
        pooled = values[:, 0] if self.pooling == CLS else (values * real).sum(1) / real.sum(1).clamp(min=1)
        return pooled * (pooled.square().sum(1, keepdim=True) + 1e-12).rsqrt()  # whose gradient at 0 is finite


MEAN, CLS = "mean", "cls"
"""How the values of a text become one vector: their mean over what is no padding, or those of the first token."""
MODULES = "modules.json"
CHANGES = {"sentence_*_config.json": "do_lower_case", "config_sentence_transformers.json": "default_prompt_name"}
"""Settings by which sentence-transformers changes a text before anything reads it, by their file, which it also calls
sentence_roberta_config.json and the like."""


def pooling_of(folder: Path) -> str:
    """The pooling that sentence-transformers notes in a folder, else the mean.

    Raises InvalidModel for another, and for a folder by which sentence-transformers changes texts first.
    """
    if not (folder / MODULES).is_file():
        return MEAN
    try:
        changes = list(_changes(folder))
        modules = {_name(one["type"]): one["path"] for one in json.loads((folder / MODULES).read_bytes())}
        path = modules.pop("Pooling", None)
        noted = {} if path is None else json.loads((folder / path / "config.json").read_bytes())
        modes = [name for name, value in noted.items() if name.startswith("pooling_mode_") and value]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{folder / MODULES} is not as sentence-transformers writes it: {reason(error)}") from error
    if changes:
        raise InvalidModel(
            f"{folder} has {changes[0]}: sentence-transformers changes every text by it, and devices do not; have your "
            "app change texts so, and take the setting out"
        )
    modes = modes or [f"pooling_mode_{noted.get('pooling_mode', MEAN)}_tokens"]
    known = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS, "pooling_mode_cls_tokens": CLS}
    if (unknown := sorted(modules.keys() - {"Transformer", "Normalize"})) or len(modes) > 1 or modes[0] not in known:
        what = f"the module {unknown[0]}" if unknown else " and ".join(modes)
        raise InvalidModel(
            f"{folder / MODULES} has {what}; known are the poolings mean_tokens and cls_token, followed by Normalize"
        )
    return known[modes[0]]


def _name(type_: str) -> str:
    """Of a module of sentence-transformers alone; one of a folder's own code may do anything under the same name."""
    return type_.rpartition(".")[2] if type_.startswith("sentence_transformers.") else type_


def _changes(folder: Path) -> Iterator[str]:
    for pattern, setting in CHANGES.items():
        for path in folder.glob(pattern):
            if json.loads(path.read_bytes()).get(setting):
                yield f"{setting} in {path.name}"


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """A block in which `transformers` makes its masks without looking at values, as when it is traced.

    The values of several clients at once, under vmap, cannot be looked at; masks are the same, only never left out.
    """
    from transformers import masking_utils

    masks: Any = masking_utils
    was, masks.is_tracing = masks.is_tracing, lambda tensor=None: True
    try:
        yield
    finally:
        masks.is_tracing = was


SAME_LAYER = 1e-5
# Gated layers of language models that keep less for the gradient: down(silu(gate(x)) · up(x)).
#
# Autograd keeps gate(x), its sigmoid, silu(gate(x)) and up(x). Two of these are made of the others at little cost, so
# they are made again, once the gradient is there.

LARGE = 1e4
"""A factor at which a layer shows whether it holds values within bounds, as DeepSeek V4's does."""


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        """Of the shape of both."""
        return gate * gate.sigmoid() * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep both."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to both."""
        gate, up = ctx.saved_tensors
        # But for a zero that it cannot foresee, a runtime would keep the sigmoid of the forward pass for this one.
        gate = gate + (gradient > torch.inf).to(torch.float32)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


class Gated(nn.Module):
    """A gated layer of `transformers`, with the same parts under the same names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = layer.gate_proj, layer.up_proj, layer.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x."""
        out: Tensor = self.down_proj(_GatedProduct.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]
        return out


def with_gated_layers(model: nn.Module) -> None:
    """Put such layers in place of those that a model has, where they compute the same."""
    for path, layer in list(model.named_modules()):
        if not all(hasattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            continue
        gated, small = Gated(layer), torch.linspace(-3, 3, layer.gate_proj.in_features)[None]
        with torch.no_grad():
            is_same = all(
                _close(layer.act_fn(x), nn.functional.silu(x)) and _close(layer(x), gated(x))
                for x in (small, LARGE * small)
            )
        if is_same:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, gated)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two differ by rounding alone: as a share of the largest value, since sums near zero have any error."""
    return bool((a - b).abs().amax() <= SAME_LAYER * a.abs().amax())


A_FEW = 16


def used(text: Text, layers: Mapping[str, nn.Module], tokens: int) -> set[str]:
    """The layers on which outputs for so many tokens depend. A forward may call some never, or drop what they give."""
    outputs: list[tuple[str, Tensor]] = []
    with torch.enable_grad(), contextlib.ExitStack() as hooks:
        for path, layer in layers.items():
            note = functools.partial(lambda path, _, __, output: outputs.append((path, output)), path)
            hooks.callback(layer.register_forward_hook(note).remove)
        found = text(torch.arange(min(tokens, A_FEW))[None] % text.padding.ids[0])
        gradients = torch.autograd.grad(found.sum(), [output for _, output in outputs], allow_unused=True)
    return {path for (path, _), gradient in zip(outputs, gradients, strict=True) if gradient is not None}


SAME_LOGITS = 1e-4


def check_masks(folder: str, text: Text, tokens: int, is_next: bool) -> None:
    """Raise InvalidModel where padding changes what a model makes of a text, tokens change what precedes them, or the
    model its own weights.

    tokens: of a text. is_next: whether the model tells each token from those before it, which it must not see.
    """
    kind, padding = type(text.model).__name__, text.padding
    versions = {name: weight._version for name, weight in text.model.named_parameters()}
    with torch.no_grad():
        ids = (7 * torch.arange(tokens)[None] + 3) % (padding.ids[0] - 1)
        ids += (ids >= padding.stands).long()  # no text but the first of these has the token that stands for padding
        half = tokens // 2 | 1  # odd, as some models look at blocks of tokens
        ending, other = ids.clone(), ids.clone()
        other[:, half:] = padding.stands
        if padding.stands not in padding.ids:  # else it ends no text
            ending[:, half - 1] = padding.stands
        for each, length in ((ending, half), (ids, half), (ids, 2)):
            padded = each.clone()
            padded[:, length:] = padding.ids[0]
            if not alike(text(padded), text(each[:, :length])):
                raise InvalidModel(
                    f"{folder}: padding changes what {kind} makes of a text, so short ones cannot be filled"
                )
        if is_next and not alike(text(ids), text(other), half):
            raise InvalidModel(
                f"{folder}: {kind} looks at tokens that follow, so it has seen what it is to tell; causal-lm needs a "
                "decoder"
            )
    for name, weight in text.model.named_parameters():
        if weight._version != versions[name]:
            raise InvalidModel(f"{folder}: {kind} changes its weight {name} when it runs, so it is not the folder's")


def alike(a: Tensor, b: Tensor, places: int | None = None) -> bool:
    """Whether outputs are the same but for rounding, of tokens at those places that both have, or at the first ones."""
    if a.ndim == 3:
        a, b = (one[:, : places or min(a.shape[1], b.shape[1])] for one in (a, b))
    return not (a - b).abs().amax() > SAME_LOGITS * a.abs().amax()  # weights that are no numbers are found elsewhere
