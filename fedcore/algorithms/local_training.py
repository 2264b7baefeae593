"""Parts that training algorithms share: local steps, parameters that stay on clients, a second trip, optimizers.

FedAvg, FedProx and the server optimizers differ in what the server does with the mean delta; the device's part is here.
Those that correct each local gradient, such as SCAFFOLD, have its part without optimizers.
With g the gradient on a batch at y, and y starting at the received x:

    sgd        y −= client_lr · g
    momentum   m ← β₁ m + g                                      y −= client_lr · m
    adam       m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²    y −= client_lr · m̂ / (√v̂ + ε)

with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ) at the step t = 1, 2, … This Adam is that of Kingma and Ba, ICLR 2015.
Traps: m and v start at 0 in every round. In float32, 1 − β₂ᵗ would lose half of its digits; it is the sum of the
weights in v, and is summed with v: s₂ ← β₂ s₂ + (1 − β₂).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import (
    Broadcast,
    Carry,
    ClientState,
    Exchange,
    Gradient,
    Pass,
    Report,
    ServerStep,
    State,
    Vector,
)
from fedcore.algorithms.settings import choice, count, fraction, positive, text
from fedcore.schedule import Loop, Weighting

# Server SGD: the step of a server along a mean, with momentum or without.
#
# x += server_lr · Δ                               without momentum v ← β v + Δ,   x += server_lr · v
# with momentum β, as in FedAvgM


def initial_state(params_D: Vector, momentum: float) -> State:
    """The model, and v = 0 if there is momentum."""
    return {"params": params_D, "v": 0.0 * params_D} if momentum else {"params": params_D}


def server_sgd(state: State, direction_D: Vector, server_lr: float, momentum: float) -> State:
    """The state after one step along `direction_D`."""
    if not momentum:
        return {"params": state["params"] + server_lr * direction_D}
    v_D = momentum * state["v"] + direction_D
    return {"params": state["params"] + server_lr * v_D, "v": v_D}


@dataclass(frozen=True, slots=True)
class LocalSgd:
    """Local SGD from the received model along `local_gradient`, and how far it went. Down: d. Up: d.

    client_lr: step size of local training.
    epochs, batch_size: local sweeps and batch size.
    """

    client_lr: float = positive(0.1)
    epochs: int = count(1)
    batch_size: int = count(20)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.training,)

    @property
    def training(self) -> Pass:
        """The pass `train`."""
        return Pass("train", Loop(batch_size=self.batch_size, epochs=self.epochs), self._begin, self._step)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["params"] - broadcast["params"]}

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        """What a local step goes down along: the gradient on the batch."""
        return grad(params_D)[1]

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        g_D = self.local_gradient(carry["params"], broadcast, grad)
        return {"params": carry["params"] - self.client_lr * g_D}


@dataclass(frozen=True, slots=True)
class LocalTraining(LocalSgd):
    """The device's part of an algorithm whose server needs only the mean delta. Down: d. Up: d.

    server_lr: step size of the server.
    weighting: the weight of a device in the mean, its "examples", or 1 if "uniform".
    client_optimizer: "sgd", "momentum" or "adam".
    client_beta1, client_beta2, client_epsilon: β₁, β₂, ε above; unused by "sgd", and the last two by "momentum".
    """

    server_lr: float = positive(1.0)
    weighting: Weighting = choice("examples", "uniform")
    client_optimizer: Literal["sgd", "momentum", "adam"] = choice("sgd", "momentum", "adam")
    client_beta1: float = fraction(0.9)
    client_beta2: float = fraction(0.999)
    client_epsilon: float = positive(1e-3)

    def _begin(self, broadcast: Broadcast) -> Carry:
        x_D = broadcast["params"]
        carry = {"params": x_D}
        if self.client_optimizer != "sgd":
            carry["m"] = 0.0 * x_D
        if self.client_optimizer == "adam":
            none = 0.0 * x_D[..., :1]
            carry |= {"v": 0.0 * x_D, "m_weight": none, "v_weight": none}
        return carry

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        g_D = self.local_gradient(carry["params"], broadcast, grad)
        if self.client_optimizer == "momentum":
            m_D = self.client_beta1 * carry["m"] + g_D
            return {"params": carry["params"] - self.client_lr * m_D, "m": m_D}
        if self.client_optimizer == "adam":
            return self._adam(carry, g_D)
        return {"params": carry["params"] - self.client_lr * g_D}

    def _adam(self, carry: Carry, g_D: Vector) -> Carry:
        m_D = self.client_beta1 * carry["m"] + (1 - self.client_beta1) * g_D
        v_D = self.client_beta2 * carry["v"] + (1 - self.client_beta2) * g_D**2
        m_weight = self.client_beta1 * carry["m_weight"] + (1 - self.client_beta1)
        v_weight = self.client_beta2 * carry["v_weight"] + (1 - self.client_beta2)
        u_D = (m_D / m_weight) / ((v_D / v_weight) ** 0.5 + self.client_epsilon)
        y_D = carry["params"] - self.client_lr * u_D
        return {"params": y_D, "m": m_D, "v": v_D, "m_weight": m_weight, "v_weight": v_weight}


# The common part of algorithms that share some of a model's parameters, and leave the others on every client.
#
# With w the parameters that are shared and v_i those of client i, its own since its first round:
#
#     on client i     y starts at w and v_i, and is trained on the local examples
#                     v_i = the trained v
#     on the server   w += server_lr · mean(y_w − w)
#
# A vector of the model has both in the order of its schema. A report is 0 where the v are, and so is what the server
# adds there, whatever noise or compression put into the mean: the server's v stay those that every client begins with.
#
# Traps: a zero must be written, as a product with 0 keeps the sign of the trained number, and so a bit of it. A client
# that is drawn rarely has a v_i of an old w.


AUTO = "auto"
OWN = "own"
"""The name of v_i among the vectors of a client."""


def ranges_of_text(local: str) -> tuple[slice, ...]:
    """The ranges that a setting names, `start..end` by commas; of "auto" the first parameter, as rehearsals have it.

    Raises ValueError unless they are in order and apart.
    """
    if local == AUTO:
        return (slice(0, 1),)
    pairs = [tuple(map(int, part.split(".."))) for part in local.split(",")]
    places = [place for pair in pairs for place in pair]
    if any(len(pair) != 2 or pair[0] == pair[1] for pair in pairs) or places != sorted(places) or places[0] < 0:
        raise ValueError(local)
    return tuple(slice(*pair) for pair in pairs)


def text_of_ranges(ranges: Sequence[slice]) -> str:
    """The same ranges as a setting, those that touch as one."""
    joined: list[list[int]] = []
    for where in ranges:
        if joined and joined[-1][1] == where.start:
            joined[-1][1] = where.stop
        else:
            joined.append([where.start, where.stop])
    return ",".join(f"{start}..{stop}" for start, stop in joined)


def _written(local: str) -> str:
    """The same ranges in the one way to write them. Raises ValueError as `ranges_of_text`."""
    return AUTO if local == AUTO else text_of_ranges(ranges_of_text(local))


@dataclass(frozen=True, slots=True)
class PartlyLocal(LocalTraining):
    """The device's and the server's part. Down: d. Up: d, 0 where v is. Client state: v_i.

    local: where v is in the flat vector, such as 2816..3206; with "auto" where the model says.
    server_lr: step size on the mean delta.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "personalised"

    local: str = text(AUTO, _written, "ranges of the flat vector, such as 2816..3206, or auto")

    @property
    def where(self) -> tuple[slice, ...]:
        """The ranges of v in the flat vector."""
        return ranges_of_text(self.local)

    def init_client(self, params_D: Vector) -> ClientState:
        return {OWN: self.part(params_D)}

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        return {OWN: self.part(carries["train"]["params"])}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": self.filled(carries["train"]["params"] - broadcast["params"], 0.0)}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        delta_D = self.filled(mean["delta"], 0.0)
        return {"params": state["params"] + self.server_lr * step.lr_scale * delta_D}

    def part(self, params_D: Vector) -> Vector:
        """v of a model."""
        own = 0.0 * params_D[..., : sum(where.stop - where.start for where in self.where)]
        for where, place in self._places():
            own[..., place] = params_D[..., where]
        return own

    def personal(self, params_D: Vector, own: Vector) -> Vector:
        """The model with a client's v in place of its own, or (K, D) with those of K clients."""
        model_D = params_D + 0.0 * own[..., :1]  # a model for each of the clients
        for where, place in self._places():
            model_D[..., where] = own[..., place]
        return model_D

    def filled(self, vector_D: Vector, value: float) -> Vector:
        """A vector with one value at every place of v."""
        new_D = 1.0 * vector_D
        for where in self.where:
            new_D[..., where] = value
        return new_D

    def _begin(self, broadcast: Broadcast) -> Carry:
        return LocalTraining._begin(self, {"params": self.personal(broadcast["params"], broadcast[OWN])})

    def _places(self) -> list[tuple[slice, slice]]:
        """Every range of the flat vector, with its place in v."""
        ends = list(accumulate((where.stop - where.start for where in self.where), initial=0))
        return list(zip(self.where, map(slice, ends, ends[1:]), strict=True))


