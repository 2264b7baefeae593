"""Server SGD: the step of a server along a mean, with momentum or without.

x += server_lr · Δ                               without momentum
v ← β v + Δ,   x += server_lr · v                with momentum β, as in FedAvgM
"""

from __future__ import annotations

from fedcore.algorithms.algorithm import State, Vector


def initial_state(params_D: Vector, momentum: float) -> State:
    """The model, and v = 0 if there is momentum."""
    return {"params": params_D, "v": 0.0 * params_D} if momentum else {"params": params_D}


def server_sgd(state: State, direction_D: Vector, server_lr: float, momentum: float) -> State:
    """The state after one step along `direction_D`."""
    if not momentum:
        return {"params": state["params"] + server_lr * direction_D}
    v_D = momentum * state["v"] + direction_D
    return {"params": state["params"] + server_lr * v_D, "v": v_D}
