"""What docs/models.md says can be exported trains as in torch: a model for every entry of its table, both formats."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from device_runtime.backends import BACKENDS, FORMATS
from export.build import build_plan
from export.model import Model
from export.trial import TOLERANCE, Trial
from fedcore.algorithms import create
from fedcore.plan import Field
from tests.export.models import TOKENS, Y, spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)


def layers(*makers):
    """A model of these layers with a dense one on top; its input is (2, 9, 7)."""

    def make():
        model = nn.Sequential(*(maker() for maker in makers), nn.Flatten(), nn.LazyLinear(5))
        model(torch.zeros(2, 2, 9, 7))
        return model

    return spec(make)


class Between(nn.Module):
    """A function of twelve hidden values."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(126, 12), nn.LazyLinear(5)
        self.function = function
        self(torch.zeros(2, 2, 9, 7))

    def forward(self, x):
        return self.last(self.function(self.first(x.flatten(1)).tanh()).flatten(1))


def function(between):
    return spec(lambda: Between(between))


class Sequence(nn.Module):
    """A function of a module and four embedded tokens."""

    def __init__(self, inner, function):
        super().__init__()
        self.embedding, self.inner, self.last = nn.Embedding(11, 8), inner, nn.LazyLinear(5)
        self.register_buffer("mask", CAUSAL.clone())
        self.function = function
        self(torch.zeros(2, 4, dtype=torch.int64))

    def forward(self, tokens):
        return self.last(self.function(self, self.embedding(tokens)).flatten(1))


def sequence(inner, function=lambda model, x: model.inner(x)[0]):
    return spec(lambda: Sequence(inner(), function), inputs=(TOKENS,))


class Hourglass(nn.Module):
    """A U-Net of one level, whose upsampling repeats values."""

    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 3, padding=1)
        self.up, self.last = nn.Conv2d(7, 3, 3, padding=1), nn.Linear(144, 5)

    def forward(self, x):
        fine = self.down(x).tanh()
        coarse = self.inner(functional.max_pool2d(fine, 2)).tanh()
        repeated = coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return self.last(self.up(torch.cat([fine, repeated], 1)).tanh().flatten(1))


def loss(function, label=None):
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), function, label=label or Y)


def attention(**options):
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


def encoder(layers=1):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)


def in_place(x):
    return functional.silu((x * 2).add_(1), inplace=True).mul_(x)


def assigned(x):
    made = x.new_zeros(x.shape)
    made[:, 2:5] = x[:, 5:8] * 2
    made[:, ::3] = x[:, ::3]
    made[:, -1] += 1
    return made


def looped(x):
    for _ in range(3):
        x = (x * 1.5).tanh()
    return x


def looked_up():
    """An EmbeddingBag of every mode, with and without padding, and an LSTM with a projection."""
    modes = (("sum", 0), ("mean", None), ("mean", 2), ("max", None))
    bags = nn.ModuleList(nn.EmbeddingBag(11, 3, mode=mode, padding_idx=padding) for mode, padding in modes)
    return nn.ModuleList([bags, nn.LSTM(8, 4, proj_size=3, batch_first=True)])


def sampled(x):
    """The hidden values of a variational encoder."""
    return x[:, :6] + x[:, 6:].exp() * torch.randn_like(x[:, 6:]) + torch.rand_like(x[:, :6])


def placed(x):
    by_numbers = x[:, [3, 1, -2, 3]] * x.index_select(1, torch.tensor([0, 2, 4, 11]))
    table = x.unflatten(1, (3, 4))
    by_tensors = table[torch.arange(x.shape[0]), x[:, :3].argmax(1)]
    apart = x.unflatten(1, (3, 2, 2))[:, [0, 2], :, [1, -1]].transpose(0, 1).flatten(1)
    written = x.index_copy(1, torch.tensor([1, 4]), x[:, :2] * 2)[:, :4]
    return by_numbers * table[:, [0, 2, 2, 1], [1, -1, 0, 0]] + by_tensors * apart * written