# Two trips: a cohort's full gradient, then local steps that use it.
#
#     trip 1   on the phone    ∇F_i(x)                                    all local examples
#              on the server   c ← mean(∇F_i(x)), kept as `gradient`
#     trip 2   on the phone    y starts at the received x, and takes steps that read all of the server state
#              on the server   x += server_lr · mean(y_i − x)
#
# Where a paper has one cohort for both trips, c is here that of another draw: each trip is a round with its own cohort,
# unless `same_cohort` asks for that of the first (docs/spec/rounds.md §10).


# The full-batch gradient at the received model: a pass of one sweep over the local examples, and its result.
#
# Trap: a full-batch gradient is Σ(batch mean · batch size) / n, not a mean of batch means, because the last batch may
# be short.


def full_gradient(batch_size: int) -> Pass:
    """The pass `sweep`: sums the gradients at the received x over all local examples, and counts them."""
    return Pass("sweep", Loop(batch_size=batch_size, shuffle=False), _begin, _step)


def mean_gradient(sweep: Carry) -> Vector:
    """∇F_i(x), (D,), from the last carry of the sweep."""
    return sweep["gradient_sum"] / sweep["examples"]


def received_gradient(received: Broadcast) -> Vector:
    """∇F_i(x), (D,), from what a pass after the sweep receives."""
    return received["sweep.gradient_sum"] / received["sweep.examples"]


