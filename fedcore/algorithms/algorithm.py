"""The contract between an algorithm and everything that runs it.

An algorithm is a few pure functions on flat vectors that use nothing but operators (`+ - * / // **`, comparisons,
`abs`, slicing, `.sum(-1)`): the same source runs on NumPy float64 arrays (coordinator, tests), on torch tensors with a
leading client axis (simulator), and under tracing (export). Shapes: `x_D` is `(D,)` or, batched over K clients,
`(K, D)`. A scalar is a vector of size 1, `(1,)` or `(K, 1)`, so both cases broadcast. Functions never write into an
argument.

An algorithm works in *trips*: one exchange with the devices of a cohort each. Most have one, and are it themselves. An
algorithm of two, such as Mime, gives them in `trips`; both read and move the same state, and rounds take them in turn.
So it needs two rounds for one step of the model. Each round may have another cohort, unless `same_cohort` is asked for.

Whoever has a gradient can drive an algorithm. Round r = 0, 1, …, with the n_k examples of each device k of its cohort:

    trips = trips_of(algorithm)                                     state is algorithm.init(params_D) before round 0
    trip = trips[r % len(trips)]
    broadcast = trip.broadcast(state)
    for stage in trip.passes:                                       for every device k, whose carries are {} at first
        received = with_carries(broadcast, carries)                 the broadcast alone in the first pass
        carry = stage.begin(received)
        for batch in ...:                                           stage.loop says how many sweeps, and the batches
            carry = stage.step(carry, received, grad)               grad(y) gives loss, gradient and size of the batch;
                                                                    measure(y), where stage.forward, sums of metrics
        carries[stage.name] = carry
    report_k = trip.report(broadcast, carries)
    mean = {name: Σ w_k report_k[name] / Σ w_k}                     w_k is n_k or 1, as algorithm.weighting says
    state = trip.update(state, mean, ServerStep(devices=K))         ServerStep may be left out by most

Where clients keep vectors between rounds (`StatefulAlgorithm`), a round of client k has two lines more, and
ServerStep(participation=K/N) of N clients:

    broadcast = algorithm.broadcast(state) | client_k               client_k is algorithm.init_client(params_D) at first
    client_k = algorithm.keep(broadcast, carries)                   beside report_k

`fedcore.batching.batches` makes the batches of a loop; `examples/fed_avg.py` is this in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, cast

from fedcore.errors import InvalidSetting
from fedcore.schedule import Loop, Range, Weighting

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

ClientState: TypeAlias = dict[str, Vector]
"""The vectors that one client keeps between rounds."""

Gradient: TypeAlias = Callable[[Vector], tuple[Vector, Vector, Vector]]
"""grad(params_D) -> (mean loss (1,), gradient of it (D,), number of examples (1,)) on the current batch."""

Measure: TypeAlias = Callable[[Vector], Vector]
"""measure(params_D) -> sums (M,) over the current batch: examples, loss, then every other metric of the model."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One sweep structure over the local examples.

    `begin(received) -> carry` once, then `step(carry, received, grad) -> carry` for every batch of `loop`, where
    `received` is the broadcast, with the last carries of earlier passes of the same trip (`with_carries`). A pass sees
    only that and the examples: nothing of an earlier round can reach it.

    measures: the metrics that a forward pass reads, the model's without its examples: loss, then the others, in its
    order. The step of a forward pass gets a Measure in place of the gradient. There the model is in eval mode, and
    draws nothing. Empty for a pass with a gradient.
    """

    name: str
    loop: Loop
    begin: Callable[[Broadcast], Carry]
    step: Callable[[Carry, Broadcast, Any], Carry]
    measures: tuple[str, ...] = ()

    @property
    def forward(self) -> bool:
        """Whether it only measures."""
        return bool(self.measures)


@dataclass(frozen=True, slots=True)
class ServerStep:
    """What the server knows of a round beside its mean.

    devices: reports in the mean. layers: ranges of the schema's tensors in the flat vector; without a schema, the whole
    vector is one layer. lr_scale: the schedule's factor on the server learning rate. participation: `devices` as a
    share of all clients, |S| / N. discount: the mean of the reports' staleness
    weights, with which the mean is made too; 1 where all reports start from the same model.
    """

    devices: int = 1
    layers: tuple[slice, ...] = (slice(None),)
    lr_scale: float = 1.0
    participation: float = 1.0
    discount: float = 1.0


class Trip(Protocol):
    """One exchange: what the devices of a round receive, run and report, and what the server makes of it.

    A trip of an algorithm with uniform weighting may also have the property `ranges`, a mapping from names of its
    report to the `Range` of their values: devices clamp them to it, and secure rounds sum them in its steps (see
    `ranges_of`). Without one, a vector is held to an L2 norm, and has the precision of the task.
    """

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that a device runs, in order."""

    def broadcast(self, state: State) -> Broadcast:
        """The part of the state that devices receive."""

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        """A device's vectors to be averaged, from the last carry of every pass by name."""

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """The next server state from the weighted mean over the cohort.

        Every server learning rate is multiplied by `step.lr_scale`. A round number that is needed is a state vector.
        """

    # A trip may have `figures(mean, step) -> dict[str, float]` too: see `figures_of`.