def counted(x):
    even = torch.arange(2, 26, 2) / 10 + torch.arange(12, 0, -1)
    first = (torch.arange(0, x.shape[0] * 2, 2) >= 0).unsqueeze(1)
    largest = x.topk(3, 1).values * x.gather(1, x.topk(3, 1, largest=False).indices)
    return x.cumsum(1) * even * first + x * (x > 0).cumsum(1) + largest.repeat(1, 4)


def rounded(x):
    return x + ((x * 8).round() / 8 - x).detach() + (x * 0.5).acos() + (x * 0.5).asin() * x.atan()


def own_loss(outputs, label):
    return functional.relu(1 - outputs[:, 0] * (label - 2).sign()) + outputs.logsumexp(-1)


class Beside(nn.Module):
    """Layers side by side, which all have the same hidden values as their input."""

    def __init__(self, *layers):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(126, 8), nn.ModuleList(layers), nn.LazyLinear(5)
        self(torch.zeros(2, 2, 9, 7))

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.last(torch.cat([layer(hidden) for layer in self.layers], 1))


# Models for several entries each, because every one takes a second.
IMAGES = layers(
    lambda: nn.ConvTranspose2d(2, 4, (3, 2), stride=2, padding=1, output_padding=1, groups=2, dilation=(1, 2)),
    lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"),
    lambda: nn.Upsample(size=(17, 12)),
    lambda: nn.AdaptiveAvgPool2d((5, 3)),
    lambda: nn.AdaptiveMaxPool2d((3, 2)),
)
LOOKED_UP = sequence(
    looked_up, lambda m, x: torch.cat([*(bag((x > 0).sum(-1)) for bag in m.inner[0]), m.inner[1](x)[0][:, -1]], 1)
)
NORMED = layers(
    lambda: weight_norm(nn.Conv2d(2, 3, 3), dim=1),
    lambda: nn.BatchNorm2d(3).eval(),
    nn.Flatten,
    lambda: weight_norm(nn.Linear(105, 6)),
)
COMPUTED = function(lambda x: torch.cat([sampled(x), placed(x), counted(x), rounded(x)], 1))
ACTIVATIONS = {
    name: getattr(nn, name)
    for name in [
        *("ReLU", "LeakyReLU", "PReLU", "ReLU6", "Hardtanh", "ELU", "SELU", "GELU", "SiLU"),
        *("Mish", "Hardswish", "Softplus", "Softsign", "GLU"),
    ]
} | {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softmax": lambda: nn.Softmax(-1)}
ACTIVATED = spec(lambda: Beside(*(make() for make in ACTIVATIONS.values())))
OPERATORS = {
    "arithmetic": [lambda x: (x * 2 - x**3) / (x.exp() + 1) + (x.abs() + 1).log()],
    "comparisons": [lambda x: x * (x > 0.1) * ((x <= 0.9) & (x != 0.2)).any(1, keepdim=True)],
    "where": [lambda x: torch.where(x > 0, x * 2, 0.1)],
    "sums": [lambda x: x - x.unflatten(1, (3, 4)).sum(1).repeat(1, 3)],
    "means": [lambda x: x - x.mean(1, keepdim=True)],
    "variances": [lambda x: x / x.std(1, keepdim=True) + x.var(1, keepdim=True)],
    "norms": [functional.normalize],
    "maxima": [
        lambda x: x.unflatten(1, (3, 4)).max(-1).values + x.amax(1, keepdim=True),
        lambda x: x * x.max(1, keepdim=True).indices - x.max(),
    ],
    "minima": [
        lambda x: x.unflatten(1, (3, 4)).min(1).values + x.amin(1, keepdim=True),
        lambda x: x * x.min(1, keepdim=True).indices - x.min(1, keepdim=True).values,
    ],
    "slices": [lambda x: x[:, 1::2] * x[:, -7:-1]],
    "concatenation": [lambda x: torch.cat([x, x * 2], 1)],
    "gather": [lambda x: x.gather(1, x.argmax(1, keepdim=True))],
    "scatter": [lambda x: x.scatter(1, x.argmax(1, keepdim=True), 0.5)],
    "flips": [lambda x: x * x.flip(1)],
    "repeats": [lambda x: x.repeat(1, 2) * x.repeat_interleave(2, 1)],
    "one-hot codes": [lambda x: x * functional.one_hot(x.argmax(1), 12)],
    "operators that work in place": [in_place],
    "assignments to slices": [assigned],
}
OPERATED = function(lambda x: torch.cat([one(x) for some in OPERATORS.values() for one in some], 1))
SHARED = {
    "images": IMAGES,
    "looked up": LOOKED_UP,
    "normed": NORMED,
    "computed": COMPUTED,
    "activated": ACTIVATED,
    "operated": OPERATED,
}
PROMISES = {
    "layers": {
        "dense": [layers(nn.Flatten, lambda: nn.Linear(126, 8))],
        "convolutions in one to three dimensions": [
            layers(lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3, padding="same")),
            layers(lambda: nn.Conv2d(2, 3, 3, 2)),
            layers(lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 3, (2, 3, 3))),
        ],
        "grouped convolutions": [layers(lambda: nn.Conv2d(2, 4, 1), lambda: nn.Conv2d(4, 6, 3, groups=2))],
        "depthwise convolutions": [layers(lambda: nn.Conv2d(2, 4, 3, groups=2), nn.Tanh)],
        "transposed convolutions": [IMAGES],
        "LSTM in one or two directions": [
            sequence(lambda: nn.LSTM(8, 3, batch_first=True)),
            sequence(lambda: nn.LSTM(8, 3, batch_first=True, bidirectional=True)),
            sequence(lambda: nn.LSTMCell(8, 3), lambda model, x: model.inner(x[:, 0])[0]),
            LOOKED_UP,
        ],
        "GRU": [
            sequence(lambda: nn.GRU(8, 3, batch_first=True)),
            sequence(lambda: nn.GRUCell(8, 3), lambda model, x: model.inner(x[:, 0])),
        ],
        "RNN": [sequence(lambda: nn.RNN(8, 3, batch_first=True))],
        "scaled_dot_product_attention": [
            sequence(nn.Identity, lambda m, x: functional.scaled_dot_product_attention(x, x, x, ~m.mask))
        ],
        "MultiheadAttention": [
            sequence(attention, lambda m, x: m.inner(x, x, x, attn_mask=m.mask)[0]),
            sequence(attention, lambda m, x: m.inner(x, x, x, attn_mask=m.mask, need_weights=False)[0]),
        ],
        "TransformerEncoder": [
            sequence(encoder, lambda m, x: m.inner(x)),
            sequence(encoder, lambda m, x: m.inner(x, m.mask)),
            sequence(encoder, lambda m, x: m.inner(x, m.mask, is_causal=True)),
        ],
        "TransformerDecoder": [sequence(decoder, lambda m, x: m.inner(x, x * 2, m.mask))],
        "embeddings": [
            sequence(lambda: nn.Embedding(11, 3, padding_idx=2), lambda m, x: m.inner((x[..., 0] > 0).int() + 1))
        ],
        "embedding bags": [LOOKED_UP],
    },
    "normalisation": {
        "layer": [layers(nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.LayerNorm(8))],
        "group": [layers(lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4))],
        "instance": [
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.InstanceNorm2d(3, affine=True), nn.Tanh),
            layers(lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.InstanceNorm1d(3), nn.Tanh),
        ],
        "RMS": [layers(nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.RMSNorm(8))],
        "batch with frozen statistics": [NORMED],
        "weight": [NORMED],
    },
    "pooling": {
        "max-pooling in one and two dimensions": [
            layers(lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.MaxPool1d(2)),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.MaxPool2d(3, 2, 1)),
            layers(lambda: nn.Conv2d(2, 3, 2), lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.MaxPool2d(2, 3, 1, ceil_mode=True)),
        ],
        "average pooling": [
            layers(lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.AvgPool1d(2)),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.AvgPool2d((2, 3))),
            layers(lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 3, 2), lambda: nn.AvgPool3d((1, 2, 2))),
            IMAGES,
        ],
        "adaptive averages and maxima": [IMAGES],
        "upsampling": [IMAGES, spec(Hourglass)],
        "global averages": [
            layers(lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.AdaptiveAvgPool1d(1)),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.AdaptiveAvgPool2d(1)),
        ],
    },
    "activations": {key: [ACTIVATED] for key in ACTIVATIONS},
    "random": {
        "nn.Dropout": [layers(nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.Dropout(0.3))],
        "dropout between LSTM layers": [sequence(lambda: nn.LSTM(8, 3, 2, batch_first=True, dropout=0.3))],
        "randn_like and rand_like": [COMPUTED],
        "dropout on attention weights": [
            sequence(lambda: attention(dropout=0.3), lambda m, x: m.inner(x, x, x, need_weights=False)[0]),
            sequence(lambda: attention(dropout=0.3), lambda m, x: m.inner(x, x, x)[0]),
            sequence(
                lambda: nn.MultiheadAttention(8, 2, dropout=0.3),
                lambda m, x: m.inner(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[1] @ x,
            ),
        ],
    },
    "losses": {
        "cross-entropy": [
            loss(lambda out, y: functional.cross_entropy(out, y, reduction="none"), Field("y", kind, high=5))
            for kind in ("int64", "int32", "uint8")
        ]
        + [loss(lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.1, reduction="none"))],
        "binary cross-entropy with logits": [
            loss(
                lambda out, y: functional.binary_cross_entropy_with_logits(out[:, 0], y, reduction="none"),
                Field("y", "float32"),
            )
        ],
        "squared error": [loss(lambda out, y: functional.mse_loss(out[:, 0], y.float(), reduction="none"))],
        "absolute error": [loss(lambda out, y: functional.l1_loss(out[:, 0], y.float(), reduction="none"))],
        "Huber": [
            loss(lambda out, y: functional.huber_loss(out[:, 0], y.float(), reduction="none")),
            loss(lambda out, y: functional.smooth_l1_loss(out[:, 0], y.float(), reduction="none")),
        ],
        "Kullback-Leibler": [
            loss(
                lambda out, y: functional.kl_div(
                    out.log_softmax(-1), functional.one_hot(y, 5) * 0.8 + 0.04, reduction="none"
                ).sum(-1)
            )
        ],
        "what the operators below can say": [loss(own_loss, Field("y", "uint8", high=5))],
    },
    "operators": {
        **{key: [OPERATED] for key in OPERATORS},
        "padding and cropping": [
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d((1, 0, 2, 1)), nn.Tanh),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d((-1, 2, -2, 0)), nn.Tanh),
            layers(lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d(-1), nn.Tanh),
        ],
        "buffers": [sequence(nn.Identity, lambda m, x: x.masked_fill(m.mask[:, :1], 0.5))],
        "places by numbers and tensors": [COMPUTED],
        "ranges and cumulative sums": [COMPUTED],
        "topk": [COMPUTED],
        "rounding and inverse trigonometric functions": [COMPUTED],
        "Python loops of fixed length": [function(looped)],
    },
}
MODELS = [
    pytest.param(model, id=f"{item} {number}")
    for entries in PROMISES.values()
    for item, examples in entries.items()
    for number, model in enumerate(examples)
    if all(model is not shared for shared in SHARED.values())
] + [pytest.param(model, id=name) for name, model in SHARED.items()]


def test_the_table_of_the_document_has_an_example_for_every_entry():
    table = DOCUMENT.read_text().split("## What can be exported")[1].split("The ONNX writer")[0]
    found = {}
    for kind, entries in re.findall(r"^\| (\w+) \| (.+) \|$", table, re.MULTILINE):
        found[kind] = {entry.replace("`", "") for entry in entries.split(", ")}
    assert found == {kind: set(entries) for kind, entries in PROMISES.items()}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("example", MODELS)
def test_what_is_promised_trains_as_in_torch(example, form, executorch):
    model, algorithm = Model(example), create("fedavg", {"batch_size": 4})
    plan, graphs = build_plan(model, algorithm, (form,))
    work, backend = Trial.draw(model, algorithm), BACKENDS[FORMATS[form]]()
    found = work.exported(plan, {part: backend.load(graphs[ref], part) for part, ref in plan.graphs[form].items()})
    assert max(work.distances(found, work.reference()).values()) <= TOLERANCE
