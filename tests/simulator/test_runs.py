"""Runs in folders: killed anywhere they go on to the same bits; what cannot be resumed is refused with the reason."""

import contextlib
import json
import math
import multiprocessing
import os
import resource
import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rules.task_settings import MOST_LOSS_GROWTH
from fedcore.schedule import ServerSchedule
from simulator.configuration import SimulationConfig, to_config
from simulator.errors import EngineError, ProcessDied, RunError, RunNotKept
from simulator.runs.reading import read_metrics, read_result, read_run, to_toml
from simulator.runs.running import resume_run, start_run
from simulator.simulation import completed, simulate
from simulator.training import LOSS, START, Watch
from tests.sampled import sampled

# SCAFFOLD's clients keep vectors.
A_FEW = [2, 7, 9, 14, 19, 22]
"""Of the durable steps."""
CONFIG = SimulationConfig(
    model="logreg", algorithm="scaffold", rounds=5, cohort=4, evaluate_every=2, processes=1, engine="torch"
)
DURABLE = ("fsync", "replace", "rename", "mkdir", "unlink", "truncate")


class Stop(Exception):
    """An end in the middle of a run."""


def stop_at(last):
    def on_round(number, point):
        if number == last:
            raise Stop

    return on_round


def in_child(work):
    """Run `work` in a forked process; gives how it ended, as `os.waitpid` says it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def killed_at(step, work):
    """Run `work` in a process that is killed before its durable step of that number; whether it came so far."""

    def killing():
        left = step
        for name in DURABLE:
            original = getattr(os, name)

            def counting(*arguments, original=original, **options):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            setattr(os, name, counting)
        work()

    status = in_child(killing)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


def begin_or_resume(path, **options):
    if (path / "config.toml").is_file():
        return resume_run(path, **options)
    return start_run(path, CONFIG, **options)


def kept_by(path):
    """All that a finished run keeps, but for the seconds that rounds took."""
    points = [{name: value for name, value in point.items() if name != "seconds"} for point in read_metrics(path)]
    names = sorted(one.name for one in path.iterdir())
    checkpoint = sorted(path.glob("checkpoint-*"))[-1].read_bytes()
    return read_result(path), points, checkpoint, [name for name in names if "checkpoint" not in name]


@pytest.fixture
def whole(tmp_path):
    """A run that nothing disturbed."""
    start_run(tmp_path / "whole", CONFIG, checkpoint_after_s=0)
    return kept_by(tmp_path / "whole")


def test_a_run_keeps_its_configuration_metrics_checkpoints_and_result(tmp_path, whole):
    result, points, _, names = whole
    assert names == ["config.toml", "engine.json", "lock", "metrics.jsonl", "model.safetensors", "result.json"]
    assert result == simulate(CONFIG)
    assert [point["round"] for point in points] == [1, 2, 3, 4, 5]
    assert [point for point in points if "test.loss" in point] == result.curve
    assert len(list((tmp_path / "whole").glob("checkpoint-*"))) == 2
    kept = to_config(tomllib.loads((tmp_path / "whole" / "config.toml").read_text()))
    assert kept.settings == {"option": "II", "client_lr": 0.1, "server_lr": 1.0, "epochs": 1, "batch_size": 20}
    assert replace(kept, settings={}) == CONFIG


@pytest.mark.parametrize("steps", sampled((A_FEW, range(1, 100)), (A_FEW,)), ids=["a few", "all"])
def test_a_run_killed_at_a_durable_step_resumes_to_the_same_bits(tmp_path, whole, steps):
    last = 0
    for step in steps:
        path = tmp_path / str(step)
        if not killed_at(step, lambda path=path: begin_or_resume(path, checkpoint_after_s=0)):
            break
        begin_or_resume(path, checkpoint_after_s=0)
        assert kept_by(path) == whole, step
        last = step
    assert last >= 22


def killed_after_two_rounds(path):
    """Begin or go on with a run in a process that is killed once it did two rounds; whether it was still at it."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            begin_or_resume(path, on_round=lambda number, point: os.write(told, b"."), checkpoint_after_s=0)
        os._exit(0)
    os.close(told)
    os.read(heard, 1)
    os.read(heard, 1)
    os.kill(pid, signal.SIGKILL)
    os.close(heard)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_run_killed_again_and_again_reaches_the_same_bits(tmp_path, whole):
    path, kills = tmp_path / "killed", 0
    while killed_after_two_rounds(path) and not read_result(path):
        kills += 1
    assert kills >= 1
    begin_or_resume(path)
    assert kept_by(path) == whole


