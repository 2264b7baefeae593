"""Compression: what smaller reports cost in accuracy, on a convolutional network.

Konečný et al. 2016 ask it of rotations, subsampling, quantisation and low-rank factors. Bytes are those of an
unmasked report, against float32.
"""

from __future__ import annotations

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
