"""Ways to make use of large cohorts: learning rates that grow, growing cohorts, and other server optimizers.

Charles et al. 2021, section 5.
"""

from __future__ import annotations

from typing import Any

from fedcore.schedule import ServerSchedule
from simulator.studies.papers import CHARLES
from simulator.studies.study import Findings, Plot, Row, Study, Table
from simulator.studies.trainings import curve, digit_images, finals, rounds_to, settings_in_words, train
from simulator.studies.trials import Trials

SMALL, LARGE, TARGET = 10, 80, 0.85
LOCAL = {"epochs": 2, "batch_size": 20}
AVERAGING = {"client_lr": 0.5}
WAYS: dict[str, dict[str, Any]] = {
    "small cohort": {"algorithm": "fedavg", "settings": AVERAGING, "cohort": SMALL},
    "large cohort": {"algorithm": "fedavg", "settings": AVERAGING},
    "square root": {
        "algorithm": "fedavg",
        "settings": AVERAGING,
        "schedule": ServerSchedule(scaling="sqrt", reference_cohort=SMALL),
    },
    "square root, warm-up": {
        "algorithm": "fedavg",
        "settings": AVERAGING,
        "schedule": ServerSchedule(scaling="sqrt", reference_cohort=SMALL, warmup_rounds=10),
    },
    "linear, warm-up": {
        "algorithm": "fedavg",
        "settings": AVERAGING,
        "schedule": ServerSchedule(scaling="linear", reference_cohort=SMALL, warmup_rounds=10),
    },
    "growing cohort": {
        "algorithm": "fedavg",
        "settings": AVERAGING,
        "cohort": SMALL,
        "schedule": ServerSchedule(double_every=10, largest_cohort=LARGE),
    },
    "normalised": {"algorithm": "normfedavg", "settings": {"client_lr": 0.5, "server_lr": 0.3}},
    "FedAdam": {"algorithm": "fedadam", "settings": {"client_lr": 0.1, "server_lr": 0.03}},
    "FedLARS": {"algorithm": "fedlars", "settings": {"client_lr": 0.1, "server_lr": 0.03}},
    "FedLamb": {"algorithm": "fedlamb", "settings": {"client_lr": 0.1, "server_lr": 0.03}},
}


def _find(trials: Trials) -> Findings:
    rounds, every, large = (4, 2, 20) if trials.quick else (40, 2, LARGE)
    data, words = digit_images(trials)
    common = data | {"rounds": rounds, "evaluate_every": every}
    cases = [common | {"cohort": large} | way | {"settings": LOCAL | way["settings"]} for way in WAYS.values()]
    trained = dict(zip(WAYS, trials.run(train, cases), strict=True))
    rows: list[Row] = [
        [
            name,
            f"`{WAYS[name]['algorithm']}`, {settings_in_words(WAYS[name]['settings'])}",
            rounds_to(way, TARGET, every),
            finals(way),
        ]
        for name, way in trained.items()
    ]
    table = Table(
        title=f"Cohorts of {large}, and of {SMALL} where it is small, and at first where it grows",
        columns=["", "algorithm", f"rounds to accuracy {TARGET}", f"accuracy after {rounds} rounds"],
        rows=rows,
    )
    plots = [
        Plot(
            title=title,
            x="round",
            y="accuracy, unseen users",
            curves={name: curve(trained[name], every) for name in names},
        )
        for title, names in PICTURES.items()
    ]
    return Findings(setup=f"{words}; {rounds} rounds; {settings_in_words(LOCAL)}.", tables=[table], plots=plots)


PICTURES = {
    "FedAvg in large cohorts": list(WAYS)[:6],
    "Server optimizers in large cohorts": [list(WAYS)[1], *list(WAYS)[6:]],
}

COHORT_SCALING = Study("cohort-scaling", "How can FedAvg make use of a large cohort?", CHARLES, _find)