class Algorithm(Protocol):
    """A stateless federated algorithm. Implementations are frozen dataclasses whose fields are their settings.

    It is its own only Trip, or has the property `trips`: see OneTrip and TwoTrips, and `trips_of`.

    family: the kind of algorithm, such as "averaging" or "server optimizer" (docs/algorithms.md).
    """

    name: ClassVar[str]
    family: ClassVar[str]

    @property
    def weighting(self) -> Weighting:
        """The weight of a device in every mean: its examples, or 1."""

    def init(self, params_D: Vector) -> State:
        """The server state of round 0."""


class OneTrip(Algorithm, Trip, Protocol):
    """An algorithm that is its own only trip."""


class TwoTrips(Algorithm, Protocol):
    """An algorithm of two trips."""

    @property
    def trips(self) -> tuple[Trip, Trip]:
        """The trips, in order."""


class StatefulAlgorithm(OneTrip, Protocol):
    """An algorithm whose clients keep vectors between rounds.

    Passes and `report` get the client's vectors beside the broadcast, in one dictionary: `broadcast | client`. Names of
    the two differ.
    """

    def init_client(self, params_D: Vector) -> ClientState:
        """What a client keeps before its first round: given the model of round 0 in the simulator, on a device that of
        the first round that it takes part in.
        """

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        """What a client keeps after a round, from the arguments of `report`; the names of `init_client`."""


def keeps_client_state(algorithm: Algorithm | Trip) -> TypeGuard[StatefulAlgorithm]:
    """Whether the clients of an algorithm, which may be given as its trip, keep vectors between rounds."""
    return hasattr(algorithm, "keep")


def check_two_trips(algorithm: Algorithm) -> None:
    """Raise InvalidSetting unless the algorithm has two trips, and so may ask for the same cohort in both."""
    if len(trips_of(algorithm)) != 2:
        raise InvalidSetting(
            f"same_cohort is for algorithms of two trips, and {algorithm.name} has one: leave same_cohort out, or "
            "choose an algorithm of two trips (docs/algorithms.md)"
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """A trip that is put together from functions."""

    passes: tuple[Pass, ...]
    broadcast: Callable[[State], Broadcast]
    report: Callable[..., Report]
    update: Callable[..., State]
    ranges: Mapping[str, Range] = field(default_factory=dict)


def figures_of(trip: Trip, mean: Report, step: ServerStep) -> dict[str, float]:
    """What a trip says of a round beside the next state, by name; nothing unless it has `figures(mean, step)`."""
    figures: Callable[[Report, ServerStep], dict[str, float]] | None = getattr(trip, "figures", None)
    return {} if figures is None else figures(mean, step)


def trips_of(algorithm: Algorithm) -> tuple[Trip, ...]:
    """The trips of an algorithm, in order."""
    if hasattr(algorithm, "trips"):
        return cast("TwoTrips", algorithm).trips
    return (cast("OneTrip", algorithm),)


def ranges_of(trip: Trip) -> Mapping[str, Range]:
    """The ranges of vectors of a trip's report, by name. Clipped reports have none: they are clipped as one vector."""
    return cast("Mapping[str, Range]", getattr(trip, "ranges", {}))


def with_carries(broadcast: Broadcast, carries: Mapping[str, Carry]) -> Broadcast:
    """What a pass receives: the broadcast, and the last carries of earlier passes, as `<pass>.<name>`."""
    earlier = {f"{name}.{key}": vector for name, carry in carries.items() for key, vector in carry.items()}
    return broadcast | earlier
