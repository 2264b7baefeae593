"""A study: a question of a paper, its trials (trainings in named series, with several seeds), and its report.

A study is one function. It has its trials run, each with every seed, and puts what they measured into tables and plots.
It may look at the first trials before it asks for more, as a search for a learning rate does.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from export.model import Model
from fedcore.private_files import write_whole
from fedcore.report import WEIGHT, ReportLayout, Segment, metrics_segment
from fedcore.schedule import Weighting
from fedcore.validation import UNDECODABLE, decoder
from muster.output import markdown
from muster.pictures import Axes, Picture, draw_bands, draw_heat_map, ends_and_mean, write_svg_and_png
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engines.processes import with_kept
from simulator.errors import Diverged, StudyError
from simulator.simulation import training_on
from simulator.training import Training, overall

BONAWITZ = "Bonawitz et al., *Towards federated learning at scale: system design*, MLSys 2019"
CHARLES = "Charles, Garrett, Huo, Shmulyian, Smith, *On large-cohort training for federated learning*, NeurIPS 2021"
COLLINS = (
    "Collins, Hassani, Mokhtari, Shakkottai, *Exploiting shared representations for personalized federated learning*, "
    "ICML 2021"
)
FIELD_GUIDE = "Wang et al., *A field guide to federated optimization*, arXiv:2107.06917, 2021"
HU = "Hu et al., *LoRA: low-rank adaptation of large language models*, ICLR 2022"
KAIROUZ = (
    "Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, *Practical and private (deep) learning without sampling or "
    "shuffling*, ICML 2021"
)
KONECNY_COMMUNICATION = (
    "Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, *Federated learning: strategies for improving communication "
    "efficiency*, arXiv:1610.05492, 2016"
)
PAPAYA = "Huba et al., *Papaya: practical, private, and scalable federated learning*, MLSys 2022"


PerSeed = Sequence[float | None]
"""A number for each seed, shown as mean and deviation; None where training diverged, or the number does not exist."""
Row = list[str | float | PerSeed]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table. The cells of a row are one for each column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers over two settings, drawn as a heat map. values: by row, then by column."""

    title: str
    row_name: str
    rows: Sequence[float]
    column_name: str
    columns: Sequence[float]
    values: Sequence[Sequence[PerSeed]]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of numbers over x, each with a band from the lowest to the highest seed.

    curves: by name, the points (x, a number for each seed). log_x, log_y: whether an axis is logarithmic.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, PerSeed]]]
    log_x: bool = False
    log_y: bool = False


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a study found. setup: data, model and settings that all trials have in common, in words."""

    setup: str
    tables: Sequence[Table] = ()
    grids: Sequence[Grid] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A study. paper: authors, title, venue and year. find: runs the trials; with `Trials.quick` smaller ones."""

    name: str
    question: str
    paper: str
    find: Callable[[Trials], Findings]


