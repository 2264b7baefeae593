"""Masked compression: what reports of few bytes under secure aggregation cost in accuracy, on a convolutional network.

Konečný et al. 2016 ask it of reports that a server sees. Under masks every value needs room for the sum of all devices,
which rounding cannot take away, so that a subsample of rotated values comes before the bits.
"""

from __future__ import annotations

from coordinator.rules.packed_segments import ReportBytes, report_bytes
from coordinator.rules.task_settings import Secagg, TaskSettings
from export.model import Model
from export.models import load as load_model
from fedcore.codecs.compression import Compression
from fedcore.report import WEIGHT, ReportLayout, Segment, metrics_segment
from simulator.studies.papers import KONECNY_COMMUNICATION
from simulator.studies.study import Findings, Plot, Row, Study, Table
from simulator.studies.trainings import curve, finals, settings_in_words, train
from simulator.studies.trials import Trials

MODEL, COHORT, CLIP = "digits_cnn", 16, 2.0
SETTINGS = {"client_lr": 0.1, "batch_size": 10, "epochs": 2, "weighting": "uniform"}
IN_CLEAR = ("", 0)
WAYS = (IN_CLEAR, ("rotation,subsample=0.4", 4), ("rotation,subsample=0.2", 3))
"""Compressions, each with the bits of a masked value; 0 in clear."""


def masking(bits: int) -> Secagg | None:
    """How reports are masked; None in clear."""
    return Secagg(bits=bits, clip_norm=CLIP) if bits else None


def sizes(compress: str, bits: int) -> ReportBytes:
    """The bytes of a report of `fedavg`."""
    spec = Model(load_model(MODEL))
    segments = (
        Segment("delta", spec.schema.size, "mean"),
        Segment(WEIGHT, 1, "sum"),
        Segment(metrics_segment("train"), len(spec.metrics), "sum", spec.metrics),
    )
    layout = Compression.parse(compress).coded(ReportLayout(segments, "uniform"), spec.schema)
    settings = TaskSettings(population="study", goal=COHORT, over_selection=1.0, rounds=1, secagg=masking(bits))
    return report_bytes(layout, settings)


def _find(trials: Trials) -> Findings:
    rounds, every, ways = (2, 1, WAYS[-1:]) if trials.quick else (45, 3, WAYS)
    common = {"dataset": "digits", "clients": 60, "model": MODEL, "rounds": rounds, "evaluate_every": every}
    common |= {"cohort": COHORT, "settings": SETTINGS}
    found = trials.run(train, [common | {"compress": one, "secagg": masking(bits)} for one, bits in ways])
    names = [f"{compress}, {bits} bits" if bits else "none, in clear" for compress, bits in ways]
    rows: list[Row] = []
    for name, way, series in zip(names, ways, found, strict=True):
        size = sizes(*way)
        rows.append([name, f"{size.sent:,}", f"{size.uncompressed / size.sent:.1f}", finals(series)])
    columns = ["compression", "bytes of a report", "times smaller", "accuracy"]
    curves = {name: curve(series, every) for name, series in zip(names, found, strict=True)}
    return Findings(
        setup=f"Data `digits` over 60 users, model `{MODEL}`; `fedavg` with {settings_in_words(SETTINGS)}; cohorts of "
        f"{COHORT}, which are one group of secure aggregation; masked reports of norm {CLIP:g} at most.",
        tables=[Table(title=f"After {rounds} rounds", columns=columns, rows=rows)],
        plots=[Plot(title="Accuracy on unseen users", x="round", y="accuracy", curves=curves)],
    )


MASKED_COMPRESSION = Study(
    "masked-compression",
    "What do smaller reports cost in accuracy under secure aggregation?",
    KONECNY_COMMUNICATION,
    _find,
)
