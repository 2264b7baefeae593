"""A check of an algorithm against its contract: a rehearsal on probes, alone and with two devices at once.

It finds what would go wrong later, elsewhere and without a word: a function that writes into an argument, that asks
vectors for more than operators, that gives vectors of a wrong shape, or whose report depends on the other devices.
Messages name the line. Built-in algorithms pass it; it is made for those of users.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from fedcore.algorithms import algorithm as contract, rehearsal
from fedcore.errors import InvalidAlgorithm
from fedcore.report import WEIGHT
from fedcore.schedule import Range, Weighting

SIZE, DEVICES = 5, 2
"""Parameters of the model and devices of the cohort in a check: different, so that one is not taken for the other."""
_SAME = 1e-9
_OURS = tuple(str(Path(__file__).with_name(name)) for name in ("check.py", "probe.py", "rehearsal.py"))
_AMONG_DEVICES = "; a report is averaged, so it may use only this device's vectors: .sum(-1)[..., None], x[..., :1]"


def check(algorithm: contract.Algorithm) -> None:
    """Check that the algorithm keeps its contract. Raises InvalidAlgorithm, naming the function and the line."""
    params = rehearsal.Probe(np.linspace(-1.0, 1.0, SIZE))
    algorithm = rehearsal.for_any_model(algorithm)
    _check_declared(algorithm)
    with np.errstate(all="ignore"):
        first, again = (
            rehearsal.rehearse(algorithm, params, _Bowl(np.ones(SIZE)), _Watched(algorithm.name)) for _ in range(2)
        )
        for trip, one, other in zip(contract.trips_of(algorithm), first, again, strict=True):
            changed = [name for name, vector in one.report.items() if not _equal(vector, other.report[name])]
            if changed:
                why = "it keeps something from one call to the next, or draws random numbers"
                words = f"report gives another {changed[0]!r} for the same examples: {why}"
                raise _wrong(algorithm.name, words, trip.report)
            _check_ranges(algorithm, trip, one.report)
            for batched in (False, True):
                _check_cohort(algorithm, trip, one.broadcast, batched)
        if contract.keeps_client_state(algorithm):
            _check_client_state(algorithm, dict(first[0].broadcast))


def _check_client_state(algorithm: contract.StatefulAlgorithm, broadcast: dict[str, rehearsal.Probe]) -> None:
    """Refuse a client state that hides a vector of the broadcast, or that changes its names or shapes in a round."""
    call = _Watched(algorithm.name)
    client = call("init_client", algorithm.init_client, broadcast["params"])
    for name in sorted(set(client) & set(broadcast)):
        words = f"init_client gives {name!r}, which the broadcast has too; give the client's vector another name"
        raise _wrong(algorithm.name, words, algorithm.init_client)
    given = broadcast | client
    kept = call("keep", algorithm.keep, given, rehearsal.carried(algorithm, given, _Bowl(np.ones(SIZE)), call))
    if _shapes(kept) != _shapes(client):
        words = f"keep gives the vectors {_shapes(kept)}, init_client {_shapes(client)}; they must be the same"
        raise _wrong(algorithm.name, words, algorithm.keep)


def _check_declared(algorithm: contract.Algorithm) -> None:
    """Refuse a weighting or names of passes that no plan can have."""
    if algorithm.weighting not in get_args(Weighting):
        words = f"weighting is {algorithm.weighting!r}; it must be one of {', '.join(get_args(Weighting))}"
        raise _wrong(algorithm.name, words, algorithm.init)
    for trip in contract.trips_of(algorithm):
        names = [stage.name for stage in trip.passes]
        if not names or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
            words = f"its passes are called {names}; there must be one at least, each with a name of its own"
            raise _wrong(algorithm.name, words, trip.report)


def _check_ranges(algorithm: contract.Algorithm, trip: contract.Trip, report: Mapping[str, rehearsal.Probe]) -> None:
    """Refuse ranges of vectors that are not in the report, or that are multiplied by a weight."""
    for name, within in contract.ranges_of(trip).items():
        if name not in report or not isinstance(within, Range):
            words = f"ranges has {within!r} for {name!r}; it maps names of the report, {sorted(report)}, to Ranges"
            raise _wrong(algorithm.name, words, trip.report)
        if algorithm.weighting != "uniform":
            words = f"{name!r} has a range, which needs weighting='uniform', not {algorithm.weighting!r}"
            raise _wrong(algorithm.name, words, trip.report)


def _check_cohort(
    algorithm: contract.Algorithm, trip: contract.Trip, broadcast: Mapping[str, rehearsal.Probe], batched: bool
) -> None:
    """Refuse a report that is not, of every device of a cohort, what that device alone would report.

    batched: whether the broadcast has the axis of devices too; carries always have.
    """
    centres = np.linspace(2.0, 5.0, DEVICES)[:, None] * np.ones(SIZE)
    received_D = rehearsal.received(algorithm, dict(broadcast))
    spread_KD = _spread(received_D) if batched else received_D
    call = _Watched(algorithm.name, with_devices=True)
    together = rehearsal.contribute(trip, spread_KD, _Bowl(centres), call, _spread)
    for index, centre in enumerate(centres):
        alone = rehearsal.contribute(trip, received_D, _Bowl(centre))
        for name, vector in alone.items():
            found = together[name].values
            of_device = rehearsal.Probe(found[index] if found.ndim > vector.values.ndim else found)
            if not _equal(vector, of_device):
                words = f"{name!r} of a report is another when {DEVICES} devices are computed at once"
                raise _wrong(algorithm.name, words + _AMONG_DEVICES, trip.report)


def _spread(vectors: Mapping[str, rehearsal.Probe]) -> dict[str, rehearsal.Probe]:
    """Vectors (n,) for all devices at once (K, n)."""
    return {
        name: rehearsal.Probe(np.repeat(vector.values[None], DEVICES, 0)) if vector.values.ndim == 1 else vector
        for name, vector in vectors.items()
    }


class _Bowl(rehearsal.Bowl):
    """A bowl with its minimum at `centre`, `(D,)` or `(K, D)`, that looks at the vectors that it is asked for."""

    def __init__(self, centre: Any) -> None:
        super().__init__(rehearsal.Probe(np.ones(SIZE)), rehearsal.Probe(centre))

    def __call__(self, params: contract.Vector) -> tuple[contract.Vector, contract.Vector, contract.Vector]:
        """The gradient oracle."""
        _check_model("grad", params)
        return super().__call__(params)

    def measure(self, metrics: int) -> contract.Measure:
        """The oracle of a forward pass."""
        sums = super().measure(metrics)

        def measure(params: contract.Vector) -> contract.Vector:
            _check_model("measure", params)
            return sums(params)

        return measure


def _check_model(oracle: str, params: contract.Vector) -> None:
    if not isinstance(params, rehearsal.Probe) or params.values.shape[-1:] != (SIZE,):
        raise rehearsal.NotAnOperator(
            f"{oracle}(…) takes the vector of a model, as large as broadcast['params'], and nothing else"
        )


class _Watched:
    """Calls functions of an algorithm with vectors that cannot be written into, and looks at what they give.

    with_devices: whether vectors may have the axis of devices in front.
    """

    def __init__(self, name: str, *, with_devices: bool = False) -> None:
        self._name, self._with_devices = name, with_devices

    def __call__(self, what: str, function: Callable[..., Any], *arguments: Any) -> dict[str, contract.Vector]:
        try:
            given = function(*map(_sealed, arguments))
        except InvalidAlgorithm:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise _wrong(self._name, f"{what}{self._reason(error)}", function, error) from error
        if not isinstance(given, Mapping):
            words = f"{what} returns {type(given).__name__}, not a dictionary of vectors"
            raise _wrong(self._name, words, function)
        for name, value in given.items():
            self._look_at(what, function, name, value)
        wrong = self._unfit(what, given, arguments)
        if wrong:
            raise _wrong(self._name, f"{what} {wrong}", function)
        return dict(given)

    def _look_at(self, what: str, function: Callable[..., Any], name: object, value: object) -> None:
        """Refuse what is no vector, or one with a wrong name or number of axes."""
        if not isinstance(name, str) or not name.isidentifier():
            raise _wrong(self._name, f"{what} calls a vector {name!r}; use letters, digits and _", function)
        if not isinstance(value, rehearsal.Probe):
            remedy = "a vector of size 1 is 0.0 * params[..., :1] + value"
            raise _wrong(self._name, f"{what} gives {name!r} as {type(value).__name__}; {remedy}", function)
        if value.values.ndim not in ((1, 2) if self._with_devices else (1,)) or not value.values.size:
            shape = value.values.shape
            remedy = "a vector has one axis; a sum is one as .sum(-1)[..., None]"
            raise _wrong(self._name, f"{what} gives {name!r} in the shape {shape}; {remedy}", function)

    def _unfit(self, what: str, given: Mapping[str, rehearsal.Probe], arguments: Sequence[Any]) -> str:
        """What is wrong with vectors that are fine one by one; empty if nothing."""
        if what in ("init", "broadcast"):
            if "params" not in given:
                return "gives no params, which are the model"
            size = given["params"].values.shape[-1]
            return "" if size == SIZE else f"gives params of size {size} for a model of size {SIZE}"
        if what == "report" and (not given or WEIGHT in given):
            return f"must give vectors, none of them called {WEIGHT!r}"
        before, after = _shapes(arguments[0]) if what.startswith(("step", "update")) else {}, _shapes(given)
        if before and before != after:
            words = [", ".join(f"{name} {shape}" for name, shape in shapes.items()) for shapes in (before, after)]
            return f"was given the vectors {words[0]} and must give these; it gives {words[1]}"
        return ""

    def _reason(self, error: Exception) -> str:
        words = str(error).strip().partition("\n")[0]
        if isinstance(error, rehearsal.NotAnOperator):
            return f": {words}"
        if "read-only" in words or "mappingproxy" in words:
            return " writes into an argument; make a new vector or dictionary instead, such as x = x + y"
        at_once = f" with {DEVICES} devices at once" if self._with_devices else ""
        return f" fails{at_once} with {type(error).__name__}: {words}{_AMONG_DEVICES if at_once else ''}"


def _sealed(value: Any) -> Any:
    """The same value, which cannot be written into."""
    if isinstance(value, rehearsal.Probe):
        return value.sealed()
    return MappingProxyType({name: _sealed(one) for name, one in value.items()}) if isinstance(value, dict) else value


def _shapes(vectors: Mapping[str, rehearsal.Probe]) -> dict[str, tuple[int, ...]]:
    return {name: vector.values.shape for name, vector in sorted(vectors.items())}


def _equal(one: rehearsal.Probe, other: rehearsal.Probe) -> bool:
    same = one.values.shape == other.values.shape
    return same and np.allclose(one.values, other.values, rtol=_SAME, atol=_SAME, equal_nan=True)


def _wrong(name: str, words: str, function: Callable[..., Any], error: BaseException | None = None) -> InvalidAlgorithm:
    """The error that says what is wrong and in which line: that which raised `error`, else that of the function."""
    return InvalidAlgorithm(f"{name}: {words} ({_raised_at(error) or _defined_at(function)})")


def _raised_at(error: BaseException | None) -> str:
    """The last line of an algorithm's own code on the way to an error, as `file:number: text`."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    theirs = [one for one in frames if one.filename not in _OURS and "/site-packages/" not in one.filename]
    return f"{_shown(theirs[-1].filename)}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""


def _defined_at(function: Callable[..., Any]) -> str:
    """Where a function begins, as `file:number`."""
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def _shown(file: str) -> str:
    """A file as short as the working folder allows."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
