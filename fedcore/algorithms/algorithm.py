"""The contract between an algorithm and everything that runs it.

An algorithm is a few pure functions on flat vectors that use nothing but operators (`+ - * / **`, slicing, `.sum()`):
the same source runs on NumPy float64 arrays (coordinator, tests), on torch tensors with a leading client axis
(simulator), and under tracing (export). Shapes: `x_D` is `(D,)` or, batched over K clients, `(K, D)`. A scalar is a
vector of size 1, `(1,)` or `(K, 1)`, so both cases broadcast. Functions never write into an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from fedcore.loop import Loop

if TYPE_CHECKING:
    from fedcore.report import Weighting  # loads NumPy, which names and settings do not need

Vector: TypeAlias = Any
"""A NumPy array, a torch tensor or a traced value: `fedcore` imports no tensor library, hence no narrower type."""

State: TypeAlias = dict[str, Vector]
"""The vectors that the coordinator keeps between rounds; always with `params`."""

Broadcast: TypeAlias = dict[str, Vector]
"""The vectors that a device receives; always with `params`, the model that the round starts from."""

Carry: TypeAlias = dict[str, Vector]
"""The vectors that a pass hands from one step to the next, on the device, within one session."""

Report: TypeAlias = dict[str, Vector]
"""Named vectors that are averaged over the cohort by weight."""

Gradient: TypeAlias = Callable[[Vector], tuple[Vector, Vector, Vector]]
"""grad(params_D) -> (mean loss (1,), gradient of it (D,), number of examples (1,)) on the current batch."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One sweep structure over the local examples.

    `begin(broadcast) -> carry` once, then `step(carry, broadcast, grad) -> carry` for every batch of `loop`.
    A pass sees only the broadcast and the examples: nothing of an earlier round can reach it.
    """

    name: str
    loop: Loop
    begin: Callable[[Broadcast], Carry]
    step: Callable[[Carry, Broadcast, Gradient], Carry]


class Algorithm(Protocol):
    """A stateless federated algorithm. Implementations are frozen dataclasses whose fields are their settings."""

    name: ClassVar[str]

    @property
    def weighting(self) -> Weighting:
        """The weight of a device in every mean: its examples, or 1."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that a device runs, in order."""

    def init(self, params_D: Vector) -> State:
        """The server state of round 0."""

    def broadcast(self, state: State) -> Broadcast:
        """The part of the state that devices receive."""

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        """A device's vectors to be averaged, from the last carry of every pass by name."""

    def update(self, state: State, mean: Report) -> State:
        """The next server state from the weighted mean over the cohort."""
