"""A folder of a pretrained model as a ModelSpec: frozen, with its task and what is trained.

The folder is what `save_pretrained` of `transformers` writes: `config.json` and safetensors, in one file or in shards.
Its own Python code, if any, is not run.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import UNSET
from torch import Tensor, nn

from export.errors import InvalidModel, quiet, reason
from export.huggingface import modules, weights
from export.huggingface.weights import check_folder, check_given
from export.model import ModelSpec, PerExample, accuracy, cross_entropy
from export.tasks import cross_entropy_of_labels, f1_of_labels, labels_right, mean_where, of_tokens
from export.weights import ADAPTED_FORMS, BITS, EXACT, FORMS, DenseInFewBits, in_few_bits, lora, matching
from fedcore.plan import IGNORED, BlobRef, Field, Tokenizer
from fedcore.validation import offered

TOKENS, LABEL, ANCHOR, POSITIVE = "tokens", "label", "anchor", "positive"
"""Fields of an example: tokens that the app makes; classes; and two texts that belong together."""
SCALE = 20.0
"""Of cosines, so that their softmax is sharp enough, as sentence-transformers has it."""
NEARLY, FAR = 1e-5, 1e4
"""How much further away a cosine must be, to be another; and what no score comes near."""


class Terms(NamedTuple):
    """The parts of a ModelSpec that depend on the task."""

    inputs: tuple[Field, ...]
    label: Field
    loss: PerExample
    metrics: Mapping[str, PerExample]
    compares: bool = False
    predicts: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its class in `transformers` and its name in `peft`; whether a head is trained as a whole.

    terms: of a text's field, the number of classes and what fills the text.
    """

    kind: str
    peft: str
    has_head: bool
    terms: Callable[[Field, int, modules.Padding], Terms]


def _classes(text: Field, classes: int, padding: modules.Padding) -> Terms:
    return Terms((text,), Field(LABEL, "int64", (), classes), cross_entropy, {"accuracy": accuracy})


def _several_labels(text: Field, classes: int, padding: modules.Padding) -> Terms:
    label = Field(LABEL, "int64", (classes,), 2, ignored=IGNORED)
    figures = {"accuracy": labels_right, "f1": f1_of_labels}
    return Terms((text,), label, cross_entropy_of_labels, figures)


def _classes_of_tokens(text: Field, classes: int, padding: modules.Padding) -> Terms:
    """Labels belong to tokens, so the app makes these."""
    label = Field(LABEL, "int64", text.shape, classes, ignored=IGNORED)
    loss, right = of_tokens(IGNORED)
    return Terms((msgspec.structs.replace(text, name=TOKENS, tokenizer=UNSET),), label, loss, {"accuracy": right})


