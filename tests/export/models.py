"""Models of a user that none of our code has seen."""

import dataclasses
import functools
import warnings

import torch
import torch.utils.checkpoint
from torch import nn

from export.model import ModelSpec, accuracy, cross_entropy
from export.weights import in_few_bits, lora
from fedcore.plan import Field

X, Y = Field("x", "float32", (2, 9, 7)), Field("y", "int64", high=5)


def spec(make, loss=cross_entropy, inputs=(X,), label=Y, metrics=None):
    return ModelSpec("test", make, loss, inputs, label, {"accuracy": accuracy} if metrics is None else metrics)


def wrong_size():
    """A model of handwritten digits with a layer that does not fit the one before it."""
    return ModelSpec(
        "wrong_size",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(65, 10)),
        cross_entropy,
        (Field("x", "float32", (1, 8, 8)),),
        Field("y", "int64", high=10),
    )


def strided():
    """Odd sizes, strides, dilation, padding in numbers and words, overlapping pools, tanh and sigmoid."""
    return spec(
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.Conv2d(6, 4, (3, 2), dilation=(1, 2), padding=(1, 1)),
            nn.Sigmoid(),
            nn.Conv2d(4, 4, (3, 1), padding="same"),
            nn.Conv2d(4, 4, 1, padding="valid"),
            nn.Flatten(),
            nn.Linear(4 * 5 * 4, 5),
        )
    )


def residual():
    """GroupNorm, ReLU, softmax-weighted pooling over positions."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(2, 4, 3, padding=1)
            self.norm = nn.GroupNorm(2, 4)
            self.second = nn.Conv2d(4, 4, 3, padding=1)
            self.score = nn.Conv2d(4, 1, 1)
            self.head = nn.Linear(4, 5)

        def forward(self, x):
            hidden = torch.relu(self.norm(self.first(x)))
            hidden = hidden + self.second(hidden)
            weights = self.score(hidden).flatten(2).softmax(-1)
            return self.head((hidden.flatten(2) * weights).sum(-1))

    return spec(Residual)


class Positions(nn.Module):
    """A fixed table as a buffer, as position encodings are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 126))
        self.dense = nn.Linear(126, 5)

    def forward(self, x):
        return self.dense(x.flatten(1) + self.table)


def positions():
    return spec(Positions)


def wrong_width():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 5)))


def frozen(module):
    """The module with all parameters frozen, and statistics of batches with it."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return module.eval()


def backbone(channels):
    """A trained model of images without its last layer, as far as export can tell."""
    return frozen(nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.Tanh()))


def transfer():
    """A frozen backbone with statistics of batches, a large buffer, and layers that are trained."""

    class Transfer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = backbone(2)
            self.norm = nn.BatchNorm2d(6).eval()
            self.register_buffer("table", torch.randn(6, 9 * 7 * 4))
            self.head = nn.Linear(126, 5)
            self.head.bias.requires_grad_(False)

        def forward(self, x):
            hidden = self.norm(self.backbone(x)).flatten(2) + self.table[:, :63]
            return self.head(hidden.reshape(-1, 3, 126).mean(1))

    return spec(Transfer)


def digits_adapted():
    """For 8×8 digits: a frozen backbone and dense layers with adapters of low rank, and a head that is trained."""

    def make():
        body = nn.Sequential(backbone(1), nn.Flatten(), nn.Linear(384, 32), nn.Tanh(), nn.Linear(32, 10))
        return lora(body, 2, layers=("2",), train=("4.*",))

    return spec(make, inputs=(Field("x", "float32", (1, 8, 8)),), label=Field("y", "int64", high=10))


def digits_in_bits(bits):
    """The same, with its dense layers in few bits."""

    def make():
        body = nn.Sequential(backbone(1), nn.Flatten(), nn.Linear(384, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        head = nn.Linear(64, 10)
        return lora(nn.Sequential(*in_few_bits(body, bits), head), 2, layers=("2", "4"), train=("6.*",))

    return spec(make, inputs=(Field("x", "float32", (1, 8, 8)),), label=Field("y", "int64", high=10))


def digits_in_8_bits():
    return digits_in_bits(8)


def digits_in_4_bits():
    return digits_in_bits(4)


def all_frozen():
    return spec(lambda: frozen(nn.Sequential(nn.Flatten(), nn.Linear(126, 5))))


def hooked(install):
    """A dense network with hooks, put on by `install`."""

    def make():
        model = nn.Sequential(nn.Flatten(), nn.Linear(126, 8), nn.Tanh(), nn.Linear(8, 5))
        install(model)
        return model

    return spec(make)


def hooked_parameter():
    return hooked(lambda model: model[1].weight.register_hook(lambda gradient: gradient * 1.5))


def hooked_after_accumulation():
    return hooked(lambda model: model[3].bias.register_post_accumulate_grad_hook(lambda bias: None))


class Regression(nn.Module):
    """Two inputs, a residual branch, layer norm, GELU; a regression with its own loss."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, a, b):
        hidden = torch.cat([a, b], -1)
        return self.head(hidden + self.scale * self.inner(hidden)).squeeze(-1)


