"""Trials of studies: what was done is kept, and any number of processes gives the same; and what studies measure."""

import os
import signal

import numpy as np
import pytest

from research.studies import STUDIES, find
from research.study import Trials, finals, mean, train
from research.training import mean_cosine
from simulator.errors import StudyError

CALLS = "calls"


def product(*, folder, factor, seed):
    """A trial that leaves a trace of having run."""
    with (folder / CALLS).open("a") as calls:
        calls.write(f"{factor} {seed}\n")
    return {"product": [float(factor * seed)]}


def killed(*, size, seed):
    os.kill(os.getpid(), signal.SIGKILL)


def calls(folder):
    return sorted((folder / CALLS).read_text().splitlines())


@pytest.mark.parametrize("processes", [1, 3])
def test_trials_give_every_case_with_every_seed_in_order(tmp_path, processes):
    seen = []
    trials = Trials(tmp_path / "trials", processes=processes, on_progress=lambda *count: seen.append(count))
    found = trials.run(product, [{"folder": tmp_path, "factor": factor} for factor in (5, 7)])
    assert [[one["product"][0] for one in case] for case in found] == [[0.0, 5.0, 10.0], [0.0, 7.0, 14.0]]
    assert calls(tmp_path) == ["5 0", "5 1", "5 2", "7 0", "7 1", "7 2"]
    assert seen == [(done, 6) for done in range(7)]
    assert trials.cpu_s > 0


def test_finished_trials_are_not_run_again_and_damaged_ones_are(tmp_path):
    def run(seeds):
        return Trials(tmp_path / "trials", seeds=seeds).run(product, [{"folder": tmp_path, "factor": 3}])

    before = run([1, 2])
    (tmp_path / CALLS).unlink()
    assert run([1, 2, 4]) == [[*before[0], {"product": [12.0]}]]
    assert calls(tmp_path) == ["3 4"]
    one, *_ = (tmp_path / "trials").iterdir()
    one.write_bytes(one.read_bytes()[:-1])
    assert run([1, 2, 4]) == [[*before[0], {"product": [12.0]}]]
    assert len(calls(tmp_path)) == 2


def test_a_trial_whose_process_is_killed_ends_the_study_with_words(tmp_path):
    with pytest.raises(StudyError, match=r"the trial with size 3, seed 5 failed: .* exit code -9"):
        Trials(tmp_path, seeds=[5]).run(killed, [{"size": 3}])


def test_unknown_study_is_refused_with_those_there_are():
    with pytest.raises(StudyError, match=r"did you mean pseudo-gradients\? there are"):
        find("pseudo-gradient")


def test_series_of_a_training_that_diverges_have_no_numbers_from_there():
    config = {"model": "logreg", "rounds": 3, "cohort": 2, "evaluate_every": 1}
    good = train(seed=0, settings={"client_lr": 0.1}, **config)
    bad = train(seed=0, settings={"client_lr": 1e38}, **config)
    assert all(len(values) == 3 and None not in values for values in good.values())
    assert {len(values) for values in bad.values()} == {3}
    assert finals([good, bad])[1] is None
    assert finals([good])[0] == pytest.approx(np.mean(good["accuracy"]))


def test_mean_cosine_is_that_of_all_pairs():
    vectors_KD = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    units_KD = vectors_KD / np.linalg.norm(vectors_KD, axis=1, keepdims=True)
    pairs = [units_KD[i] @ units_KD[j] for i in range(5) for j in range(i)]
    assert mean_cosine(vectors_KD) == pytest.approx(np.mean(pairs), rel=1e-5)


def test_mean_over_seeds_does_not_exist_where_one_is_missing():
    assert mean([1.0, 2.0]) == 1.5
    assert mean([1.0, None]) is None


@pytest.mark.long
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_finds_something_in_its_quick_form(tmp_path, name):
    findings = find(name).find(Trials(tmp_path, seeds=[0], quick=True))
    assert findings.setup
    assert findings.tables or findings.grids
