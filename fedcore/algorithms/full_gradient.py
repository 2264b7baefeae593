"""The full-batch gradient at the received model: a pass of one sweep over the local examples, and its result.

Trap: a full-batch gradient is Σ(batch mean · batch size) / n, not a mean of batch means, because the last batch may be
short.
"""

from __future__ import annotations

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Vector
from fedcore.schedule import Loop


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
