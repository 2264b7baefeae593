"""The configuration of a simulation, federated or of a baseline, and settings that suit built-in models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from coordinator.rules.task_settings import Secagg
from fedcore.privacy.settings import BANDS, DELTA, Mechanism, WholeFromOne
from fedcore.schedule import ServerSchedule
from fedcore.validation import Count, NotNegative, build, check, checked, offered, own_name, setting
from simulator.engines import Wanted
from simulator.errors import DatasetError, EngineError

# Baselines of studies, by name: what federated training is compared with, on the same users and examples.
#
# `pooled` and `local` train the model by the algorithm: on the examples of all training users as those of one client,
# or on every user's own alone. `dane`, `cocoa` and `sparse_fsvrg` are distributed optimizers of linear models.


LinearBaseline: TypeAlias = Literal["dane", "cocoa", "sparse_fsvrg"]
Baseline: TypeAlias = Literal["pooled", "local", LinearBaseline]
LOSSES = ("ridge", "logistic")
"""The linear models, by their loss."""


# The configuration of a simulation, federated or of a baseline, and settings that suit built-in models.


HELD_OUT = 0.2
"""The share of users that are held out."""
DATA = "The folder that holds data sets on disk."
COMPRESS = (
    "How reports become smaller, in steps by commas: rotation, subsample=FRACTION, count_sketch=FRACTION, "
    "low_rank=RANK, and last bits=1, 2, 4 or 8 (docs/compression.md)."
)
HOLD_OUT = "Share of each device's examples to hold out."
ON_HELD_OUT = "Run on exactly the held-out examples."
LOCAL = "Parameters that stay on clients, by name or pattern, such as 2.*; for fedper and fedrep."
_OWN_EXAMPLES = (
    "All users train, and measure on held_out of their own examples in place of held-out users: each its own model, "
    "where the algorithm gives users some."
)
_FINE_TUNE = (
    "With own_examples: sweeps of local training, over a user's examples, of the model that the user then measures; "
    "nothing of it stays."
)
_DATASET = (
    "A data set by name (`muster data list`), package.module:function, file.py:function, or a path to npz, CSV or "
    "Parquet files, or to a folder of save_to_disk."
)
USER_COLUMN = "Of your own table: the column of users; by default user."
INPUT_COLUMNS = "Its columns of numbers that a model reads, by commas, or one of texts."
TARGET_COLUMN = "Its column to predict; texts are numbered in their order."
DROP_MISSING = "Leave out its rows that lack a value; else the first is refused by name."
_STANDARDISE = (
    "Have the model read x less its mean, over its deviation, which the training users have; done of itself for a "
    "table without a model, which gets mlp."
)
_PARTITION = (
    "How examples are dealt to clients: natural (by user), dirichlet:ALPHA, pachinko:ALPHA,BETA, shards:PER_CLIENT, "
    "which is pathological too, quantity:BETA, linear, exponential:RATIO or shuffled; by default by user, or "
    "dirichlet:0.3 where there are no users."
)
_BASELINE = (
    "What to run instead of federated training: pooled (one client has all examples), local (every user alone), or an "
    "optimizer of the linear models ridge and logistic."
)
_ENGINE = (
    "What trains users: torch, several at once; graphs, one by one on what devices run, after an export of seconds; or "
    "auto, which is torch, and graphs for a model that torch cannot run."
)
_DEVICE = "Where to compute: cpu; cuda, or a certain GPU as cuda:1; or cuda:all, every GPU with a process of its own."
_PROCESSES = (
    "Processes that train, by default one for each core, and one on a GPU; on the CPU their number changes no result."
)
_AT_ONCE = (
    "Clients that torch trains together, by default what suits model and device; fewer need less memory. Another "
    "number rounds otherwise: results differ by round-off, not bit for bit the same."
)
_RAY = (
    "Train on the workers of a Ray cluster: that of this machine (auto), a new one on this machine (local), or the one "
    "at HOST:PORT. processes is then how many, by default one for each of its CPUs, or GPUs."
)
_PLAN = (
    "The folder of a plan bundle to train as it is: on its graphs, from its weights, with its algorithm, settings and "
    "compression. model and algorithm then say where your own are imported from."
)
_START = "A file with the model to start from, as runs and `muster task checkpoint` write it; by default a random one."


USER = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What the columns of a table mean. Raises DatasetError for inputs without a target, or the reverse.

    user: the column of users. inputs: columns of numbers, which become `x`, or one of texts, which becomes `text`.
    target: the column that becomes `y`, or `label` beside texts; texts are numbered in their order. Without the two,
    every column is a field by its own name. drop_missing: leave out the rows that lack a value of those columns.
    """

    user: str = USER
    inputs: tuple[str, ...] = ()
    target: str = ""
    drop_missing: bool = False

    def __post_init__(self) -> None:
        if bool(self.inputs) != bool(self.target):
            there, missing = ("inputs", "target") if self.inputs else ("target", "inputs")
            raise DatasetError(f"{there} needs {missing} too: the columns that a model reads, and the one it predicts")
        named = [self.user, *self.inputs, self.target]
        twice = [name for name in named if named.count(name) > 1]
        if self.inputs and twice:
            raise DatasetError(f"column {twice[0]!r} is named twice among user, inputs and target")

    def read(self, names: Sequence[str], where: str) -> list[str]:
        """Those of a table's columns that are read. Raises DatasetError for one that is not there."""
        wanted = [*([] if self.user == USER else [self.user]), *self.inputs, *([self.target] if self.inputs else [])]
        absent = next((name for name in wanted if name not in names), None)
        if absent is not None:
            raise DatasetError(f"{where} has no column {absent!r}; {offered(absent, names)}")
        return [name for name in names if not self.inputs or name == self.user or name in wanted]


