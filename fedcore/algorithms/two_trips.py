"""Two trips: a cohort's full gradient, then local steps that use it.

    trip 1   on the phone    ∇F_i(x)                                    all local examples
             on the server   c ← mean(∇F_i(x)), kept as `gradient`
    trip 2   on the phone    y starts at the received x, and takes steps that read all of the server state
             on the server   x += server_lr · mean(y_i − x)

Where a paper has one cohort for both trips, c is here that of another draw: each trip is a round with its own cohort,
unless `same_cohort` asks for that of the first (docs/spec/rounds.md §10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedcore.algorithms.algorithm import Broadcast, Carry, Exchange, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.schedule import Loop

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
