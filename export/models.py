"""Built-in models by name, of images, rows, characters, words and bytes, and models of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.errors import ExportError, InvalidModel, UnknownModel, reason
from export.huggingface.folder import FOLDER, Pretrained, spec_of
from export.model import ModelSpec
from export.tasks import classifier, image_axes, next_token
from fedcore.plan import Field
from fedcore.validation import import_own, offered

# Built-in models of images and of rows of numbers.


def logreg(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = (inputs + 1) · classes; 650 for the 8×8 digits of the default. `x` is float32 of `shape`, `y` the class."""
    return classifier(
        "logreg", lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes)), shape, classes
    )


# A network with one hidden layer; by default 43-64-6, for recognising activities from phone accelerometers.
#
# The activation is smooth on purpose: docs/decisions/0009-smooth-reference-models.md.


def mlp(shape: tuple[int, ...] = (43,), classes: int = 6, hidden: int = 64) -> ModelSpec:
    """D = 3,206 by default. `x` is float32 of `shape`, flattened; `y` the class."""
    return classifier(
        "mlp",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.SiLU(), nn.Linear(hidden, classes)),
        shape,
        classes,
    )


# Least squares: one linear output without bias, and half the squared error.
#
# With the examples of `simulator/datasets/partitions.py` a client's loss is exactly a quadratic of its choice.


def half_squared_error(outputs: Tensor, label: Tensor) -> Tensor:
    """½ (output − label)², per example (B,), of outputs and labels (B,)."""
    return (outputs - label) ** 2 / 2


def least_squares(shape: tuple[int, ...] = (16,)) -> ModelSpec:
    """D = 16 by default, the size of an example. `x` is float32 of `shape`, flattened; `y` is a float32 number."""
    return ModelSpec(
        name="least_squares",
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 1, bias=False), nn.Flatten(0)),
        loss=half_squared_error,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "float32"),
    )


# A small convolutional network for handwritten digits: convolution, max-pool, convolution, dense.
#
# Smooth activations and one early max-pool on purpose: docs/decisions/0009-smooth-reference-models.md.


def digits_cnn(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = 3,818 for 8×8 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("digits_cnn", shape)
    return classifier(
        "digits_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16 * (height // 2) * (width // 2), classes),
        ),
        shape,
        classes,
    )


# The convolutional network of the federated EMNIST studies.
#
# Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 5.


def emnist_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> ModelSpec:
    """D = 1,206,590 for 28×28 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("emnist_cnn", shape)
    return classifier(
        "emnist_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        ),
        shape,
        classes,
    )


# A convolutional network for handwritten characters of many classes: three strided convolutions and a dense layer.
#
# Smooth activations, and strides instead of max-pools, on purpose: docs/decisions/0009-smooth-reference-models.md.
# Without the group normalisation (Wu, He 2018) training makes no progress for a hundred rounds.


def omniglot_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 136) -> ModelSpec:
    """D = 162,920 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("omniglot_cnn", shape)
    return classifier(
        "omniglot_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(64 * -(-height // 8) * -(-width // 8), classes),
        ),
        shape,
        classes,
    )


MOBILE_GROUPS = 8
# expansion, channels, blocks, stride of the first block
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# MobileNetV2 with group normalisation, for small images: the strides of its first stages are 1.
#
# Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018, Table 2.

HEAD = 1280


def _convolution(inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.GroupNorm(MOBILE_GROUPS, outside),
    ]