def regression():
    return ModelSpec(
        "regression",
        Regression,
        lambda outputs, label: (outputs - label) ** 2,
        (Field("a", "float32", (2,)), Field("b", "float32", (4,))),
        Field("target", "float32"),
    )


def batch_norm():
    return spec(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(105, 5)))


def gru_dropout():
    return spec(lambda: nn.GRU(7, 5, 2, dropout=0.4))


def bounded_embedding():
    return spec(lambda: nn.Embedding(11, 5, max_norm=1.0), inputs=(TOKENS,))


def counting_embedding():
    return spec(lambda: nn.Embedding(11, 5, scale_grad_by_freq=True), inputs=(TOKENS,))


def sparse_embedding():
    return spec(lambda: nn.Embedding(11, 5, sparse=True), inputs=(TOKENS,))


def sparse_bag():
    return spec(lambda: nn.EmbeddingBag(11, 5, sparse=True), inputs=(TOKENS,))


def spectral():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(126, 5))))


def alpha_dropout():
    return spec(lambda: nn.Sequential(nn.AlphaDropout(0.5), nn.Flatten(), nn.Linear(126, 5)))


def dropped_examples():
    """What torch takes for the channels of one example are the examples of a batch."""
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Dropout1d(0.5), nn.Linear(126, 5)))


def dropout():
    return spec(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(126, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, 5)
        )
    )


def digits_dropout():
    """For 8×8 digits: convolution, dropout on images and on a hidden layer, nothing with a kink."""
    return spec(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Tanh(),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(256, 16),
            nn.SiLU(),
            nn.Dropout(),
            nn.Linear(16, 10),
        ),
        inputs=(Field("x", "float32", (1, 8, 8)),),
        label=Field("y", "int64", high=10),
    )


def digits_wide():
    """For 8×8 digits: so large that `torch` trains a client by itself, and makes gradients by Winograd's algorithm."""
    return spec(
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 48, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(768, 700),
            nn.SiLU(),
            nn.Linear(700, 10),
        ),
        inputs=(Field("x", "float32", (1, 8, 8)),),
        label=Field("y", "int64", high=10),
    )


def mean_loss():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), nn.functional.cross_entropy)


def grouped():
    """Convolutions in groups that are neither one nor all channels, average pools."""
    return spec(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, groups=2),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 4, 3, padding=1, groups=4, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        )
    )


def separable():
    """Depthwise convolutions on large and small images, GELU, residuals, group normalisation."""

    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
            self.norm = nn.GroupNorm(2, channels)
            self.pointwise = nn.Conv2d(channels, channels, 1)

        def forward(self, x):
            return x + self.pointwise(nn.functional.gelu(self.norm(self.depthwise(x))))

    return spec(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            Block(8),
            nn.Conv2d(8, 8, 3, stride=2, groups=8),
            Block(8),
            nn.Flatten(),
            nn.Linear(96, 5),
        ),
        inputs=(Field("x", "float32", (2, 9, 8)),),
    )


