"""The time of a round on phones, and of a training, by the model of Wang et al. 2021, equations 9 and 10.

    T_round = S_down / B_down + S_up / B_up + max_k T_k + T_server        T_k = R · T_sim + C

S are bytes, B bandwidths of a phone, T_sim the time of a user's training in the simulator, R how many times slower a
phone is, and C the fixed time of a session. BANDWIDTH_DOWN, BANDWIDTH_UP, SLOWER and FIXED_S are the paper's estimates
for a real population of phones. T_server is left out: it is small.
"""

from __future__ import annotations

from typing import Any

from simulator.studies.papers import FIELD_GUIDE
from simulator.studies.study import Findings, PerSeed, Row, Study, Table
from simulator.studies.trainings import digit_images, rounds_to, settings_in_words, train
from simulator.studies.trials import Trials

BANDWIDTH_DOWN, BANDWIDTH_UP = 0.75e6, 0.25e6
"""Bytes a second of a phone's connection."""
SLOWER, FIXED_S = 7.0, 10.0
BYTES, SIM_S_PER_PARAMETER = 4, 4e-9
"""Bytes of a number; and seconds of an example in the simulator for each parameter, as for dense layers on one core."""
EXAMPLES, COHORT, TARGET = 40, 10, 0.85
SETTINGS = {"client_lr": 0.2, "batch_size": 20}
EPOCHS = (1, 2, 4, 8)
SIZES = {"the network itself": 50_890, "1 million parameters": 1_000_000, "10 million parameters": 10_000_000}


def round_s(parameters: int, examples: int) -> float:
    """The seconds of a round in which a phone fetches and sends a model of float32 and trains on so many examples."""
    communication_s = BYTES * parameters * (1 / BANDWIDTH_DOWN + 1 / BANDWIDTH_UP)
    return communication_s + SLOWER * SIM_S_PER_PARAMETER * parameters * examples + FIXED_S


def _find(trials: Trials) -> Findings:
    rounds, every, epochs = (4, 2, EPOCHS[:2]) if trials.quick else (60, 2, EPOCHS)
    data, words = digit_images(trials)
    common: dict[str, Any] = data | {"rounds": rounds, "evaluate_every": every, "cohort": COHORT}
    trained = trials.run(train, [common | {"settings": SETTINGS | {"epochs": sweeps}} for sweeps in epochs])
    rows: list[Row] = []
    for sweeps, way in zip(epochs, trained, strict=True):
        needed = rounds_to(way, TARGET, every)
        lengths = [round_s(size, sweeps * EXAMPLES) for size in SIZES.values()]
        hours: list[PerSeed] = [
            [None if count is None else count * length_s / 3600 for count in needed] for length_s in lengths
        ]
        rows.append([str(sweeps), needed, *hours])
    columns = ["epochs", f"rounds to accuracy {TARGET}", *(f"hours, {size}" for size in SIZES)]
    setup = (
        f"{words}; `fedavg` with {settings_in_words(SETTINGS)}, cohorts of {COHORT}, {rounds} rounds at most. Users "
        f"have {EXAMPLES} examples, so they take equally long. A phone fetches {BANDWIDTH_DOWN / 1e6:g} MB and sends "
        f"{BANDWIDTH_UP / 1e6:g} MB a second, and needs {FIXED_S:g} s for a session beside. It trains {SLOWER:g} times "
        f"slower than the simulator, which is taken to need {1e9 * SIM_S_PER_PARAMETER:g} ns for an example and "
        "parameter. Larger networks are taken to need as many rounds."
    )
    return Findings(setup=setup, tables=[Table(title="Time to the target", columns=columns, rows=rows)])


ROUND_TIME = Study(
    "round-time", "How many local epochs are best, when rounds are counted in the time of phones?", FIELD_GUIDE, _find
)
