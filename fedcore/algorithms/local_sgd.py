"""Local SGD: the training from the received model that FedAvg and the FedOpt family share."""

from __future__ import annotations

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass
from fedcore.loop import Loop


def local_sgd(learning_rate: float, loop: Loop) -> Pass:
    """The pass `train`: y starts at the received x, then y −= learning_rate · g(y) for every batch."""

    def begin(broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def step(carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        return {"params": carry["params"] - learning_rate * gradient_D}

    return Pass("train", loop, begin, step)