def mean(values: PerSeed) -> float | None:
    """The mean; None where one of the numbers does not exist."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present and len(present) == len(values) else None


Series = dict[str, list[float | None]]
"""Numbers by name; None, in JSON as here, stands for a number that does not exist, and NaN becomes None."""
Case = Mapping[str, Any]
"""The arguments of a trial by name: values that JSON can hold, or paths."""
Progress = Callable[[int, int], None]


class _Trial(msgspec.Struct, frozen=True):
    """A finished trial. cpu_s: its CPU time."""

    series: Series
    cpu_s: float


_TRIAL = decoder(_Trial)


class Trials:
    """Runs trials for a study.

    folder: keeps finished trials, so that a study which was interrupted goes on where it was. A trial is known again by
    its function, the source file of that, its case and its seed; after a change of other code delete the folder.
    seeds: every case is run with each. quick: whether the study should take its smallest sizes. data: the folder that
    holds data sets on disk. on_progress: called with the numbers of finished trials and of all that were asked for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seeds: Sequence[int] = (0, 1, 2),
        quick: bool = False,
        data: Path | None = None,
        processes: int = 1,
        on_progress: Progress = lambda done, total: None,
    ) -> None:
        self.seeds, self.quick, self.data = tuple(seeds), quick, data
        self.cpu_s = 0.0
        self._folder, self._processes, self._on_progress = folder, processes, on_progress
        self._done = self._total = 0

    def run(self, measure: Callable[..., Series], cases: Sequence[Case]) -> list[list[Series]]:
        """What `measure(**case, seed=seed)` gives for each case, by seed.

        Each trial runs in a process of its own. Raises StudyError when a trial fails, with its case, its seed, and the
        words of what it raised.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        runs = [(case, seed) for case in cases for seed in self.seeds]
        paths = [self._folder / f"{_digest(measure, case, seed)}.json" for case, seed in runs]
        kept = [_read(path) for path in paths]
        self._total += len(runs)
        self._on_progress(self._done, self._total)
        if None in kept:
            import_module("torch._dynamo")  # torch.func loads it when it is first used: here once, not in every process
        computations = [functools.partial(_measured, measure, *run) for run in runs]
        series: dict[int, Series] = {}
        for index, trial in with_kept(kept, computations, _TRIAL, self._processes):
            if isinstance(trial, Exception):
                raise _failed(*runs[index], trial) from trial
            if kept[index] is None:
                write_whole(paths[index], msgspec.json.encode(trial))
            series[index] = trial.series
            self.cpu_s += trial.cpu_s
            self._done += 1
            self._on_progress(self._done, self._total)
        in_order = (series[index] for index in range(len(runs)))
        return [[next(in_order) for _ in self.seeds] for _ in cases]


def _measured(measure: Callable[..., Series], case: Case, seed: int) -> _Trial:
    series = measure(**case, seed=seed)
    return _Trial(series, time.process_time())


def _failed(case: Case, seed: int, error: Exception) -> StudyError:
    words = ", ".join(f"{name} {value}" for name, value in [*case.items(), ("seed", seed)])
    return StudyError(f"the trial with {words} failed: {error}")


def _digest(measure: Callable[..., Series], case: Case, seed: int) -> str:
    """What a trial is known by."""
    source = hashlib.sha256(Path(inspect.getfile(measure)).read_bytes()).hexdigest()
    identity = [measure.__qualname__, source, dict(case), seed]
    return hashlib.sha256(msgspec.json.encode(identity, enc_hook=str, order="sorted")).hexdigest()[:24]


def _read(path: Path) -> _Trial | None:
    """A trial that is kept; None where there is none, or a damaged one."""
    try:
        return _TRIAL.decode(path.read_bytes())
    except (OSError, *UNDECODABLE):
        return None


LAST = 3
"""The final accuracy is the mean of the last three measurements: one alone depends on the last cohort."""


def averaged_layout(model: Model, weighting: Weighting) -> ReportLayout:
    """The layout of a report of `fedavg`."""
    segments = (
        Segment("delta", model.schema.size, "mean"),
        Segment(WEIGHT, 1, "sum"),
        Segment(metrics_segment("train"), len(model.metrics), "sum", model.metrics),
    )
    return ReportLayout(segments, weighting)


def train(*, seed: int, clients: int | None = None, **config: Any) -> Series:
    """The series of a simulation; `config` has fields of SimulationConfig. See `measured`.

    clients: over how many a data set without users of its own is partitioned, held-out ones included.
    """
    chosen = SimulationConfig(seed=seed, **config)
    users = datasets.load(chosen.dataset, chosen.data, clients, chosen.partition).split(chosen.held_out, seed)
    return measured(training_on(users, chosen), chosen.rounds, chosen.evaluate_every)


def measured(training: Training, rounds: int, every: int) -> Series:
    """A training's series: `loss` of training in every round; and measurements on unseen users every so many rounds.

    Those are `accuracy` and `test_loss` over all examples; `user_mean`, the mean of users' accuracies; and `low` and
    `median`, their 10th and 50th percentile. Once training has diverged the numbers do not exist.
    """
    names = ("accuracy", "test_loss", "user_mean", "low", "median")
    lengths = {"loss": rounds} | dict.fromkeys(names, rounds // every)
    series: dict[str, list[float | None]] = {name: [] for name in lengths}
    try:
        for number in range(1, rounds + 1):
            metrics = training.run_round(number)
            series["loss"].append(next(value for name, value in metrics.items() if name.endswith(".loss")))
            if number % every == 0:
                users = training.measure(number)
                low, median = np.percentile(users["accuracy"], [10, 50]).tolist()
                measurements = {
                    "accuracy": overall(users["accuracy"], training.test),
                    "test_loss": overall(users["loss"], training.test),
                    "user_mean": float(users["accuracy"].mean()),
                    "low": low,
                    "median": median,
                }
                for name, value in measurements.items():
                    series[name].append(value)
    except Diverged:
        pass
    return {name: values + [None] * (lengths[name] - len(values)) for name, values in series.items()}


def finals(trials: Sequence[Series], name: str = "accuracy") -> PerSeed:
    """The mean of a series' last values, for each seed; None where it diverged."""
    return [mean(trial[name][-LAST:]) for trial in trials]


def last(trials: Sequence[Series], name: str) -> PerSeed:
    """A series' last value, for each seed."""
    return [trial[name][-1] for trial in trials]


def curve(trials: Sequence[Series], every: int, name: str = "accuracy") -> list[tuple[float, PerSeed]]:
    """A series as a curve over rounds: (round, the value for each seed)."""
    values = zip(*(trial[name] for trial in trials), strict=True)
    return [(float(every * number), list(at)) for number, at in enumerate(values, 1)]


def settings_in_words(settings: Mapping[str, object]) -> str:
    """Settings of an algorithm as prose: "`client_lr` 0.3, `epochs` 3"."""
    return ", ".join(f"`{name}` {value}" for name, value in settings.items())


# Reports: a page with tables and pictures, and the same as JSON. A page's text before its results is written by hand:
# what the paper found, and what we found.


RESULTS = "## Results\n"
DIGITS = 4
"""Significant digits that a report keeps."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A finished study. command: repeats it. date: in UTC. cpu_minutes: over all trials."""

    study: str
    question: str
    paper: str
    command: str
    date: str
    machine: str
    seeds: list[int]
    quick: bool
    cpu_minutes: float
    findings: Findings