class GatedCell(nn.Module):
    """A recurrent cell of the user's own, in a Python loop over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(14 + 6, 12)
        self.candidate = nn.Linear(14 + 6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        rows = x.transpose(1, 2).flatten(2)
        h = x.new_zeros(x.shape[0], 6)
        for step in range(rows.shape[1]):
            update, reset = self.gates(torch.cat([rows[:, step], h], 1)).sigmoid().chunk(2, 1)
            h = (1 - update) * h + update * self.candidate(torch.cat([rows[:, step], reset * h], 1)).tanh()
        return self.head(h)


def gated_cell():
    return spec(GatedCell)


TOKENS = Field("tokens", "int64", (4,), high=11)


def recurrent():
    """Two bidirectional LSTM layers with dropout between, over embeddings with a padding token."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 4, padding_idx=0)
            self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, dropout=0.3)
            self.head = nn.Linear(6, 5)

        def forward(self, tokens):
            outputs, (h, _) = self.lstm(self.embedding(tokens).transpose(0, 1))
            return self.head(outputs[-1] + h[-1].repeat(1, 2))

    return spec(Recurrent, inputs=(TOKENS,))


def encoder():
    """torch's own transformer layer, with dropout also on attention weights, and a mask made in the model."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(8, 5)

        def forward(self, tokens):
            length = tokens.shape[1]
            mask = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)
            x = self.embedding(tokens) + torch.arange(length)[:, None] / length
            return self.head(self.layer(x, src_mask=mask).mean(1))

    return spec(Encoder, inputs=(TOKENS,))


def diverging():
    return spec(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)),
        lambda outputs, label: nn.functional.cross_entropy(outputs * torch.inf, label, reduction="none"),
    )


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(126, 5)

    def forward(self, x):
        hidden = self.dense(x.flatten(1))
        return hidden * 2 if hidden.sum() > 1e9 else hidden


def branching():
    return spec(Branching)


class FixedBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(126, 5)

    def forward(self, x):
        return self.dense(x.reshape(7, 126))


def fixed_batch():
    return spec(FixedBatch)


def fixed_state():
    """A recurrent layer whose first state is that of twenty examples."""

    class FixedState(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(14, 5, batch_first=True)

        def forward(self, x):
            return self.cells(x.transpose(1, 2).flatten(2), torch.zeros(1, 20, 5))[0][:, -1]

    return spec(FixedState)


def looped_over_examples():
    return _dense(lambda self, x: torch.stack([row * 2 for row in x]))


class IntegerParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        return x


def integer_parameter():
    return spec(IntegerParameter)


def no_parameters():
    return spec(nn.Flatten)


def not_a_spec():
    return nn.Linear(1, 1)


def unbounded_label():
    return spec(nn.Flatten, label=Field("y", "int64"))


def kinked():
    """Convolutions with ReLU and group normalisation, deep enough for round-off to grow at a large step size."""
    layers = [nn.Conv2d(2, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return spec(lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 63, 5)))


class Dense(nn.Module):
    """A dense layer after something done to the flattened input."""

    def __init__(self, before):
        super().__init__()
        self.dense, self.before = nn.Linear(126, 5), before
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.dense(self.before(self, x.flatten(1)))


def _dense(before):
    return spec(lambda: Dense(before))


def fixed_to_float32():
    return _dense(lambda self, x: torch.where(x > 0, x.float() / 255, torch.tensor(0.1)))


def weighted_loss():
    loss = functools.partial(nn.functional.cross_entropy, weight=torch.arange(1.0, 6.0), reduction="none")
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), loss)


def everything_dropped():
    return _dense(lambda self, x: torch.cat([nn.functional.dropout(x[:, :60], 1.0), x[:, 60:]], 1))


def centred():
    return _dense(lambda self, x: x - x.mean(0))


def noisy():
    return _dense(lambda self, x: x + torch.randint_like(x, 2))


def counting():
    return _dense(lambda self, x: x + self.count.add_(1))


def _shrunk(self, x):
    with torch.no_grad():
        self.dense.weight.mul_(0.9)
    return x


def changing_weights():
    return _dense(_shrunk)


def changing_weights_behind():
    return _dense(lambda self, x: self.dense.weight.data.clamp_(-0.05, 0.05).sum() * 0 + x)


def changing_inputs():
    return _dense(lambda self, x: x.mul_(2))


def product_of_examples():
    return _dense(lambda self, x: x + 0 * x.prod(0))


def lower_bits():
    return _dense(lambda self, x: x * (x % 0.7))


class Gated(nn.Module):
    """Values at the largest of eight gates, which are all 0 at first."""

    def __init__(self, places):
        super().__init__()
        self.gate, self.dense, self.places = nn.Parameter(torch.zeros(8)), nn.Linear(126, 5), places

    def forward(self, x):
        places, hidden = self.places(self.gate), x.flatten(1)
        return self.dense(hidden * (1 + (self.gate[places] * hidden[:, places]).sum(1, keepdim=True)))


def tied_gates():
    return spec(lambda: Gated(lambda gate: gate.topk(2).indices))


def ordered_gates():
    return spec(lambda: Gated(lambda gate: gate.sort(descending=True, stable=True).indices[:2]))


def steep_at(threshold):
    """A network whose loss jumps where the sum of an example reaches a threshold."""
    return _dense(lambda self, x: x * torch.where(x.sum(1, keepdim=True) >= threshold, 3.0, 1.0))


def stepped_at(*thresholds, slope=1.0):
    """A network whose loss jumps a little where the first value of an example reaches a threshold."""
    return _dense(lambda self, x: slope * x * (1 + sum((x[:, :1] >= at).float() for at in thresholds) / 50))


def beside_float64():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), lambda out, y: cross_entropy(out.double(), y))


def measured_in_float64():
    squares = {"squares": lambda out, y: out.double().square().sum(1)}
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), metrics=squares)


def label_from_one():
    """Classes that a loss counts from 1, under a field that admits 0."""

    def loss(outputs, label):
        return -outputs.log_softmax(1).gather(1, label[:, None] - 1)[:, 0]

    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), loss, metrics={})


def examples_that_spare_the_last_class():
    """Examples of the model's own, of classes that there are, under a field that admits one more."""

    def examples(count, random):
        return {"x": random.normal(size=(count, 2, 9, 7)).astype("float32"), "y": random.integers(0, 5, count)}

    return dataclasses.replace(label_beyond(), label=Field("y", "int64", high=6), examples=examples)


