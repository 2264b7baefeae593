"""Compression: the accuracy that smaller reports cost, with secure aggregation and without it.

Konečný et al. 2016 ask it of rotations, subsampling, quantisation and low-rank factors. Bytes are those of an
unmasked report, against float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coordinator.rules.private_sums import ReportBytes, report_bytes as masked_report_bytes
from coordinator.rules.task_settings import Secagg, TaskSettings
from export.model import Model
from export.models import load as load_model
from fedcore.compression import Compression, upload_bytes
from research import study

SETTINGS = {"client_lr": 0.1, "batch_size": 10, "epochs": 2}
MODEL, COHORT, UNCOMPRESSED = "digits_cnn", 10, ""
DIGITS = (
    UNCOMPRESSED,
    "bits=4",
    "rotation,bits=4",
    "rotation,bits=2",
    "rotation,bits=1",
    "rotation,subsample=0.5,bits=4",
    "rotation,subsample=0.12",
    "count_sketch=0.12",
    "low_rank=4",
)


def report_bytes(compress: str) -> int:
    """Bytes of a report of `fedavg`."""
    spec = Model(load_model(MODEL))
    return upload_bytes(Compression.parse(compress).coded(study.averaged_layout(spec, "examples"), spec.schema))


def _find(trials: study.Trials) -> study.Findings:
    rounds, every = (2, 1) if trials.quick else (60, 4)
    compressions = DIGITS[:3:2] if trials.quick else DIGITS
    common = {"dataset": "digits", "clients": 60, "model": MODEL, "rounds": rounds, "evaluate_every": every}
    cases = [common | {"cohort": COHORT, "settings": SETTINGS, "compress": compress} for compress in compressions]
    trained = dict(zip(compressions, trials.run(study.train, cases), strict=True))
    whole = report_bytes(UNCOMPRESSED)
    rows: list[study.Row] = [
        [compress or "none", f"{report_bytes(compress):,}", f"{whole / report_bytes(compress):.1f}", study.finals(way)]
        for compress, way in trained.items()
    ]
    columns = ["compression", "bytes of a report", "times smaller", "accuracy"]
    curves = {compress or "none": study.curve(way, every) for compress, way in trained.items()}
    return study.Findings(
        setup=f"Data `digits` over 60 users, model `{MODEL}`; `fedavg` with {study.settings_in_words(SETTINGS)}; "
        f"cohorts of {COHORT}.",
        tables=[study.Table(title=f"After {rounds} rounds", columns=columns, rows=rows)],
        plots=[study.Plot(title="Accuracy on unseen users", x="round", y="accuracy", curves=curves)],
    )


COMPRESSION = study.Study(
    "compression", "What do smaller reports cost in accuracy?", study.KONECNY_COMMUNICATION, _find
)


# Masked compression: what reports of few bytes under secure aggregation cost in accuracy, on convolutional networks.
#
# Konečný et al. 2016 ask it of reports that a server sees. A masked value needs room for the sum over all devices, so
# fewer bits alone save little: a subsample of the rotated values comes first.


GROUP, CLIP = 16, 0.75
UNIFORM = {"client_lr": 0.1, "batch_size": 10, "weighting": "uniform"}
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


DIGITS_CNN = Network(
    "digits_cnn",
    {"dataset": "digits", "clients": 60},
    45,
    2,
    (UNMASKED, ("rotation,subsample=0.4", 4), ("rotation,subsample=0.2", 3)),
)
EMNIST_CNN = Network(
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
    settings = TaskSettings(population="study", goal=GROUP, over_selection=1.0, rounds=1, secagg=masking(bits))
    return masked_report_bytes(layout, settings)


def _find_masked(trials: study.Trials) -> study.Findings:
    quick = replace(DIGITS_CNN, rounds=2, variants=DIGITS_CNN.variants[-1:])
    networks = (quick,) if trials.quick else (DIGITS_CNN, EMNIST_CNN)
    compared = [_compared_masked(trials, network) for network in networks]
    return study.Findings(
        setup="`digits_cnn` on data `digits` over 60 users, 2 local epochs; `emnist_cnn` on data `mnist_10k` over 250 "
        f"users with 40 examples each, dealt by `dirichlet:100`, one local epoch. `fedavg` with "
        f"{study.settings_in_words(UNIFORM)}; cohorts of {GROUP}, which are one group of secure aggregation; masked "
        f"reports of norm {CLIP:g} at most.",
        tables=[table for table, _ in compared],
        plots=[plot for _, plot in compared],
    )


def _compared_masked(trials: study.Trials, network: Network) -> tuple[study.Table, study.Plot]:
    every = max(1, network.rounds // 10)
    common = {"model": network.model, "rounds": network.rounds, "evaluate_every": every, "cohort": GROUP}
    common |= {"settings": UNIFORM | {"epochs": network.epochs}, "data": trials.data} | network.data
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
    _find_masked,
)