REPORT = decoder(Report)


def write(report: Report, folder: Path) -> Path:
    """Write a report's JSON, pictures and page, whose path it returns. Handwritten text of an earlier page stays."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(_rounded(msgspec.to_builtins(report)))
    report = REPORT.decode(encoded)
    page = folder / f"{report.study}.md"
    title = report.study.replace("-", " ").capitalize()
    by_hand, _, before = page.read_text().partition(RESULTS) if page.exists() else (f"# {title}\n\n", "", "")
    write_whole(folder / f"{report.study}.json", encoded + b"\n")
    write_whole(page, (by_hand + results(report, tables=_mark(report) not in before)).encode())
    write_svg_and_png({folder / name: picture for name, picture in pictures(report).items()})
    return page


def pictures(report: Report) -> dict[str, Picture]:
    """Pictures by file name, grids first."""
    drawn = [_heat_map(grid) for grid in report.findings.grids] + [_curves(plot) for plot in report.findings.plots]
    return {f"{report.study}-{number}.svg": picture for number, picture in enumerate(drawn, 1)}


def results(report: Report, *, tables: bool = True) -> str:
    """The results section of a page; without its tables it has a mark, where the site of the documents puts them."""
    return RESULTS + "\n" + "\n".join(_sections(report, numbers(report) if tables else _mark(report)))


def numbers(report: Report) -> str:
    """The tables of a page, and what was measured."""
    return "\n".join(_numbers(report))


def _mark(report: Report) -> str:
    return f"<!-- made: results of {report.study} -->\n"


def summary(report: Report) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """The tables of a report, grids first: title, columns and rows, as text."""
    for grid in report.findings.grids:
        rows = [[_label(row), *map(cell, values)] for row, values in zip(grid.rows, grid.values, strict=True)]
        yield grid.title, [f"{grid.row_name} \\ {grid.column_name}", *map(_label, grid.columns)], rows
    for section in report.findings.tables:
        yield section.title, section.columns, [[cell(value) for value in row] for row in section.rows]


def cell(value: str | float | PerSeed) -> str:
    """A cell as text: values per seed as mean and standard deviation, with the number of seeds without one."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | int):
        return f"{value:.3g}"
    numbers = [number for number in value if number is not None]
    missing = f" (none for {len(value) - len(numbers)} of {len(value)})" if len(numbers) < len(value) else ""
    if not numbers:
        return "none"
    middle = statistics.fmean(numbers)
    magnitude = math.floor(math.log10(abs(middle))) if middle else 0
    if magnitude < -4:
        scaled = [None if number is None else number * 10.0**-magnitude for number in value]
        return f"({cell(scaled)}) · 10^−{-magnitude}"
    decimals = max(0, 2 - magnitude)
    spread = f" ± {statistics.stdev(numbers):.{decimals}f}" if len(numbers) > 1 else ""
    return f"{middle:.{decimals}f}{spread}".replace("-", "−") + missing


def _sections(report: Report, tables: str) -> Iterator[str]:
    yield _wrapped(f"Question: {report.question} Paper: {report.paper}.")
    if report.quick:
        yield _wrapped("These are the smallest sizes, from `--quick`: they show only that the study runs.")
    titles = [grid.title for grid in report.findings.grids] + [plot.title for plot in report.findings.plots]
    for name, title in zip(pictures(report), titles, strict=True):
        yield f"![{title}]({name})\n"
    yield tables
    yield _wrapped(
        f"Made by `{report.command}` on {report.date}, in {report.cpu_minutes:.1f} minutes of CPU time on "
        f"{report.machine}. The numbers of every seed are in [{report.study}.json]({report.study}.json)."
    )


def _numbers(report: Report) -> Iterator[str]:
    seeds = ", ".join(map(str, report.seeds))
    several = f"Means and standard deviations over {len(report.seeds)} seeds ({seeds})."
    yield _wrapped(f"{report.findings.setup} {several if len(report.seeds) > 1 else f'Seed {seeds}.'}")
    for title, columns, rows in summary(report):
        yield f"### {title}\n\n{markdown(columns, rows)}"


def _wrapped(words: str) -> str:
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _label(number: float) -> str:
    return f"{number:g}"


def _heat_map(grid: Grid) -> Picture:
    """A grid as a heat map of means over seeds."""
    means = [[mean(values) for values in row] for row in grid.values]
    rows, columns = [_label(setting) for setting in grid.rows], [_label(setting) for setting in grid.columns]
    return draw_heat_map(grid.title, (grid.row_name, rows), (grid.column_name, columns), means)


def _curves(plot: Plot) -> Picture:
    bands = {
        name: [
            (x, *ends_and_mean(numbers))
            for x, values in points
            if (numbers := [number for number in values if number is not None])
        ]
        for name, points in plot.curves.items()
    }
    return draw_bands(bands, Axes(x=plot.x, y=plot.y, title=plot.title, log_x=plot.log_x, log_y=plot.log_y))


def _rounded(value: Any) -> Any:
    """Plain values, with floats rounded to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