def test_torn_lines_and_checkpoints_that_cannot_be_read_are_passed_over(tmp_path, whole):
    path = tmp_path / "torn"
    with pytest.raises(Stop):
        start_run(path, CONFIG, stop_at(5), checkpoint_after_s=0)
    with (path / "metrics.jsonl").open("r+b") as file:
        file.truncate(sum(map(len, file.readlines()[:4])))
        file.seek(0, 2)
        file.write(b'{"round":5,"train.lo')
    last = path / "checkpoint-00000004.safetensors"
    last.write_bytes(last.read_bytes()[:100])
    heard = []
    resume_run(path, on_round=lambda number, point: heard.append(number))
    assert heard == [4, 5]
    assert kept_by(path) == whole


def test_the_curve_goes_on_over_an_interruption_without_a_checkpoint(tmp_path, whole):
    path = tmp_path / "early"
    with pytest.raises(Stop):
        start_run(path, CONFIG, stop_at(3))
    assert list(path.glob("checkpoint-*")) == []
    resume_run(path)
    assert kept_by(path) == whole


def test_a_full_disk_is_named_and_the_last_checkpoint_stays_good(tmp_path, whole):
    path = tmp_path / "full"

    def fill():
        def on_round(number, point):
            if number == 4:  # the vectors of all clients are larger than this, the metrics are not
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

        with pytest.raises(RunNotKept, match=r"full cannot be kept: File too large: .*--resume"):
            start_run(path, CONFIG, on_round, checkpoint_after_s=0)

    assert in_child(fill) == 0
    assert [one.name for one in sorted(path.glob("checkpoint-*"))] == [
        f"checkpoint-0000000{n}.safetensors" for n in (2, 3)
    ]
    resume_run(path, checkpoint_after_s=0)
    assert kept_by(path) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "mime", "processes": 2, "rounds": 3},
        pytest.param({"baseline": "local"}, marks=pytest.mark.long),
        {"model": "ridge", "baseline": "cocoa"},
    ],
    ids=["federated", "local", "linear"],
)
def test_every_kind_of_training_resumes_to_the_same_bits(tmp_path, options):
    config = SimulationConfig(**{"model": "logreg", "rounds": 2, "cohort": 4, "evaluate_every": 1} | options)
    with pytest.raises(Stop):
        start_run(tmp_path / "run", config, stop_at(config.rounds - 1), checkpoint_after_s=0)
    resumed, alone = resume_run(tmp_path / "run"), simulate(config)
    assert replace(resumed, engine_reason=None) == replace(alone, engine_reason=None)


def test_a_resumed_run_keeps_the_engine_that_it_began_with(tmp_path):
    config = SimulationConfig(model="logreg", rounds=2, cohort=2, processes=1)
    with pytest.raises(Stop):
        start_run(tmp_path / "run", config, stop_at(1))
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["engine"] == "torch"
    (tmp_path / "run" / "engine.json").write_text('{"engine": "graphs", "reason": "measured then"}')
    result = resume_run(tmp_path / "run")
    assert (result.engine, result.engine_reason) == ("graphs", "measured then")


def test_a_finished_run_gives_its_result_again(tmp_path, whole):
    assert resume_run(tmp_path / "whole", on_round=stop_at(1)) == whole[0]


def test_a_run_of_another_configuration_is_refused_by_its_keys(tmp_path, whole):
    other = replace(CONFIG, rounds=9, settings={"client_lr": 0.5}, patience=3, processes=2)
    with pytest.raises(RunError) as refused:
        resume_run(tmp_path / "whole", other)
    words = "differ in settings.client_lr (0.1 and 0.5), rounds (5 and 9), patience (not given and 3). Resume"
    assert words in str(refused.value)
    assert resume_run(tmp_path / "whole", replace(CONFIG, processes=2)) == whole[0]


def test_a_folder_in_use_is_refused_with_the_process(tmp_path):
    said = []

    def on_round(number, point):
        with pytest.raises(RunError) as refused:
            resume_run(tmp_path / "run")
        said.append(str(refused.value))

    start_run(tmp_path / "run", replace(CONFIG, rounds=1), on_round)
    assert said == [f"{tmp_path}/run is in use by process {os.getpid()}; wait for its end, or end it"]


