"""The files of runs as objects, which may be read while they run, and runs grouped by what differs."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import safetensors
import safetensors.numpy

from fedcore.errors import why
from fedcore.validation import UNDECODABLE, decoder, offered
from simulator.configuration import SimulationConfig, to_config
from simulator.engines.computing import EngineName
from simulator.errors import EngineError, RunError
from simulator.simulation import SimulationResult
from simulator.training import LOSS, Point, Tensors, Vectors

WHO_TRAINS = {"processes", "ray"}


def to_toml(config: SimulationConfig) -> str:
    """A configuration as TOML text: what is not None, then a table for each of `settings` and `schedule`."""
    plain = plain_of(config)
    tables = {name: value for name, value in plain.items() if isinstance(value, dict)}
    parts = [_lines({name: value for name, value in plain.items() if name not in tables})]
    parts += [f"\n[{name}]\n{_lines(table)}" for name, table in tables.items()]
    return "".join(parts)


def plain_of(config: SimulationConfig) -> dict[str, Any]:
    """A configuration as plain values, without those that are None."""
    plain: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return {name: value for name, value in plain.items() if value is not None}


def differences(config: SimulationConfig, other: SimulationConfig) -> list[str]:
    """Every key in which two configurations differ, with both values; WHO_TRAINS, which changes no result, apart."""
    ours, theirs = flat_of(config), flat_of(other)
    keys = [
        key for key in dict.fromkeys([*ours, *theirs]) if key not in WHO_TRAINS and ours.get(key) != theirs.get(key)
    ]
    return [f"{key} ({_words(ours.get(key))} and {_words(theirs.get(key))})" for key in keys]


def flat_of(config: SimulationConfig) -> dict[str, Any]:
    """A configuration as plain values by dotted names, such as `settings.client_lr`."""
    flat: dict[str, Any] = {}
    for name, value in plain_of(config).items():
        flat |= {f"{name}.{key}": option for key, option in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _words(value: object) -> str:
    return "not given" if value is None else str(value)


def _lines(values: dict[str, Any]) -> str:
    # Text, numbers, truths and lists are written in TOML as in JSON, but for one character.
    written = {name: msgspec.json.encode(value).decode().replace("\x7f", "\\u007f") for name, value in values.items()}
    return "".join(f"{name} = {text}\n" for name, text in written.items())


CONFIG, ENGINE, METRICS, RESULT, LOCK = "config.toml", "engine.json", "metrics.jsonl", "result.json", "lock"
CHECKPOINT, MODEL = "checkpoint-*.safetensors", "model.safetensors"
_CHECKPOINT = re.compile(CHECKPOINT.replace("*", "[0-9]+"))
SECONDS = "seconds"
AXES = {"rounds": "round", "examples": "examples", "seconds": SECONDS}
"""What a figure may be drawn over, and the figure of a round that it adds up."""

T = TypeVar("T")


class KeptEngine(msgspec.Struct, frozen=True):
    """The engine with which a run began, and why that one; None where no engine trains."""

    engine: EngineName | None
    reason: str | None


_POINT = decoder(Point)
_RESULT = decoder(SimulationResult)
_ENGINE = decoder(KeptEngine)


@dataclass(frozen=True, slots=True)
class Run:
    """What the folder of a run holds so far.

    points: every round's figures, `seconds` of wall time among them. result: None before the end.
    """

    path: Path
    config: SimulationConfig
    points: Sequence[Point]
    result: SimulationResult | None

    @property
    def curve(self) -> list[Point]:
        """The points that held-out users measured."""
        return [point for point in self.points if LOSS in point]

    def series(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """A figure over rounds, examples or wall seconds (AXES), at the points that have it: x and y.

        Raises RunError when no point has it, naming those that there are.
        """
        reached = itertools.accumulate(point[AXES[x]] for point in self.points)
        along = [point["round"] for point in self.points] if x == "rounds" else list(reached)
        points = [(at, point[y]) for at, point in zip(along, self.points, strict=True) if y in point]
        if not points:
            if not self.points:
                raise RunError(f"the run in {self.path} has done no round yet")
            names = list(dict.fromkeys(name for point in self.points for name in point))
            raise RunError(f"the run in {self.path} has no figure {y!r} yet; {offered(y, names)}")
        return [at for at, _ in points], [value for _, value in points]

    def vectors(self) -> Vectors:
        """What the last whole checkpoint holds; the model is `server.params`. Raises RunError before the first."""
        for path in checkpoints(self.path):
            vectors = read_vectors(path)
            if vectors is not None:
                return vectors
        raise RunError(f"{self.path} has no checkpoint yet")


def read_run(path: Path | str) -> Run:
    """The run in a folder, which may still go on. Raises RunError when there is none."""
    path = Path(path)
    return Run(path, read_config(path), read_metrics(path), read_result(path))


def read_config(path: Path) -> SimulationConfig:
    """The configuration of the run in a folder. Raises RunError when there is none."""
    try:
        return to_config(tomllib.loads((path / CONFIG).read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, EngineError) as error:
        raise RunError(f"{path} is not the folder of a run: its {CONFIG} cannot be read: {why(error)}") from error


def read_engine(path: Path) -> KeptEngine:
    """The engine with which the run in a folder began. Raises RunError."""
    return _read(path / ENGINE, _ENGINE)


def read_result(path: Path) -> SimulationResult | None:
    """The result of the run in a folder, or None before its end. Raises RunError when it cannot be read."""
    return _read(path / RESULT, _RESULT) if (path / RESULT).exists() else None


def read_metrics(path: Path) -> list[Point]:
    """The points of all rounds of the run in a folder, each with its wall time `seconds`. Raises RunError."""
    return [_POINT.decode(line) for line in whole_lines(path)]


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a run's metrics up to the first that is torn or out of order. Raises RunError."""
    try:
        data = (path / METRICS).read_bytes()
    except OSError as error:
        raise RunError(f"{path} is not the folder of a run: its {METRICS} cannot be read: {why(error)}") from error
    whole: list[bytes] = []
    for line in data.split(b"\n")[:-1]:
        try:
            if _POINT.decode(line)["round"] != len(whole) + 1:
                break
        except (*UNDECODABLE, KeyError):
            break
        whole.append(line)
    return whole


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a folder, the last first."""
    return sorted(
        (file for file in path.glob(CHECKPOINT) if _CHECKPOINT.fullmatch(file.name)), key=round_of, reverse=True
    )


def round_of(checkpoint: Path) -> int:
    """The round after which a checkpoint was made."""
    return int(checkpoint.stem.rpartition("-")[2])


def read_vectors(path: Path) -> Vectors | None:
    """What a checkpoint holds, or None when it is not whole or there no more."""
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
    except (safetensors.SafetensorError, OSError):
        return None
    return {name: array.copy() for name, array in arrays.items()}


def read_tensors(path: Path) -> Tensors:
    """The model of the run in a folder as named tensors; empty without one, or before the end. Raises RunError."""
    file = path / MODEL
    try:
        return safetensors.numpy.load(file.read_bytes()) if file.exists() else {}
    except (safetensors.SafetensorError, OSError) as error:
        raise RunError(f"{file} cannot be read: {why(error)}") from error


def course_of(lines: Sequence[bytes]) -> list[Point]:
    """The course that lines of metrics tell, without wall times."""
    return [{name: value for name, value in _POINT.decode(line).items() if name != SECONDS} for line in lines]


def _read(path: Path, kind: msgspec.json.Decoder[T]) -> T:
    try:
        return kind.decode(path.read_bytes())
    except (OSError, *UNDECODABLE) as error:
        raise RunError(f"{path} cannot be read: {why(error)}") from error


class Configured(Protocol):
    """A run, kept in a folder or in memory."""

    @property
    def config(self) -> SimulationConfig:
        """What it was made of."""


R = TypeVar("R", bound=Configured)

_OWN = "settings."
"""The beginning of the names of an algorithm's own settings."""


