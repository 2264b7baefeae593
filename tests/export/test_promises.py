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


class Branches(nn.Module):
    """Sequences of layers side by side, all of the same input, which is (2, 9, 7), with a dense layer on top."""

    def __init__(self, branches):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(make() for make in makers)) for makers in branches)
        self.last = nn.LazyLinear(5)
        self(torch.zeros(2, 2, 9, 7))

    def forward(self, x):
        return self.last(torch.cat([branch(x).flatten(1) for branch in self.branches], 1))


def branches(*makers):
    return spec(lambda: Branches(makers))


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


def cells(model, x):
    lstm, gru = model.inner
    return torch.cat([lstm(x[:, 0])[0], gru(x[:, 0])], 1)


def attended(model, x):
    first, second, embedding = model.inner
    plain = functional.scaled_dot_product_attention(x, x, x, ~model.mask)
    weighed = first(x, x, x, attn_mask=model.mask)[0]
    unweighed = second(x, x, x, attn_mask=model.mask, need_weights=False)[0]
    filled, found = x.masked_fill(model.mask[:, :1], 0.5), embedding((x[..., 0] > 0).int() + 1)
    return torch.cat([plain, weighed, unweighed, filled, found], -1)


def dropping():
    lstm = nn.LSTM(8, 3, 2, batch_first=True, dropout=0.3)
    along = nn.MultiheadAttention(8, 2, dropout=0.3)
    return nn.ModuleList([nn.Dropout(0.3), lstm, attention(dropout=0.3), attention(dropout=0.3), along])


def dropped(model, x):
    dropout, lstm, first, second, along = model.inner
    across = x.transpose(0, 1)
    weights = along(across, across, across)[1] @ x
    attended = [first(x, x, x, need_weights=False)[0], second(x, x, x)[0], weights]
    return torch.cat([dropout(x), lstm(x)[0], *attended], -1)


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


def cross_entropy(outputs, label):
    return functional.cross_entropy(outputs, label, reduction="none")


def losses(outputs, label):
    """The sum of those that take whole numbers, or numbers made of them."""
    first, number, likely = outputs[:, 0], label.float(), functional.one_hot(label, 5) * 0.8 + 0.04
    of_numbers = (functional.mse_loss, functional.l1_loss, functional.huber_loss, functional.smooth_l1_loss)
    smooth = functional.cross_entropy(outputs, label, label_smoothing=0.1, reduction="none")
    diverged = functional.kl_div(outputs.log_softmax(-1), likely, reduction="none").sum(-1)
    found = [cross_entropy(outputs, label), smooth, diverged]
    return sum(found + [one(first * place, number, reduction="none") for place, one in enumerate(of_numbers, 1)])


class Beside(nn.Module):
    """Layers side by side, which all have the same hidden values as their input."""

    def __init__(self, *layers):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(126, 8), nn.ModuleList(layers), nn.LazyLinear(5)
        self(torch.zeros(2, 2, 9, 7))

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.last(torch.cat([layer(hidden) for layer in self.layers], 1))