EVERY_COLUMN = Columns()


@checked(EngineError)
class PrivateTraining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a simulation is private; by default not at all. Raises EngineError naming what is wrong.

    delta goes with epsilon or with noise_multiplier, and what is 0 follows from the other.
    """

    epsilon: Annotated[NotNegative, setting("Most that all rounds together may spend; gives the noise.")] = 0.0
    delta: Annotated[NotNegative, setting(DELTA)] = 0.0
    noise_multiplier: Annotated[NotNegative, setting("Noise on a sum over the bound on a report; gives epsilon.")] = 0.0
    mechanism: Annotated[Mechanism, setting("How sums are noised; distributed goes with secagg.")] = "gaussian"
    min_separation_rounds: Annotated[WholeFromOne, setting("Groups of users that take turns to train.")] = 1
    bands: Annotated[WholeFromOne, setting(BANDS)] = 1
    poisson: Annotated[bool, setting("Draw each user anew in every round; the cohort is then a mean.")] = False

    def __post_init__(self) -> None:
        check(self)
        if self.asked and bool(self.epsilon) == bool(self.noise_multiplier):
            raise EngineError("give either epsilon, from which the noise follows, or noise_multiplier")
        if self.asked and not self.delta:
            raise EngineError("delta is missing: the chance that its ε does not hold: below 1 / users, as delta=1e-6")

    @property
    def asked(self) -> bool:
        """Whether there is any."""
        return msgspec.structs.asdict(self) != _NOTHING


_NOTHING = dict(zip(PrivateTraining.__struct_fields__, PrivateTraining.__struct_defaults__, strict=True))
LEAST_POISSON = 20
"""The least mean cohort with Poisson sampling: nobody is drawn then in one round of 10^8."""
_NOT_OF_BASELINES = ("schedule", "privacy", "compress", "secagg", "start", "against", "fine_tune")
_NOT_OF_LOCAL = ("hold_out_examples", "engine", "processes", "ray")
_NOT_OF_LINEAR = ("own_examples", "local")
"""Settings that no baseline has, that only `pooled` has, and that the linear models have not either."""


@checked(EngineError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Settings of a simulation. Held-out users measure the model every `evaluate_every` rounds and after the last.

    With a `plan`, `completed_by_plan` says what of the others is its own. A linear baseline has settings of its own and
    no algorithm. Raises EngineError naming the setting and what it may be, and CompressionError.
    """

    model: Annotated[str, setting("A built-in model, package.module:function or file.py:function.")]
    plan: Annotated[Path, setting(_PLAN)] | None = None
    start: Annotated[Path, setting(_START)] | None = None
    against: Annotated[Path, setting("With compare: the other model, in such a file.")] | None = None
    local: Annotated[str, setting(LOCAL)] = ""
    dataset: Annotated[str, setting(_DATASET)] = "digits"
    data: Annotated[Path, setting(DATA)] | None = None
    user: Annotated[str, setting(USER_COLUMN)] = ""
    inputs: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        setting(INPUT_COLUMNS, allowed="names of columns"),
    ] = ()
    target: Annotated[str, setting(TARGET_COLUMN)] = ""
    drop_missing: Annotated[bool, setting(DROP_MISSING)] = False
    standardise: Annotated[bool, setting(_STANDARDISE)] = False
    partition: Annotated[str, setting(_PARTITION)] | None = None
    clients: (
        Annotated[WholeFromOne, setting("Number of clients, by default all; without partition, a sample of users.")]
        | None
    ) = None
    algorithm: Annotated[
        str, setting("An algorithm (`muster algorithms list`), or your own as package.module:Class or file.py:Class.")
    ] = "fedavg"
    baseline: Annotated[Baseline, setting(_BASELINE)] | None = None
    settings: Annotated[dict[str, Any], setting("Settings of the algorithm or the baseline.")] = field(
        default_factory=dict
    )
    privacy: Annotated[PrivateTraining, setting("Noise on every sum, of clipped reports (clip_norm).")] = field(
        default_factory=PrivateTraining
    )
    rounds: Annotated[WholeFromOne, setting("Rounds to run.")] = 100
    cohort: Annotated[WholeFromOne, setting("Users per round; in round 1, where schedule has it grow.")] = 10
    held_out: Annotated[float, setting("Share of users who measure and never train.", gt=0, lt=1)] = HELD_OUT
    own_examples: Annotated[bool, setting(_OWN_EXAMPLES)] = False
    fine_tune: Annotated[Count, setting(_FINE_TUNE)] = 0
    hold_out_examples: Annotated[float, setting(HOLD_OUT, ge=0, lt=1)] = 0.0
    on_held_out_examples: Annotated[bool, setting(ON_HELD_OUT)] = False
    evaluate_every: Annotated[WholeFromOne, setting("Rounds between two measurements on held-out users.")] = 10
    target_accuracy: Annotated[float, setting("End when held-out users reach this accuracy.", gt=0, le=1)] | None = None
    patience: (
        Annotated[WholeFromOne, setting("End when the loss of held-out users has not fallen for so many rounds.")]
        | None
    ) = None
    engine: Annotated[Wanted, setting(_ENGINE)] = "auto"
    device: Annotated[str, setting(_DEVICE)] = "cpu"
    processes: Annotated[WholeFromOne, setting(_PROCESSES)] | None = None
    at_once: Annotated[WholeFromOne, setting(_AT_ONCE)] | None = None
    ray: Annotated[str, setting(_RAY)] | None = None
    compress: Annotated[str, setting(COMPRESS)] = ""
    seed: Annotated[Count, setting("Seed of split, weights, cohorts and order.")] = 0
    schedule: Annotated[ServerSchedule, setting("How learning rate and cohort change from round to round.")] = field(
        default_factory=ServerSchedule
    )
    same_cohort: Annotated[bool, setting("Of two trips: train in the second the users of the first.")] = False
    secagg: Annotated[Secagg | None, setting("Mask reports as a task does; without, they are summed in the clear.")] = (
        None
    )

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # values may be NumPy's, as a notebook computes them
            object.__setattr__(self, name, without_numpy(getattr(self, name)))
        check(self)
        object.__setattr__(self, "model", own_name(self.model))
        self._check_compression()
        self._check_plan()
        if self.on_held_out_examples and not self.hold_out_examples:
            raise EngineError("on_held_out_examples needs hold_out_examples, without which no example is held out")
        self._check_own_examples()
        if self.baseline is not None:
            self._check_baseline()
        if self.privacy.asked:
            self._check_private()

    @property
    def columns(self) -> Columns:
        """What the columns of its table mean. Raises DatasetError."""
        return Columns(
            user=self.user or USER, inputs=tuple(self.inputs), target=self.target, drop_missing=self.drop_missing
        )

    def _check_plan(self) -> None:
        if self.plan is not None and (self.baseline is not None or self.engine == "torch"):
            other = f"the engine {self.engine}" if self.baseline is None else f"the baseline {self.baseline}"
            raise EngineError(f"a plan trains by its own graphs, not by {other}; leave one of them out")
        if self.plan is not None and self.start is not None:
            raise EngineError("a plan has its own initial state; leave start out, or the plan")
        if self.plan is not None and self.standardise:
            raise EngineError("a plan reads its inputs as it does; leave standardise out, or the plan")
        if self.plan is not None and self.local:
            raise EngineError("a plan has its own local parameters; leave local out, or the plan")

    def _check_own_examples(self) -> None:
        if self.own_examples and self.hold_out_examples:
            raise EngineError("own_examples holds the share held_out of them out: leave hold_out_examples out")
        if self.fine_tune and not self.own_examples:
            raise EngineError("fine_tune needs own_examples: held-out users have no examples to train on")

    def _check_compression(self) -> None:
        from fedcore.compression import Compression  # needs NumPy, which a command does not for its help

        compression = Compression.parse(self.compress)
        if self.secagg is not None:
            if compression.bits:
                raise EngineError("masked reports are rounded as secagg says: leave bits out of compress")
        elif self.privacy.asked and (compression.bits or any(name != "rotation" for name, _ in compression.steps)):
            raise EngineError("privacy needs a compression that keeps the length of a report: rotation alone, or none")

    def _check_private(self) -> None:
        asked, drawn_alike = self.privacy, self.cohort >= LEAST_POISSON and not self.schedule.double_every
        if asked.mechanism == "distributed" and self.secagg is None:
            raise EngineError("with the mechanism distributed devices add noise to masked reports: set secagg too")
        if asked.poisson and not drawn_alike:
            raise EngineError(f"Poisson sampling needs a cohort of {LEAST_POISSON} or more, that does not grow")
        if self.same_cohort and asked.min_separation_rounds > 1:
            raise EngineError("same_cohort has users in two rounds in a row, and min_separation_rounds forbids it")

    def _check_baseline(self) -> None:
        linear, plain = self.baseline in get_args(LinearBaseline), SimulationConfig(model=self.model)
        names = _NOT_OF_BASELINES + (_NOT_OF_LOCAL if self.baseline != "pooled" else ()) + (_NOT_OF_LINEAR * linear)
        given = [name for name in names if getattr(self, name) != getattr(plain, name)]
        if given:
            what = "models of torch" if {*given} <= {*_NOT_OF_LINEAR} else "federated training"
            are = f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'}"
            raise EngineError(f"{are} for {what}, not for the baseline {self.baseline}")
        if linear and self.model not in LOSSES:
            raise EngineError(f"{self.baseline} trains a linear model: {' or '.join(LOSSES)}, not {self.model!r}")