def grouped(runs: Sequence[R], places: Sequence[str]) -> dict[str, list[R]]:
    """Runs by a label that names the settings in which they differ, as `algorithm=fedavg, client_lr=0.1`.

    Where none differ, it names model and algorithm. Runs with the same settings and the same seed, as of a fleet and of
    its simulation, are a group each, whose label ends with the run's place.
    """
    settings = [_settings(run) for run in runs]
    named = [key for key in dict.fromkeys(key for one in settings for key in one) if _differ(key, settings)]
    ends = Counter(key.rpartition(".")[2] for key in named)
    short = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in named}
    groups: dict[str, list[tuple[R, str]]] = {}
    for run, place, one in zip(runs, places, settings, strict=True):
        words = [f"{short[key]}={_value_words(one.get(key))}" for key in named if _belongs(key, one, settings)]
        label = ", ".join(words) or f"{run.config.model}, {run.config.baseline or run.config.algorithm}"
        groups.setdefault(label, []).append((run, place))
    return {name: part for label, group in groups.items() for name, part in _told_apart(label, group).items()}


def _settings(run: Configured) -> dict[str, Any]:
    return {key: value for key, value in flat_of(run.config).items() if key not in {*WHO_TRAINS, "seed"}}


def _differ(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting differs among runs; one of an algorithm, among runs of that algorithm, whose name says more."""
    pairs = {(_method(one) if key.startswith(_OWN) else None, _value_words(one.get(key))) for one in settings}
    return len(pairs) > len({method for method, _ in pairs})


def _belongs(key: str, one: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run could have a setting: one of an algorithm is only for runs of that algorithm."""
    return not key.startswith(_OWN) or any(key in other and _method(one) == _method(other) for other in settings)


def _method(one: Mapping[str, Any]) -> tuple[Any, Any]:
    return one.get("algorithm"), one.get("baseline")


def _told_apart(label: str, group: list[tuple[R, str]]) -> dict[str, list[R]]:
    if len({run.config.seed for run, _ in group}) == len(group):
        return {label: [run for run, _ in group]}
    return {f"{label}, {place}": [run] for run, place in group}


def _value_words(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