# Models for several entries each, because every one takes a second. Loops and attention gain nothing together.
CONVOLVED = branches(
    [nn.Flatten, lambda: nn.Linear(126, 8)],
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3, padding="same")],
    [lambda: nn.Conv2d(2, 3, 3, 2)],
    [lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 3, (2, 3, 3))],
    [lambda: nn.Conv2d(2, 4, 1), lambda: nn.Conv2d(4, 6, 3, groups=2)],
    [lambda: nn.Conv2d(2, 4, 3, groups=2), nn.Tanh],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d((1, 0, 2, 1)), nn.Tanh],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d((-1, 2, -2, 0)), nn.Tanh],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.ZeroPad2d(-1), nn.Tanh],
)
POOLED = branches(
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.MaxPool1d(2)],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.MaxPool2d(3, 2, 1)],
    [lambda: nn.Conv2d(2, 3, 2), lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True)],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.MaxPool2d(2, 3, 1, ceil_mode=True)],
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.AvgPool1d(2)],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.AvgPool2d((2, 3))],
    [lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 3, 2), lambda: nn.AvgPool3d((1, 2, 2))],
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.AdaptiveAvgPool1d(1)],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.AdaptiveAvgPool2d(1)],
)
IMAGES = branches(
    [
        lambda: nn.ConvTranspose2d(2, 4, (3, 2), stride=2, padding=1, output_padding=1, groups=2, dilation=(1, 2)),
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"),
        lambda: nn.Upsample(size=(17, 12)),
        lambda: nn.AdaptiveAvgPool2d((5, 3)),
        lambda: nn.AdaptiveMaxPool2d((3, 2)),
    ]
)
NORMED = branches(
    [
        lambda: weight_norm(nn.Conv2d(2, 3, 3), dim=1),
        lambda: nn.BatchNorm2d(3).eval(),
        nn.Flatten,
        lambda: weight_norm(nn.Linear(105, 6)),
    ],
    [nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.LayerNorm(8)],
    [nn.Flatten, lambda: nn.Linear(126, 8), lambda: nn.RMSNorm(8)],
    [lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4)],
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.InstanceNorm2d(3, affine=True), nn.Tanh],
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 3, 3), lambda: nn.InstanceNorm1d(3), nn.Tanh],
)
CELLS = sequence(lambda: nn.ModuleList([nn.LSTMCell(8, 3), nn.GRUCell(8, 3)]), cells)
LOOKED_UP = sequence(
    looked_up, lambda m, x: torch.cat([*(bag((x > 0).sum(-1)) for bag in m.inner[0]), m.inner[1](x)[0][:, -1]], 1)
)
ATTENDED = sequence(lambda: nn.ModuleList([attention(), attention(), nn.Embedding(11, 3, padding_idx=2)]), attended)
DROPPED = sequence(dropping, dropped)
DROPPED_WHOLE = branches(
    [lambda: nn.Conv2d(2, 6, 3), lambda: nn.Dropout2d(0.4), nn.Tanh],
    [lambda: nn.Flatten(2), lambda: nn.Conv1d(2, 6, 3), lambda: nn.Dropout1d(0.3)],
    [lambda: nn.Unflatten(1, (1, 2)), lambda: nn.Conv3d(1, 6, 2), nn.Dropout3d],
)
LABELS = {kind: Field("y", kind, high=5) for kind in ("int64", "int32", "uint8")}
LOST = loss(losses, LABELS["int64"])
LOST_OF_A_BYTE = loss(lambda out, y: cross_entropy(out, y) + own_loss(out, y), LABELS["uint8"])
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
    "Python loops of fixed length": [looped],
    "products": [lambda x: x.unflatten(1, (3, 4)).prod(1) + x.cumprod(1)[:, :4]],
    "sort and argsort": [lambda x: x.sort(1).values * torch.arange(12) + x * x.argsort(1, descending=True) / 12],
    "medians": [lambda x: x * x.median(1, keepdim=True).values],
    "powers of a number": [lambda x: 2**x],
    "remainders and floor division of whole numbers": [lambda x: x * ((x * 8).long() % 3) + x * ((x * 8).long() // 3)],
    "hyperbolic sines and cosines": [lambda x: x.cosh() + x.sinh()],
    "logarithms to base 2 and 10": [lambda x: (x.abs() + 0.5).log2() + (x.abs() + 0.5).log10()],
    "replication padding": [lambda x: functional.pad(x.unflatten(1, (3, 4)), (2, 1), mode="replicate").flatten(1) ** 2],
    "distances": [lambda x: torch.cdist(x.unflatten(1, (3, 4)), x.unflatten(1, (3, 4)).flip(2)).flatten(1)],
}
OPERATED = function(lambda x: torch.cat([one(x) for some in OPERATORS.values() for one in some], 1))
PROMISES = {
    "layers": {
        "dense": [CONVOLVED],
        "convolutions in one to three dimensions": [CONVOLVED],
        "grouped convolutions": [CONVOLVED],
        "depthwise convolutions": [CONVOLVED],
        "transposed convolutions": [IMAGES],
        "LSTM in one or two directions": [
            LOOKED_UP,
            DROPPED,
            sequence(lambda: nn.LSTM(8, 3, batch_first=True, bidirectional=True)),
            CELLS,
        ],
        "GRU": [sequence(lambda: nn.GRU(8, 3, batch_first=True)), CELLS],
        "RNN": [sequence(lambda: nn.RNN(8, 3, batch_first=True))],
        "scaled_dot_product_attention": [ATTENDED],
        "MultiheadAttention": [ATTENDED],
        "TransformerEncoder": [
            sequence(encoder, lambda m, x: m.inner(x)),
            sequence(encoder, lambda m, x: m.inner(x, m.mask)),
            sequence(encoder, lambda m, x: m.inner(x, m.mask, is_causal=True)),
        ],
        "TransformerDecoder": [sequence(decoder, lambda m, x: m.inner(x, x * 2, m.mask))],
        "embeddings": [ATTENDED],
        "embedding bags": [LOOKED_UP],
    },
    "normalisation": dict.fromkeys(
        ["layer", "group", "instance", "RMS", "batch with frozen statistics", "weight"], (NORMED,)
    ),
    "pooling": {
        "max-pooling in one and two dimensions": [POOLED],
        "average pooling": [POOLED, IMAGES],
        "adaptive averages and maxima": [IMAGES],
        "upsampling": [IMAGES, spec(Hourglass)],
        "global averages": [POOLED],
    },
    "activations": dict.fromkeys(ACTIVATIONS, (ACTIVATED,)),
    "random": {
        "nn.Dropout": [DROPPED],
        "dropout of channels": [DROPPED_WHOLE],
        "dropout between LSTM layers": [DROPPED],
        "randn_like and rand_like": [COMPUTED],
        "dropout on attention weights": [DROPPED],
    },
    "losses": {
        "cross-entropy": [LOST, LOST_OF_A_BYTE, loss(cross_entropy, LABELS["int32"])],
        "cross-entropy over pixels": [
            spec(
                lambda: nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 1)),
                lambda out, y: functional.cross_entropy(out, y, ignore_index=4, reduction="none").mean((1, 2)),
                label=Field("y", "uint8", (9, 7), high=5),
                metrics={},
            )
        ],
        "Gaussian likelihood": [
            loss(
                lambda out, y: functional.gaussian_nll_loss(out[:, 0], y, out[:, 1].cosh(), True, reduction="none"),
                Field("y", "float32"),
            )
        ],
        "binary cross-entropy with logits": [
            loss(
                lambda out, y: functional.binary_cross_entropy_with_logits(out[:, 0], y, reduction="none"),
                Field("y", "float32"),
            )
        ],
        **dict.fromkeys(["squared error", "absolute error", "Huber", "Kullback-Leibler"], (LOST,)),
        "what the operators below can say": [LOST_OF_A_BYTE],
    },
    "operators": {
        **dict.fromkeys(OPERATORS, (OPERATED,)),
        "padding and cropping": [CONVOLVED],
        "buffers": [ATTENDED],
        "places by numbers and tensors": [COMPUTED],
        "ranges and cumulative sums": [COMPUTED],
        "topk": [COMPUTED],
        "rounding and inverse trigonometric functions": [COMPUTED],
    },
}
MODELS = {
    id(model): (f"{item} {number}", model)
    for entries in PROMISES.values()
    for item, examples in entries.items()
    for number, model in enumerate(examples)
}
CASES = [
    pytest.param(
        example,
        form,
        id=f"{name}-{form}",
        marks=() if form == "onnx" and name.endswith(" 0") else pytest.mark.long,
    )
    for name, example in MODELS.values()
    for form in FORMATS
]


def test_the_table_of_the_document_has_an_example_for_every_entry():
    table = DOCUMENT.read_text().split("## What can be exported")[1].split("Tests train a model")[0]
    found = {}
    for kind, entries in re.findall(r"^\| (\w+) \| (.+) \|$", table, re.MULTILINE):
        found[kind] = {entry.replace("`", "") for entry in entries.split(", ")}
    assert found == {kind: set(entries) for kind, entries in PROMISES.items()}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("example", "form"), CASES)
def test_what_is_promised_trains_as_in_torch(example, form, executorch):
    """Every run has an example of each entry as ONNX; test_executorch.py has layers as ExecuTorch."""
    model, algorithm = Model(example), create("fedavg", {"batch_size": 4})
    plan, graphs = build_plan(model, algorithm, (form,))
    work, backend = Trial.draw(model, algorithm), BACKENDS[FORMATS[form]]()
    found = work.exported(plan, {part: backend.load(graphs[ref], part) for part, ref in plan.graphs[form].items()})
    assert max(work.distances(found, work.reference()).values()) <= TOLERANCE