def to_config(values: Mapping[str, Any]) -> SimulationConfig:
    """A configuration from plain values, such as a TOML file has. Raises EngineError naming the option.

    A table whose inputs are named gets the model mlp, which standardises them, unless there is a model.
    """
    check_names(values)
    of_table = TABLE_MODEL if values.get("inputs") and not values.keys() & {"model", "plan"} else {}
    return build(SimulationConfig, of_table | without_numpy(dict(values)))


def check_names(values: Mapping[str, Any]) -> None:
    """Raise EngineError for a setting of the algorithm that is named as if it were one of the simulation."""
    from fedcore.algorithms import setting_meant

    for name in values.keys() - SimulationConfig.__dataclass_fields__.keys():
        found = setting_meant(name, str(values.get("algorithm", "fedavg")))
        if found is not None:
            raise EngineError(f"{found[0]} is a setting of {found[1]}: write settings.{found[0]} = {values[name]!r}")


def without_numpy(value: Any) -> Any:
    """A value with Python's own numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {key: without_numpy(inner) for key, inner in value.items()}
    return value.item() if getattr(value, "ndim", None) == 0 else value


TABLE_MODEL: Mapping[str, Any] = {"model": "mlp", "standardise": True}
"""What a table gets whose inputs are named, without a model."""
SUITED: Mapping[str, Mapping[str, Any]] = {
    # With batches of 20 and steps of 0.1, the defaults, it predicts only spaces for dozens of rounds. The batch size is
    # from Reddi et al. 2021, Table 5.
    "char_lstm": {"batch_size": 4, "client_lr": 1.0},
}
"""Settings of local SGD that suit a built-in model better than the defaults of the algorithms.

A simulation uses them unless its configuration sets others.
"""
