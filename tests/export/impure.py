"""Models of a user whose loss of an example hangs on more than parameters and example, and some that only look so."""

import datetime
import functools
import itertools
import logging
import random
import time
from dataclasses import replace
from random import random as drawn
from time import time as now

import numpy as np
import torch
from torch import nn

from export.model import ModelSpec, accuracy, cross_entropy
from fedcore.plan import Field

X, Y, TOKENS = Field("x", "float32", (8,)), Field("y", "int64", high=3), Field("x", "int64", (4,), high=11)
NUMBERS, NORMAL, CALLS = np.random.default_rng(0), np.random.normal, {"made": 0}


class Net(nn.Module):
    """Two dense layers, and `within` between them: a function of this module and hidden values."""

    def __init__(self, within=lambda net, hidden: hidden):
        super().__init__()
        self.first, self.last, self.within = nn.Linear(8, 6), nn.Linear(6, 3), within
        self.calls, self.known = 0, None
        self.counts, self.numbers = {"forward": [0]}, np.random.default_rng(0)
        self.mean = torch.zeros(6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.last(self.within(self, self.first(x).tanh()))


def spec(within=lambda net, hidden: hidden, loss=cross_entropy, metrics=None, make=Net):
    metrics = {"accuracy": accuracy} if metrics is None else metrics
    return ModelSpec("own", lambda: make(within), loss, (X,), Y, metrics)


def of_layer(within):
    """The same, in a layer of its own called `odd`."""

    class Odd(nn.Module):
        def forward(self, hidden):
            return within(self, hidden)

    class Outer(Net):
        def __init__(self, inner):
            super().__init__(lambda net, hidden: net.odd(hidden))
            self.odd = Odd()
            self.odd.calls = 0

    return spec(make=Outer)


def counting(net, hidden):
    net.calls += 1
    return hidden * (1 + 0.1 * net.calls)


def counting_silently(net, hidden):
    net.calls += 1
    return hidden * 0 if net.calls > 1000 else hidden


def counting_within(net, hidden):
    net.counts["forward"][0] += 1
    return hidden


def counting_globally(net, hidden):
    CALLS["made"] += 1
    return hidden


def counting_in_a_buffer(net, hidden):
    net.seen = net.seen + 1
    return hidden * (1 + 0.1 * net.seen)


def averaging(net, hidden):
    net.mean = 0.9 * net.mean + 0.1 * hidden.detach().mean(0)
    return hidden - net.mean


def shrinking(net, hidden):
    with torch.no_grad():
        net.first.weight.mul_(0.9)
    return hidden


def drawing_by_numpy(net, hidden):
    return hidden + torch.from_numpy(NORMAL(0, 0.1, 6).astype(np.float32))


def seldom(net, hidden):
    return hidden * 0 if NUMBERS.random() < 1e-9 else hidden


def own_numbers(net, hidden):
    return hidden * 0 if net.numbers.random() < 1e-9 else hidden


def unseeded(net, hidden):
    return hidden + 0.1 * float(np.random.default_rng().random())


def timed(net, hidden):
    return hidden * 0 if now() < 0 else hidden


def dated(net, hidden):
    return hidden * (1 + 0 * datetime.datetime.now().year)


IDS = itertools.count()


def numbered(net, hidden):
    return hidden * (1 + 0.1 * next(IDS))


def averaged(outputs, label):
    return cross_entropy(outputs, label).mean().expand(label.shape[0])


def contrasted(outputs, label):
    """Every example against the others of its batch."""
    scores = outputs @ outputs.T
    return nn.functional.cross_entropy(scores, torch.arange(len(label)), reduction="none")


def contrasted_blindly(outputs, label, mask):
    return contrasted(outputs, label)


def contrasted_where_real(outputs, label, mask):
    scores = outputs @ outputs.T + (mask - 1) * 1e4
    return scores.logsumexp(1) - (outputs * outputs).sum(1)


def comparing(loss):
    return replace(spec(loss=loss, metrics={}), compares=True)


def ranked(outputs, label):
    return outputs.sum(1) - outputs.sum(1).mean()


def held_weights(detached=False):
    """A loss that holds on to a layer of the module."""
    made = []

    def make(within):
        made[:] = [Net(within)]
        return made[0]

    def loss(outputs, label):
        weight = made[0].first.weight
        return cross_entropy(outputs, label) + 0.1 * (weight.detach() if detached else weight).square().sum()

    return spec(loss=loss, make=make)


class Listed(Net):
    """A parameter that forward reads from a list."""

    def __init__(self, within):
        super().__init__(within)
        self.scale = nn.Parameter(torch.ones(6))
        self.scales = [self.scale]

    def forward(self, x):
        return self.last(self.first(x).tanh() * self.scales[0])


REFUSED = {
    "random": (spec(lambda net, hidden: hidden * 0 if random.random() < 1e-9 else hidden), "random.random"),
    "random in a layer": (of_layer(lambda net, hidden: hidden * (1 + random.uniform(0, 0.1))), "random.*layer 'odd'"),
    "random by another name": (spec(lambda net, hidden: hidden * 0 if drawn() < 1e-9 else hidden), "random.random"),
    "NumPy's random numbers": (spec(drawing_by_numpy), "numpy.random"),
    "a generator of the module's": (spec(own_numbers), "attribute 'numbers' of the model"),
    "a global generator": (spec(seldom), "variable 'NUMBERS'"),
    "a generator without seed": (spec(unseeded), "urandom"),
    "torch's generator": (of_layer(lambda net, hidden: hidden * torch.rand(())), "aten.rand.*layer 'odd'"),
    "time": (spec(timed), "time.time"),
    "the performance counter": (spec(lambda net, hidden: hidden + 0 * time.perf_counter()), "time.perf_counter"),
    "a date": (spec(dated), "datetime.now"),
    "a counter": (spec(counting), "attribute 'calls' of the model"),
    "a counter without effect yet": (spec(counting_silently), "attribute 'calls' of the model"),
    "a counter of a layer": (of_layer(counting_silently), "attribute 'calls' of layer 'odd'"),
    "a counter in a container": (spec(counting_within), "attribute 'counts' of the model"),
    "a global counter": (spec(counting_globally), "variable 'CALLS'"),
    "a counter in a buffer": (spec(counting_in_a_buffer), "buffer 'seen'"),
    "an iterator": (spec(numbered), "when it is called again"),
    "a running mean": (spec(averaging), "when it is called again"),
    "weights that forward changes": (spec(shrinking), "parameter 'first.weight'"),
    "a mean over the batch": (spec(lambda net, hidden: hidden - hidden.mean(0)), "the model's own forward.*influence"),
    "a mean in a layer": (of_layer(lambda net, hidden: hidden - hidden.mean(0)), "layer 'odd'.*influence"),
    "a loss that is averaged": (spec(loss=averaged), "the loss.*influence"),
    "negatives from the batch": (spec(loss=contrasted), "the loss.*influence"),
    "negatives from padding": (comparing(contrasted_blindly), "the loss.*influence"),
    "a metric of the batch": (spec(metrics={"high": ranked}), "metric 'high'.*influence"),
    "weights in the loss": (held_weights(), "holds on to"),
    "weights in the loss, detached": (held_weights(detached=True), "holds on to"),
    "a parameter in a list": (spec(make=Listed), "holds on to"),
}  # fmt: skip


class Part(nn.Module):
    """A half of a model of sequences."""

    def __init__(self, table):
        super().__init__()
        self.table, self.mix = table, nn.Linear(6, 6)

    def forward(self, tokens):
        return self.mix(self.table(tokens)).tanh()


class Tied(nn.Module):
    """An encoder and a decoder with one embedding, whose table is the last layer's too: a parameter of four names."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.encoder, self.decoder = Part(self.shared), Part(self.shared)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens):
        return self.head(self.encoder(tokens).mean(1) + self.decoder(tokens.flip(1))[:, 0])


def tied():
    return ModelSpec("tied", Tied, cross_entropy, (TOKENS,), Field("y", "int64", high=11), {"accuracy": accuracy})


class Tempered(nn.Module):
    """A dense layer with a learnt temperature, a frozen gain and a shift, all of shape ()."""

    def __init__(self):
        super().__init__()
        self.temperature, self.dense = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x):
        return self.dense(x) * self.gain / self.temperature + self.shift


def tempered():
    return spec(make=lambda within: Tempered())


def remembering(net, hidden):
    """What the first call makes stays."""
    if net.known is None:
        net.known, net.calls = torch.arange(6) / 6, 1
    return hidden + net.known


def keeping(net, hidden):
    net.known, net.counts["shape"] = [hidden], tuple(hidden.shape)
    return hidden


IMPORTED = compile("import time; BEGUN = time.time()", "imported.py", "exec")


def telling(net, hidden):
    """Lines of a log have the time, as a module may have it that is imported late."""
    exec(IMPORTED, {})
    logging.getLogger("own").warning("hidden values %s", tuple(hidden.shape))
    return hidden


def noisy(net, hidden):
    return nn.functional.dropout(hidden, 0.3) + 0.1 * torch.randn_like(hidden)


def confident():
    """A model that is sure of its labels, so that its gradient is round-off."""

    class Sure(Net):
        def forward(self, x):
            return 1e3 * super().forward(x)

    return spec(make=Sure, loss=lambda outputs, label: cross_entropy(outputs, outputs.argmax(1) + 0 * label))


class Halving(Net):
    """A model that changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


def deep():
    """Thirty layers with kinks, whose gradients part by round-off."""
    layers = itertools.chain.from_iterable((nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(30))
    return spec(make=lambda within: nn.Sequential(*layers, nn.Linear(8, 3)))


TAKEN = {
    "negatives where the mask keeps them": functools.partial(comparing, contrasted_where_real),
    "ties": tied, "a scalar parameter": tempered, "what the first call makes": functools.partial(spec, remembering),
    "values kept in attributes": functools.partial(spec, keeping), "lines of a log": functools.partial(spec, telling),
    "noise": functools.partial(spec, noisy),
    "a gradient of round-off": confident, "kinks": deep,
}  # fmt: skip
# Export has no form for a change of an input.
SIMULATED = TAKEN | {"an input in place": functools.partial(spec, make=Halving)}
