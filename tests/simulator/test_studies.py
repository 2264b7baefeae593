"""Trials of studies: what was done is kept, and any number of processes gives the same; and what studies measure."""

import os
import signal

import numpy as np
import pytest

from fedcore.privacy.accounting import calibrated, spent
from fedcore.privacy.settings import Noise
from fedcore.questions.answer import Answer
from simulator.errors import StudyError
from simulator.population import Population
from simulator.studies import STUDIES, asking_first, find
from simulator.studies.cohort_size import EXAMPLES, time_of
from simulator.studies.pseudo_gradients import mean_cosine
from simulator.studies.round_time import round_s
from simulator.studies.study import mean
from simulator.studies.training_failures import falls
from simulator.studies.trainings import finals, rounds_to, train
from simulator.studies.trials import Trials

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


def test_rounds_to_a_target_are_those_of_the_first_measurement_there():
    trials = [{"accuracy": [0.2, 0.6, 0.5, 0.7]}, {"accuracy": [0.1, None, None, None]}]
    assert rounds_to(trials, 0.6, every=5) == [10.0, None]


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


def test_falls_are_counted_by_seed_and_divergence_is_one():
    assert falls([{"accuracy": [0.2, 0.8, 0.65, 0.6]}, {"accuracy": [0.5, None, None]}]) == [1.0, 1.0]


def test_accuracy_near_a_guess_does_not_fall():
    assert falls([{"accuracy": [0.36, 0.1, 0.3, 0.05]}, {"accuracy": [0.2, None, None]}]) == [0.0, 0.0]


def test_a_round_on_phones_adds_transfer_training_and_session():
    # 1 MB down at 0.75 and up at 0.25 MB/s; 100 examples of 1 ms, 7 times slower; 10 s of a session
    assert round_s(250_000, 100) == pytest.approx(1 / 0.75 + 1 / 0.25 + 0.7 + 10)


def test_time_of_rounds_is_that_of_the_slowest_users():
    alone, many = (time_of(2000.0, cohort, seed=0) / 2000 / EXAMPLES for cohort in (1, 20))
    assert alone == pytest.approx(2, rel=0.05)
    assert many == pytest.approx(1 + sum(1 / k for k in range(1, 21)), rel=0.05)
    assert time_of(None, 5, seed=0) is None


def test_three_questions_of_the_study_spend_its_budget_together():
    delta = 1e-5
    each = asking_first._each(delta)
    noise = Noise(noise_multiplier=calibrated(Noise(noise_multiplier=1.0), 1, each, delta))
    assert spent([noise] * 3, delta) == pytest.approx(asking_first.EPSILON, rel=1e-3)


def test_a_device_of_a_crowd_has_the_examples_of_one_user():
    users = Population.of(["a", "b"], [{"x": np.arange(3.0)}, {"x": np.arange(10.0, 15.0)}])
    crowd = asking_first.crowd_of(users, 50, seed=0)
    shards = [crowd.shard(device)["x"].tolist() for device in range(50)]
    assert {tuple(shard) for shard in shards} == {(0.0, 1.0, 2.0), (10.0, 11.0, 12.0, 13.0, 14.0)}
    assert asking_first.crowd_of(users, 0, seed=0) is users


def test_an_answer_is_trusted_where_it_exceeds_its_error():
    columns = ("name", "element", "mean", "deviation")
    rows = [["x", 0, 5.0, 2.0], ["x", 1, 6.0, 2.0], ["x", 2, 7.0, None]]
    bounds = np.array([[0.0, 10.0]] * 3)
    errors = [[None, None, 0.1, 3.0], [None, None, 0.1, 1.0], [None, None, None, None]]
    noisy = asking_first._normaliser(Answer(columns, rows, 9, 0, errors), bounds)
    assert noisy == {"mean": [5.0, 6.0, 5.0], "deviation": [5.0, 2.0, 5.0], "trusted": [0, 1, 0]}
    exact = asking_first._normaliser(Answer(columns, rows, 9, 0), bounds)
    assert exact == {"mean": [5.0, 6.0, 5.0], "deviation": [2.0, 2.0, 5.0], "trusted": [1, 1, 0]}