def holding_on():
    """A parameter that no layer has."""
    hidden = nn.Parameter(torch.ones(126))
    return _dense(lambda self, x: x * hidden)


def aligned():
    """Connectionist temporal classification of nine rows."""

    def loss(outputs, label):
        scores = outputs.log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(scores, label, label[:, 0] * 0 + 9, (label > 0).sum(1), reduction="none")

    rows = nn.Sequential(nn.Flatten(1, 2), nn.Unflatten(1, (9, 2)), nn.Flatten(2), nn.Linear(14, 6))
    return spec(lambda: rows, loss, label=Field("y", "int64", (3,), high=6), metrics={})


def misspelt():
    return _dense(lambda self, x: self.nope(x))


def tuple_output():
    return spec(lambda: nn.LSTM(7, 5, batch_first=True), inputs=(Field("x", "float32", (9, 7)),))


def failing():
    return spec(lambda: nn.Linear(126, "5"))


def no_module():
    return spec(lambda: 3)


def vocabulary(high=200, size=200, padding=None):
    """An embedding of which a batch reads few rows, with tanh."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(size, 8, padding_idx=padding)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

        def forward(self, tokens):
            return self.body(self.embedding(tokens).mean(1))

    return spec(Words, inputs=(Field("tokens", "int64", (6,), high=high),))


def token_beyond():
    return vocabulary(high=300)


def label_beyond():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), label=Field("y", "int64", high=9))


def half():
    return _dense(lambda self, x: x.half().float())


def lazy():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)))


def metric_called_loss():
    return spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 5)), metrics={"loss": accuracy})


def one_name_twice():
    return spec(nn.Flatten, inputs=(X, X))


def doubles():
    return spec(nn.Flatten, inputs=(Field("x", "float64", (2,)),))


def checkpointed():
    """A layer that is computed again in the backward pass."""
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    return spec(lambda: Again(again))


class Again(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.dense, self.again = nn.Linear(126, 5), again

    def forward(self, x):
        return self.again(self.dense, x.flatten(1))


def conditional():
    return _dense(lambda self, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)))


def selecting():
    return _dense(lambda self, x: x + 0 * x[x > 0].sum())


def no_loss():
    return spec(_flat, loss=lambda outputs, label: None)


def broadcast_loss():
    return spec(_flat, loss=lambda outputs, label: (outputs.sum(1, keepdim=True) - label) ** 2)


def compiled():
    def make():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # loading torch's compiler meets its own
            return torch.compile(_flat())

    return spec(make)


def _flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(126, 5))