def _begin(broadcast: Broadcast) -> Carry:
    zeros_D = 0.0 * broadcast["params"]
    return {"gradient_sum": zeros_D, "examples": zeros_D[..., :1]}


def _step(carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
    _, gradient_D, examples = grad(broadcast["params"])
    return {
        "gradient_sum": carry["gradient_sum"] + examples * gradient_D,
        "examples": carry["examples"] + examples,
    }


LocalStep = Callable[[Carry, Broadcast, Gradient], Carry]


def begin_state(params_D: Vector) -> State:
    """The model, and c before it was ever gathered: 2d."""
    return {"params": params_D, "gradient": 0.0 * params_D}


def gather_gradient(batch_size: int) -> Exchange:
    """Trip 1: it leaves c in the state and moves nothing else. Down: d. Up: d."""
    return Exchange((full_gradient(batch_size),), _model, _gradient, _keep)


def train(loop: Loop, step: LocalStep, server_lr: float, *before: Pass) -> Exchange:
    """Trip 2: the passes `before`, then the pass `train`. Down: the server state. Up: d."""

    def update(state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return state | {"params": state["params"] + server_lr * step.lr_scale * mean["delta"]}

    return Exchange((*before, Pass("train", loop, _model, step)), dict, _delta, update)


def reduced_gradient(carry: Carry, received: Broadcast, grad: Gradient) -> Vector:
    """g(y; B) − g(x; B) + c, both gradients on the batch of the step: its variance vanishes as y nears x."""
    _, at_x_D, _ = grad(received["params"])
    _, at_y_D, _ = grad(carry["params"])
    return at_y_D - at_x_D + received["gradient"]


def _model(vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    return {"params": vectors["params"]}


def _gradient(broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
    return {"gradient": mean_gradient(carries["sweep"])}


def _keep(state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
    return state | {"gradient": mean["gradient"]}


def _delta(broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
    return {"delta": carries["train"]["params"] - broadcast["params"]}


# Base optimizers of Mime and MimeLite: U, the step of an optimizer with its state s held fixed, and V, the move of s.
#
# The equations and the paper are in `mime.py`. m starts at 0, v at `initial_v`. Trap: devices divide by √v before any
# gradient was seen, so v must start above 0.


@dataclass(frozen=True, slots=True)
class BaseOptimizer:
    """The settings of an algorithm whose devices take steps of a base optimizer, and that optimizer.

    client_lr: step size η of local steps; use about 0.001 to 0.01 with adam and adagrad.
    server_lr: step size on the mean delta; 1 in the paper.
    beta1, beta2, epsilon: β₁, β₂, ε of the base optimizer.
    initial_v: where v of adam and adagrad starts; above 0, because devices divide by √v before any gradient was seen.
    epochs, batch_size: local sweeps and batch size.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    family: ClassVar[str] = "mime"

    optimizer: Literal["momentum", "adam", "adagrad", "sgd"] = choice("momentum", "adam", "adagrad", "sgd")
    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    epsilon: float = positive(1e-3)
    initial_v: float = positive(1e-4)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def loop(self) -> Loop:
        """Of the local steps."""
        return Loop(batch_size=self.batch_size, epochs=self.epochs)

    def start(self, params_D: Vector) -> State:
        """s before the first round."""
        zeros_D = 0.0 * params_D
        state = {"m": zeros_D, "v": zeros_D + self.initial_v}
        return {name: vector for name, vector in state.items() if name in self._vectors}

    def direction(self, gradient_D: Vector, s: Broadcast) -> Vector:
        """U(g, s)."""
        u_D = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D if "m" in self._vectors else gradient_D
        return u_D / (s["v"] ** 0.5 + self.epsilon) if "v" in self._vectors else u_D

    def move(self, gradient_D: Vector, s: State) -> State:
        """V(c, s)."""
        moved = {}
        if "m" in self._vectors:
            moved["m"] = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D
        if self.optimizer == "adam":
            moved["v"] = self.beta2 * s["v"] + (1 - self.beta2) * gradient_D**2
        if self.optimizer == "adagrad":
            moved["v"] = s["v"] + gradient_D**2
        return moved

    @property
    def _vectors(self) -> str:
        return {"sgd": "", "momentum": "m", "adam": "mv", "adagrad": "v"}[self.optimizer]