def test_other_folders_are_refused_and_left_as_they_are(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match="other exists already; take another folder"):
        start_run(tmp_path / "other", CONFIG)
    with pytest.raises(RunError, match="other is not the folder of a run"):
        resume_run(tmp_path / "other")
    with pytest.raises(RunError, match="missing is not the folder of a run"):
        resume_run(tmp_path / "missing")
    (tmp_path / "other" / "config.toml").write_text("model = 3")
    with pytest.raises(RunError, match=r"other is not the folder of a run.*model must be text, not 3"):
        resume_run(tmp_path / "other")
    (tmp_path / "other" / "config.toml").write_text('model = "mlp"\nround = 3')
    with pytest.raises(RunError, match=r"there is no 'round'; did you mean rounds"):
        resume_run(tmp_path / "other")
    (tmp_path / "other" / "config.toml").write_text('model = "mlp"\n[schedule]\nwarmup = 3')
    with pytest.raises(RunError, match="schedule: there is no 'warmup'; did you mean warmup_rounds"):
        resume_run(tmp_path / "other")
    assert [one.name for one in tmp_path.iterdir()] == ["other"]


def test_values_of_a_wrong_type_are_refused_by_name():
    for options in ({"rounds": "3"}, {"seed": 1.5}, {"data": "/data"}, {"settings": 3}):
        (name,) = options
        with pytest.raises(EngineError, match=f"^{name} must be .*, not "):
            SimulationConfig(**{"model": "mlp"} | options)


def test_files_that_only_look_like_checkpoints_are_passed_over(tmp_path, whole):
    path = tmp_path / "run"
    with pytest.raises(Stop):
        start_run(path, CONFIG, stop_at(3), checkpoint_after_s=0)
    for name in ("abc", "-1", "9abc"):
        (path / f"checkpoint-{name}.safetensors").write_bytes(b"")
    assert resume_run(path) == whole[0]


def test_a_run_without_a_round_has_no_figures_yet(tmp_path):
    with pytest.raises(Stop):
        start_run(tmp_path / "run", CONFIG, stop_at(1))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="has done no round yet"):
        read_run(tmp_path / "run").series("rounds", "test.loss")


def test_a_run_whose_worker_is_killed_says_how_to_go_on(tmp_path):
    before, config = set(multiprocessing.active_children()), replace(CONFIG, processes=2, rounds=2, cohort=20)

    def on_round(number, point):
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()

    with pytest.raises(ProcessDied, match=f"exit code -9; .*; go on with --resume={tmp_path}/run$"):
        start_run(tmp_path / "run", config, on_round)
    assert resume_run(tmp_path / "run").rounds == 2


def test_a_simulation_that_cannot_begin_leaves_no_folder(tmp_path):
    with pytest.raises(Exception, match="a cohort of 99 cannot be drawn"):
        start_run(tmp_path / "run", replace(CONFIG, cohort=99))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunNotKept) as refused:
        start_run(tmp_path / "file" / "run", replace(CONFIG, rounds=1))
    assert str(refused.value).startswith(f"the run in {tmp_path}/file/run cannot be kept: Not a directory: ")
    assert "--resume" not in str(refused.value)


def test_a_disk_that_is_full_at_the_start_leaves_no_folder(tmp_path):
    def fill():
        config = completed(CONFIG)
        for most in (100, 0):  # the second one is too small for the lock
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            with pytest.raises(RunNotKept, match="run cannot be kept: File too large"):
                start_run(tmp_path / "run", config)

    assert in_child(fill) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_survives_its_file_whatever_its_values():
    config = SimulationConfig(
        model='my_models:of"quotes"\\\x7f\n',
        data=Path("/tmp/ä b"),
        settings={"client_lr": 1e-7, "nesterov": True, "form": "paper"},
        target_accuracy=0.1 + 0.2,
        schedule=ServerSchedule(warmup_rounds=3),
        seed=2**63 - 1,
    )
    assert to_config(tomllib.loads(to_toml(config))) == config


def test_the_data_of_a_run_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    config = completed(SimulationConfig(model="mlp", dataset="mine", data=Path("data")))
    assert (config.dataset, config.data) == (str(tmp_path / "mine"), tmp_path / "data")
    assert completed(SimulationConfig(model="mlp", dataset="digits")).dataset == "digits"


@pytest.mark.parametrize("name", ["train.loss", LOSS])
@pytest.mark.parametrize(
    ("loss", "explodes"),
    [(2 * MOST_LOSS_GROWTH, False), (2.001 * MOST_LOSS_GROWTH, True), (math.nan, True), (math.inf, True)],
)
def test_a_loss_explodes_that_is_ten_times_the_first_or_no_number(name, loss, explodes):
    watch = Watch([{"round": 1, name: 2.0}])
    assert watch.look({"round": 2, name: loss}) == explodes
    assert (watch.words is not None) == explodes


def test_losses_are_held_against_the_one_before_training():
    watch = Watch([{"round": 0, START: 1.0}])
    assert watch.look({"round": 1, LOSS: 1.001 * MOST_LOSS_GROWTH})