def _next_tokens(text: Field, classes: int, padding: modules.Padding) -> Terms:
    """The label is the text, of which every token but the first is to be told from those before it."""

    def against(logits: Tensor | modules.DeferredLogits, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every place (B, T): whether a token follows, its cross-entropy, and whether it is the likeliest."""
        follows = torch.cat((padding.real_of(tokens)[:, 1:], torch.zeros_like(tokens[:, :1])), 1)
        following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1) * follows
        if isinstance(logits, modules.DeferredLogits):
            return follows, *logits.against(following)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        return follows, each.reshape(tokens.shape), logits.argmax(-1) == following

    def loss(logits: Tensor | modules.DeferredLogits, tokens: Tensor) -> Tensor:
        follows, entropy, _ = against(logits, tokens)
        return mean_where(follows, entropy)

    def right(logits: Tensor | modules.DeferredLogits, tokens: Tensor) -> Tensor:
        follows, _, likeliest = against(logits, tokens)
        return mean_where(follows, likeliest)

    return Terms((text,), text, loss, {"accuracy": right})


def _pairs(text: Field, classes: int, padding: modules.Padding) -> Terms:
    """Each text's partner among those of the batch (Henderson et al. 2017, arXiv:1705.00652, equation 5)."""
    first, second = (msgspec.structs.replace(text, name=name) for name in (ANCHOR, POSITIVE))

    def scores(vectors: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines (B,) of partners, and (B, B) of all texts with all partners, very low for those of padding."""
        anchor, positive = vectors
        return (anchor * positive).sum(1), anchor @ positive.T + (mask - 1) * FAR

    def loss(vectors: tuple[Tensor, Tensor], _: Tensor, mask: Tensor) -> Tensor:
        own, every = scores(vectors, mask)
        return (SCALE * every).logsumexp(1) - SCALE * own

    def found(vectors: tuple[Tensor, Tensor], _: Tensor, mask: Tensor) -> Tensor:
        own, every = scores(vectors, mask)
        return (every.amax(1) <= own + NEARLY).to(own.dtype)

    return Terms((first, second), second, loss, {"accuracy": found}, compares=True, predicts=1)


TASKS: dict[str, Task] = {
    "classification": Task("AutoModelForSequenceClassification", "SEQ_CLS", True, _classes),
    "multi-label": Task("AutoModelForSequenceClassification", "SEQ_CLS", True, _several_labels),
    "token-classification": Task("AutoModelForTokenClassification", "TOKEN_CLS", True, _classes_of_tokens),
    "causal-lm": Task("AutoModelForCausalLM", "CAUSAL_LM", False, _next_tokens),
    "embedding": Task("AutoModel", "FEATURE_EXTRACTION", False, _pairs),
}


TEXT = "text"
"""The field of an example where the folder has a tokenizer. Some tasks have others."""
QUERIES = {"query", "q_proj", "q_lin", "query_proj", "q"}
VALUES = {"value", "v_proj", "v_lin", "value_proj", "v"}
ATTENTION = QUERIES | VALUES | {"Wqkv", "qkv_proj", "c_attn", "in_proj"}
"""The names of the layers that get adapters: projections to queries and values, by architecture."""
PROBLEMS = {"classification": "single_label_classification", "multi-label": "multi_label_classification"}
"""What `transformers` calls some tasks in a config.json, where a folder may still say another."""
FOLDER = "hf:"
INSTALL = "pip install 'muster-fl[huggingface]'"


@dataclass(frozen=True, slots=True)
class Pretrained:
    """How a folder becomes a model.

    task: classification of a text in one of `classes`, multi-label in any of them, or token-classification of each
    token; causal-lm, the next token at every place; or embedding, a vector near those of texts that belong to it.
    rank: of the adapters; with 0 a classifier trains its head alone. tokens: the length of a text; shorter ones are
    padded. layers: names of the adapted layers, by default those of attention. freeze_a: train B alone, so that
    averaging adapters averages their products (FFA-LoRA, Sun et al. 2024). bits: of frozen weights, 32, 8 or 4.
    """

    folder: str
    task: str = "classification"
    classes: int = 2
    rank: int = 8
    tokens: int = 64
    layers: tuple[str, ...] = ()
    freeze_a: bool = False
    bits: int = EXACT

    @classmethod
    def parse(cls, source: str) -> Pretrained:
        """From `hf:FOLDER,task=causal-lm,rank=8,…`. Raises InvalidModel, naming what is wrong."""
        folder, *settings = source.removeprefix(FOLDER).split(",")
        values: dict[str, Any] = {}
        kinds: dict[str, Callable[[str], Any]] = {
            "task": str,
            "classes": int,
            "rank": int,
            "tokens": int,
            "layers": _names,
            "freeze_a": _truth,
            "bits": int,
        }
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in kinds:
                raise InvalidModel(f"{source}: a pretrained model has no setting {name!r}; {offered(name, kinds)}")
            if name in values:
                raise InvalidModel(f"{source}: {name} is there twice; remove one")
            try:
                values[name] = kinds[name](text)
            except ValueError as error:
                raise InvalidModel(f"{source}: {name} cannot be {text!r}") from error
        return cls._of(folder, values)

    @classmethod
    def _of(cls, folder: str, values: Mapping[str, Any]) -> Pretrained:
        """Raises InvalidModel, also for classes of a task without."""
        made = cls(folder, **values)
        if "classes" in values and not made.kind.has_head:
            raise InvalidModel(f"{folder}: {made.task} has no classes; leave them out, or name another task")
        return made

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidModel(f"{self.folder}: no task is called {self.task!r}; {offered(self.task, TASKS)}")
        rank = 0 if self.kind.has_head else 1
        for name, least in {"classes": 2, "rank": rank, "tokens": 2}.items():
            if getattr(self, name) < least:
                raise InvalidModel(f"{self.folder}: {name} is {getattr(self, name)}; the least is {least}")
        if not self.rank and (self.layers or self.freeze_a):
            raise InvalidModel(f"{self.folder}: rank is 0, so there are no adapters for layers and freeze_a")
        if self.bits not in (EXACT, *BITS):
            raise InvalidModel(f"{self.folder}: weights in {self.bits} bits; there are {EXACT}, 8 and 4")

    @property
    def kind(self) -> Task:
        """What the task is."""
        return TASKS[self.task]


def load(folder: str | Path, **settings: Any) -> ModelSpec:
    """The model in a folder; settings: those of `Pretrained`. Raises InvalidModel, naming what is missing."""
    return spec_of(Pretrained._of(str(folder), settings))


def spec_of(pretrained: Pretrained) -> ModelSpec:
    """The model as a ModelSpec. Raises InvalidModel."""
    config = config_of(pretrained)
    vocabulary = int(config.vocab_size)
    _check_length(pretrained, getattr(config, "max_position_embeddings", None))
    found = weights.read(Path(pretrained.folder), vocabulary, pretrained.tokens)
    by_apps = found is None or (
        pretrained.task == "token-classification" and weights.is_special(found.data, config.pad_token_id)
    )
    by_apps = by_apps and not weights.is_unknown(Path(pretrained.folder), found, config.pad_token_id)
    padding = padding_of(config, by_apps)
    text, tokenizers = Field(TOKENS, "int32", (pretrained.tokens,), vocabulary + 1), tuple[bytes, ...]()
    if found is not None:
        given = Tokenizer(BlobRef.of(found.data), padding.ids[0], found.trial)
        text = msgspec.structs.replace(text, name=TEXT, tokenizer=given)
        tokenizers = (found.data,)
    make, exact = (
        functools.partial(build, replace(pretrained, bits=bits), padding) for bits in (pretrained.bits, EXACT)
    )
    name = "".join(letter if letter.isalnum() else "_" for letter in str(config.model_type))
    terms = pretrained.kind.terms(text, pretrained.classes, padding)
    if all(item.tokenizer is UNSET for item in terms.inputs):
        tokenizers = ()
    return ModelSpec(name, make, **terms._asdict(), exact=exact, tokenizers=tokenizers)


def padding_of(config: Any, by_apps: bool = False) -> modules.Padding:
    """What fills short texts: the number after the vocabulary's last, as every token may be one of a text.

    Apps that make tokens may fill texts with the folder's own token of padding, too, unless it has another use.
    """
    own, size = config.pad_token_id, int(config.vocab_size)
    used = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep")]
    is_used = any(own in one if isinstance(one, list) else own == one for one in used)
    return modules.Padding((size, own) if by_apps and own is not None and not is_used else (size,), own or 0)


def build(pretrained: Pretrained, padding: modules.Padding) -> nn.Module:
    """The frozen module with adapters, and a head of its own for classes. Raises InvalidModel."""
    with torch.device("cpu"):  # also where sizes alone are asked for: it is tried with values
        return _built(pretrained, padding)


def _built(pretrained: Pretrained, padding: modules.Padding) -> nn.Module:
    model, drawn = _loaded(pretrained)
    for path, layer in model.named_modules():
        # RoBERTa and its kin number tokens from the place after that of padding.
        if path.endswith(".position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            _check_length(pretrained, layer.weight.shape[0] - layer.padding_idx - 1)
    modules.with_gated_layers(model)
    inside, text = f"model.{model.base_model_prefix}.", modules.Text(model, padding)
    if pretrained.task == "embedding":
        inside, text = "model.", modules.Sentences(model, padding, modules.pooling_of(Path(pretrained.folder)))
    elif "SequenceClassification" in pretrained.kind.kind and hasattr(model, "score"):
        text = modules.LastToken(model, padding)
    _check_masks(pretrained, text)
    adapted = _adapted(pretrained, text, inside) if pretrained.rank else ()
    names = [name for name, _ in text.named_parameters()]
    head = [name for name in names if not name.startswith(inside) or name.removeprefix("model.") in drawn]
    train = head if pretrained.kind.has_head else ()
    if pretrained.bits != EXACT:
        in_few_bits(text, pretrained.bits, lambda path: f"{path}.weight" not in train)
    text = lora(text, pretrained.rank or 1, adapted, train, freeze_a=pretrained.freeze_a)
    text.without_logits = pretrained.task == "causal-lm" and _are_plain_products(text.model, pretrained.tokens)
    return text


def _check_masks(pretrained: Pretrained, text: modules.Text) -> None:
    try:
        modules.check_masks(pretrained.folder, text, pretrained.tokens, pretrained.task == "causal-lm")
    except InvalidModel:
        raise
    except Exception as error:  # whatever the library raises for want of images, sounds or places on a page
        what = f"{type(text.model).__name__} does not run on {pretrained.tokens} tokens alone"
        raise InvalidModel(f"{pretrained.folder}: {what}: {reason(error)}") from error


def _check_length(pretrained: Pretrained, longest: int | None) -> None:
    if longest is not None and 0 < longest < pretrained.tokens:  # XLNet's is -1, as it has no table of positions
        raise InvalidModel(f"{pretrained.folder} reads {longest} tokens at most, not {pretrained.tokens}")


def _adapted(pretrained: Pretrained, text: modules.Text, inside: str) -> Sequence[str]:
    """The layers that get adapters, of those on which outputs depend. Raises InvalidModel."""
    layers = {path: layer for path, layer in text.named_modules() if type(layer) in _forms()}
    names, kind = sorted({path.rpartition(".")[2] for path in layers}), type(text.model).__name__
    chosen = pretrained.layers or [name for name in names if name in ATTENTION]
    if not chosen:
        raise InvalidModel(
            f"{pretrained.folder}: no layer of {kind} is known to be one of attention; name some of "
            f"{', '.join(names)} by layers"
        )
    found = [matching("layer that can be adapted", [f"{inside}*.{name}"], layers) for name in chosen]
    used = modules.used(text, {path: layers[path] for paths in found for path in paths}, pretrained.tokens)
    for name, paths in zip(chosen, found, strict=True):
        if not used.intersection(paths):
            raise InvalidModel(
                f"{pretrained.folder}: nothing that {kind} gives depends on its layers {name}, so adapters there would "
                "learn nothing; name others by layers"
            )
    return sorted(used)


def _are_plain_products(model: Any, tokens: int) -> bool:
    """Whether logits are those of a frozen last layer in few bits, and nothing is done to them."""
    last = model.get_output_embeddings()
    if not isinstance(last, DenseInFewBits) or last.bias is not None:
        return False
    ids = torch.arange(min(model.config.vocab_size, tokens, 16))[None]  # the token of padding alone has logits of 0
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return torch.equal(model(**given).logits, last(model.base_model(**given).last_hidden_state))


def unadapted(pretrained: Pretrained) -> Any:
    """The model of `transformers`, in float32, as it is in the folder. Raises InvalidModel."""
    return _loaded(pretrained)[0]


def _loaded(pretrained: Pretrained) -> tuple[Any, frozenset[str]]:
    """The model, and the names of those tensors of its head that were drawn."""
    transformers, config = _transformers(), config_of(pretrained)
    config.use_cache = False
    if pretrained.kind.has_head:
        config.num_labels = pretrained.classes
    config.problem_type = PROBLEMS.get(pretrained.task)
    try:
        with quiet("torchao"), quiet("torch.utils._pytree"):
            model, report = getattr(transformers, pretrained.kind.kind).from_pretrained(
                pretrained.folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # for a head of other classes; the report has them all
                output_loading_info=True,
            )
    except Exception as error:  # whatever the library raises for what it finds
        raise InvalidModel(f"{pretrained.folder} has no weights for {pretrained.task}: {reason(error)}") from error
    drawn = check_given(pretrained.folder, model, report, pretrained.kind.has_head)
    if drawn and not pretrained.kind.has_head:
        model.pooler = None  # which nothing asks for
    return model, drawn


def config_of(pretrained: Pretrained) -> Any:
    """What a folder's config.json says. Raises InvalidModel."""
    if not (Path(pretrained.folder) / "config.json").is_file():
        raise InvalidModel(
            f"{pretrained.folder} has no config.json; give the folder of a model of Hugging Face's transformers, as "
            "save_pretrained writes it"
        )
    try:
        config = _transformers().AutoConfig.from_pretrained(
            pretrained.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library raises for what it finds
        raise InvalidModel(f"{pretrained.folder} is of no architecture that is known here: {reason(error)}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InvalidModel(
            f"{pretrained.folder} is a {config.model_type}, which reads no tokens; only models of text do"
        )
    check_folder(pretrained.folder, config)
    if not isinstance(own := getattr(config, "pad_token_id", None), int) or not 0 <= own < config.vocab_size:
        config.pad_token_id = None
    return config


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a folder is given, and nothing else is looked up
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # bars in notebooks, which nothing here shows
            import transformers
    except ImportError as error:
        raise InvalidModel(f"a pretrained model needs Hugging Face's transformers: {INSTALL}") from error
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _forms()
    return transformers


@functools.cache
def _forms() -> Mapping[type[nn.Module], Any]:
    """The kinds of layers that can be adapted, with GPT-2's own."""
    from transformers.pytorch_utils import Conv1D

    FORMS[Conv1D] = DenseInFewBits
    ADAPTED_FORMS[Conv1D] = lambda layer, rank: (
        nn.Linear(layer.nx, rank, bias=False),
        nn.Linear(rank, layer.nf, bias=False),
    )
    return ADAPTED_FORMS


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _truth(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))
