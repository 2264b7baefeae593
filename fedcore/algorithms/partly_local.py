"""The common part of algorithms that share some of a model's parameters, and leave the others on every client.

With w the parameters that are shared and v_i those of client i, its own since its first round:

    on client i     y starts at w and v_i, and is trained on the local examples
                    v_i = the trained v
    on the server   w += server_lr · mean(y_w − w)

A vector of the model has both in the order of its schema. A report is 0 where the v are, and so is what the server adds
there, whatever noise or compression put into the mean: the server's v stay those that every client begins with.

Traps: a zero must be written, as a product with 0 keeps the sign of the trained number, and so a bit of it. A client
that is drawn rarely has a v_i of an old w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, ClientState, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import text

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
