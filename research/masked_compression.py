"""Masked compression: what reports of few bytes under secure aggregation cost in accuracy, on convolutional networks.

Konečný et al. 2016 ask it of reports that a server sees. A masked value needs room for the sum over all devices, so
fewer bits alone save little: a subsample of the rotated values comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coordinator.rules.private_sums import ReportBytes, report_bytes
from coordinator.rules.task_settings import Secagg, TaskSettings
from export.model import Model
from export.models import load as load_model
from fedcore.compression import Compression
from research import study

COHORT, CLIP = 16, 0.75
SETTINGS = {"client_lr": 0.1, "batch_size": 10, "weighting": "uniform"}
UNMASKED = ("", 0)
"""No compression, and 0 bits of a masked value: no masks."""


@dataclass(frozen=True, slots=True)
class Network:
    """A training: model, data, rounds, local epochs. variants: compressions, each with the bits of a masked value."""

    model: str
    data: dict[str, Any]
    rounds: int
    epochs: int
    variants: tuple[tuple[str, int], ...]


DIGITS = Network(
    "digits_cnn",
    {"dataset": "digits", "clients": 60},
    45,
    2,
    (UNMASKED, ("rotation,subsample=0.4", 4), ("rotation,subsample=0.2", 3)),
)
EMNIST = Network(
    "emnist_cnn",
    {"dataset": "mnist_10k", "clients": 250, "partition": "dirichlet:100"},
    20,
    1,
    (UNMASKED, ("rotation,subsample=0.25", 3)),
)


def masking(bits: int) -> Secagg | None:
    """How reports are masked; None if they are not."""
    return Secagg(bits=bits, clip_norm=CLIP) if bits else None


def sizes(model: str, compress: str, bits: int) -> ReportBytes:
    """The bytes of a report of `fedavg`."""
    spec = Model(load_model(model))
    layout = Compression.parse(compress).coded(study.averaged_layout(spec, "uniform"), spec.schema)
    settings = TaskSettings(population="study", goal=COHORT, over_selection=1.0, rounds=1, secagg=masking(bits))
    return report_bytes(layout, settings)


def _find(trials: study.Trials) -> study.Findings:
    quick = replace(DIGITS, rounds=2, variants=DIGITS.variants[-1:])
    networks = (quick,) if trials.quick else (DIGITS, EMNIST)
    compared = [_compared(trials, network) for network in networks]
    return study.Findings(
        setup="`digits_cnn` on data `digits` over 60 users, 2 local epochs; `emnist_cnn` on data `mnist_10k` over 250 "
        f"users with 40 examples each, dealt by `dirichlet:100`, one local epoch. `fedavg` with "
        f"{study.settings_in_words(SETTINGS)}; cohorts of {COHORT}, which are one group of secure aggregation; masked "
        f"reports of norm {CLIP:g} at most.",
        tables=[table for table, _ in compared],
        plots=[plot for _, plot in compared],
    )


def _compared(trials: study.Trials, network: Network) -> tuple[study.Table, study.Plot]:
    every = max(1, network.rounds // 10)
    common = {"model": network.model, "rounds": network.rounds, "evaluate_every": every, "cohort": COHORT}
    common |= {"settings": SETTINGS | {"epochs": network.epochs}, "data": trials.data} | network.data
    trained = trials.run(
        study.train, [common | {"compress": compress, "secagg": masking(bits)} for compress, bits in network.variants]
    )
    names = [f"{compress}, {bits} bits" if bits else "no compression, unmasked" for compress, bits in network.variants]
    rows: list[study.Row] = []
    for name, variant, series in zip(names, network.variants, trained, strict=True):
        size = sizes(network.model, *variant)
        rows.append([name, f"{size.sent:,}", f"{size.uncompressed / size.sent:.1f}", study.finals(series)])
    columns = ["compression", "bytes of a report", "times smaller", "accuracy"]
    curves = {name: study.curve(series, every) for name, series in zip(names, trained, strict=True)}
    title = f"{network.model}: accuracy on unseen users"
    return (
        study.Table(title=f"`{network.model}`, after {network.rounds} rounds", columns=columns, rows=rows),
        study.Plot(title=title, x="round", y="accuracy", curves=curves),
    )


MASKED_COMPRESSION = study.Study(
    "masked-compression",
    "What do smaller reports cost in accuracy under secure aggregation?",
    study.KONECNY_COMMUNICATION,
    _find,
)