class _InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; the input is added where the shape allows."""

    def __init__(self, inside: int, outside: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inside * expansion
        expand = [*_convolution(inside, hidden), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*_convolution(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.body = nn.Sequential(*expand, *depthwise, *_convolution(hidden, outside))
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.body(x)
        return x + after if self.residual else after


def _mobilenet(channels: int, classes: int) -> nn.Module:
    inside = 32
    layers = [*_convolution(channels, inside, 3), nn.ReLU6()]
    for expansion, outside, blocks, stride in MOBILE_STAGES:
        for index in range(blocks):
            layers.append(_InvertedResidual(inside, outside, expansion, stride if index == 0 else 1))
            inside = outside
    layers += [*_convolution(inside, HEAD), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(HEAD, classes))


def mobilenetv2_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 2,351,972 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("mobilenetv2_gn", shape)
    return classifier("mobilenetv2_gn", lambda: _mobilenet(channels, classes), shape, classes)


RESIDUAL_GROUPS = 2
RESIDUAL_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


class _Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(RESIDUAL_GROUPS, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(RESIDUAL_GROUPS, outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut.append(nn.Conv2d(inside, outside, 1, stride, bias=False))
            self.shortcut.append(nn.GroupNorm(RESIDUAL_GROUPS, outside))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def _resnet(channels: int, classes: int) -> nn.Module:
    inside = RESIDUAL_STAGES[0][0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, inside, 3, padding=1, bias=False),
        nn.GroupNorm(RESIDUAL_GROUPS, inside),
        nn.ReLU(),
    ]
    for outside, stride in RESIDUAL_STAGES:
        layers += [_Residual(inside, outside, stride), _Residual(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


# ResNet-18 with group normalisation, for small images.
#
# He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016; group normalisation with two groups as
# in Hsieh, Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine learning", ICML 2020, and
# 24×24 crops of CIFAR-100 as in Reddi et al., "Adaptive federated optimization", ICLR 2021.


def resnet18_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 11,220,132 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("resnet18_gn", shape)
    return classifier("resnet18_gn", lambda: _resnet(channels, classes), shape, classes)


# Built-in models of characters, words and bytes.
#
# McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
# data", AISTATS 2017; sizes as in Reddi et al., "Adaptive federated optimization", ICLR 2021, Table 9 (Shakespeare).


CHARACTER_EMBEDDING, CHARACTER_HIDDEN, CHARACTER_LAYERS = 8, 256, 2


class CharLstm(nn.Module):
    """The network, with other sizes of its LSTM layers on demand."""

    def __init__(self, vocabulary: int, hidden: int = CHARACTER_HIDDEN, layers: int = CHARACTER_LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, CHARACTER_EMBEDDING)
        self.lstm = nn.LSTM(CHARACTER_EMBEDDING, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(hidden)
        return logits


def char_lstm(shape: tuple[int, ...] = (80,), classes: int = 90) -> ModelSpec:
    """D = 822,570 by default. `x` and `y` are int64 (length,): characters, and the ones that follow; 0 is padding."""
    return next_token("char_lstm", lambda: CharLstm(classes), shape, classes)


WORD_EMBEDDING, WORD_HIDDEN = 96, 670


# Next-word prediction: an embedding of 96, one LSTM layer of 670, a projection to 96, a dense layer at every word.
#
# Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 10
# (Stack Overflow).


class _WordLstm(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WORD_EMBEDDING)
        self.lstm = nn.LSTM(WORD_EMBEDDING, WORD_HIDDEN, batch_first=True)
        self.projection = nn.Linear(WORD_HIDDEN, WORD_EMBEDDING)
        self.dense = nn.Linear(WORD_EMBEDDING, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(self.projection(hidden))
        return logits


def word_lstm(shape: tuple[int, ...] = (20,), classes: int = 10_004) -> ModelSpec:
    """D = 4,053,428 by default. `x` and `y` are int64 (length,): words, and the ones that follow; 0 is padding."""
    return next_token("word_lstm", lambda: _WordLstm(classes), shape, classes)


# A small causal transformer over bytes: three pre-norm blocks of width 128 with four heads.
#
# Vaswani et al., "Attention is all you need", NeurIPS 2017; normalisation before each part as in Radford et al.,
# "Language models are unsupervised multitask learners", 2019.

WIDTH, HEADS, LAYERS = 128, 4, 3


class _Block(nn.Module):
    """Causal self-attention and a two-layer network, each on a normalised copy that is added back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.dense_norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        after: Tensor = x + self.dense(self.dense_norm(x))
        return after


class _Transformer(nn.Module):
    def __init__(self, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


def transformer(shape: tuple[int, ...] = (32,), classes: int = 256) -> ModelSpec:
    """D = 664,960 by default. `x` and `y` are int64 (length,): bytes, and the ones that follow; 0 is padding."""
    return next_token("transformer", lambda: _Transformer(shape[0], classes), shape, classes)


# Built-in models by name, and models of the user's own as `package.module:function`, or as `file.py:function`.


MODELS: dict[str, Callable[..., ModelSpec]] = {
    make.__name__: make
    for make in (
        *(least_squares, logreg, mlp, digits_cnn, emnist_cnn, omniglot_cnn),
        *(resnet18_gn, mobilenetv2_gn, char_lstm, word_lstm, transformer),
    )
}


def check_name(name: str) -> None:
    """Raise UnknownModel unless a name is that of a built-in model, or has the form `package.module:function`."""
    if name not in MODELS and ":" not in name:
        raise UnknownModel(
            f"no model is called {name!r}; {offered(name, MODELS)}, or give your own as package.module:function or "
            "file.py:function, or a pretrained one as hf:FOLDER"
        )


def load(name: str, shape: tuple[int, ...] | None = None, classes: int | None = None) -> ModelSpec:
    """A built-in model, sized for `shape` and `classes` when given, a pretrained one as `hf:FOLDER`, or what one's own
    function returns.

    Modules are looked up in the working folder too. Raises UnknownModel or InvalidModel.
    """
    check_name(name)
    if name in MODELS:
        sizes = {key: value for key, value in (("shape", shape), ("classes", classes)) if value is not None}
        return MODELS[name](**sizes)
    if name.startswith(FOLDER):
        return spec_of(Pretrained.parse(name))
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise UnknownModel(f"cannot import {name!r}: {reason(error)}") from error
    try:
        spec = make()
    except ExportError:
        raise
    except Exception as error:
        raise InvalidModel(f"{name} fails with {reason(error)}") from error
    if not isinstance(spec, ModelSpec):
        raise InvalidModel(f"{name} returned {type(spec).__name__}, expected export.model.ModelSpec")
    return spec
