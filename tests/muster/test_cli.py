"""The command line as a person types it: output, exit codes, help."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from benchmarks import load
from coordinator.keys import Keys
from coordinator.store.database import HEAD, Database as Store
from coordinator.store.tasks import open_coordinator_store
from export.models import MODELS
from fedcore.plan import BlobRef
from fedcore.signing import SigningKey
from muster.app import app
from simulator import datasets
from simulator.errors import BrowserMissing, FleetError
from simulator.fleet.fork_servers import java_command
from tests.device_runtime.node import node
from tests.export import models as user_models
from tests.forked import COMMAND, forked

FLEET = ("fleet", "run", "--coordinator", "http://x", "--population", "p")


def muster(*arguments, **environment):
    """A real process: what a shell sees."""
    words = [sys.executable, "-m", "muster", *map(str, arguments)]
    done = forked(COMMAND).run(words, env={**os.environ, "COLUMNS": "200", **environment})
    return done.returncode, done.stdout, done.stderr


def in_process(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "plan"
    result = in_process(
        "export", "logreg", "--algorithm", "mimelite", "--set", "client_lr=0.3", "--out", folder, "--json"
    )
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_export_prints_what_it_made(plan):
    folder, facts = plan
    assert facts["bundle"] == str(folder)
    assert facts["settings"]["client_lr"] == 0.3
    assert facts["parity_l2"] < 1e-5
    assert (facts["down_bytes"], facts["parameters"]) == (2 * 4 * 650, 650)


def test_plan_show_and_verify(plan):
    folder, facts = plan
    shown = in_process("plan", "show", folder, "--json")
    assert json.loads(shown.stdout) == facts
    verified = json.loads(in_process("plan", "verify", folder, "--json").stdout)
    assert verified["ok"]
    proven = verified["certificate"]["formats"]["onnx"]["parity"]
    assert {parity["graph"] for parity in proven} == {"train.step", "sweep.step", "report", "predict"}


def test_plan_show_tells_of_both_trips(tmp_path):
    made = json.loads(in_process("export", "logreg", "--algorithm", "feddane", "--out", tmp_path, "--json").stdout)
    assert (made["down_bytes"], made["second_down_bytes"]) == (4 * 650, 2 * 4 * 650)
    assert (list(made["passes"]), list(made["second_passes"])) == (["sweep"], ["sweep", "train"])
    shown = " ".join(in_process("plan", "show", tmp_path).stdout.split())
    assert "second_passes sweep (1 × all examples" in shown


def test_export_all_makes_a_table_and_names_what_failed(tmp_path, monkeypatch, executorch):
    monkeypatch.setattr(
        "export.models.MODELS", {"logreg": MODELS["logreg"], "broken": user_models.batch_norm, "mlp": MODELS["mlp"]}
    )
    result = in_process("export", "--all", "--out", tmp_path, "--json")
    assert result.exit_code == 1
    assert "GroupNorm" in result.stderr
    rows = json.loads(result.stdout)
    assert [(row["model"], row["format"]) for row in rows] == [
        (model, form) for model in ("logreg", "mlp") for form in ("onnx", "executorch")
    ]
    for row in rows:
        assert row["parity_l2"] <= row["tolerance"] == 1e-5
        assert row["bytes"] > 1000
        assert 0 < row["seconds"] < 60
    assert in_process("plan", "verify", tmp_path / "mlp").exit_code == 0
    assert "executorch" in in_process("plan", "show", tmp_path / "mlp").stdout


def test_bench_device_step_compares_with_torch_in_the_same_run(executorch):
    result = in_process("bench", "device_step", "--model", "mlp", "--blocks", 1, "--json")
    assert result.exit_code == 0, result.output
    steps = {step["backend"]: step for step in json.loads(result.stdout)["steps"]}
    assert set(steps) == {"torch", "onnxruntime", "executorch"}
    for step in steps.values():
        assert step["ratio_to_eager"] == pytest.approx(step["cpu_ms"] / steps["torch"]["cpu_ms"])


@pytest.mark.long
def test_bench_devices_js_compares_node_with_python():
    node()
    result = in_process("bench", "devices_js", "--model", "logreg", "--blocks", 1, "--dim", 1000, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (step,) = found["steps"]
    assert step["step_ratio"] == pytest.approx(step["js_ms"] / step["python_ms"])
    assert 0 < step["outside_ms"] < step["js_ms"]
    assert 0 < step["run_ratio"] < 20
    assert [part["part"] for part in found["secure"]] == ["pack", "pack with noise", "mask"]
    assert found["mask_ratio"] == found["secure"][-1]["ratio"] > 0
    assert "page" not in found


@pytest.mark.long
def test_bench_devices_js_measures_a_page_in_a_browser():
    node()
    words = ("--runtime", "browser", "--model", "logreg", "--blocks", 1, "--dim", 1000, "--json")
    result = in_process("bench", "devices_js", *words)
    if isinstance(result.exception, BrowserMissing):
        pytest.skip(str(result.exception))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (step,), page = found["steps"], found["page"]
    assert found["engine"].startswith("onnxruntime-web ")
    assert step["outside_ms"] > 0
    assert step["run_ratio"] is None
    assert step["step_ratio"] == pytest.approx(step["js_ms"] / step["python_ms"])
    assert [part["part"] for part in found["secure"]] == ["pack", "pack with noise", "mask"]
    # Compressed, the engine alone is above three megabytes.
    assert 3 < page["first_load_mb"] < 5
    assert page["ready_cpu_s"] > 0
    assert 0 < page["empty_mb"] < page["training_mb"] > page["ended_mb"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_devices_jvm_compares_a_jvm_with_python():
    try:
        java_command()
    except FleetError as error:
        pytest.skip(str(error))
    result = in_process("bench", "devices_jvm", "--model", "logreg", "--blocks", 1, "--dim", 1000, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (step,) = found["steps"]
    assert step["step_ratio"] == pytest.approx(step["jvm_ms"] / step["python_ms"])
    for what in ("session", "secure"):
        assert found[f"{what}_ratio"] == pytest.approx(found[f"{what}_jvm_ms"] / found[f"{what}_python_ms"])
    assert 50 < found["rss_mb"] < found["rss_wide_mb"]
    assert 0 < found["start_cpu_s"] < 10
    assert min(found["lines"][module] for module in ("core", "jvm")) > 0
    assert all(word.split(".")[0].isdecimal() for word in found["onnxruntime"].values())


def test_bench_devices_js_says_that_there_is_no_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = in_process("bench", "devices_js", "--runtime", "browser")
    assert isinstance(result.exception, BrowserMissing)
    assert "apt-get install chromium" in str(result.exception)


def test_bench_secagg_measures_both_ends_of_a_session():
    result = in_process("bench", "secagg", "--n", 10, "--dim", 1000, "--repeats", 1, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["k"], figures["t"], figures["mode"], figures["targets"]) == (9, 6, "active", {})
    assert 8 * (335 + 2) < figures["bytes_up"] < 8 * 335 + 3000
    assert min(figures[name] for name in ("client_ms", "server_s", "receive_ms", "ctr_fraction", "mask_gb_s")) > 0


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        (("checkin", "--seconds", 0.1, "--blocks", 1, "--devices", 10), "ratio_to_bare"),
        pytest.param(("report", "--devices", 3, "--size", 1000, "--pairs", 1), "costs", marks=pytest.mark.long),
        pytest.param(("soak", "--minutes", 0.05, "--devices", 12), "requests", marks=pytest.mark.long),
        (("signatures", "--blocks", 1), "costs"),
        (("predict", "--blocks", 1), "predict_to_bare"),
    ],
)
def test_a_bench_runs_and_prints_one_json_object(options, figure, coordinators, monkeypatch):
    monkeypatch.setattr(load, "local_coordinator", coordinators.local)
    result = in_process("bench", *options, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[figure]


def test_plans_are_signed_at_export_or_later_and_commands_say_by_whom(plan, typed, tmp_path):
    keys = [tmp_path / "a.pem", tmp_path / "b.pem"]
    first, second = (json.loads(in_process("key", "new", "--out", key, "--json").stdout)["signer"] for key in keys)
    folder = tmp_path / "signed"
    made = in_process("export", "logreg", "--out", folder, "--sign", keys[0], "--json")
    assert json.loads(made.stdout)["signer"] == first
    assert json.loads(in_process("plan", "sign", folder, "--key", keys[1], "--json").stdout)["signer"] == second
    assert json.loads(in_process("plan", "show", folder, "--json").stdout)["signer"] == second
    assert json.loads(in_process("plan", "verify", folder, "--json").stdout)["signer"] == second
    assert f"signed by {second}" in in_process("plan", "verify", folder).stdout
    assert "not signed" in in_process("plan", "verify", plan[0]).stdout
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "blobs"]
    open_coordinator_store(where[1], where[3]).close()
    task = ["task", "create", "--plan", folder, "--population", "p", "--goal", 3, "--rounds", 2, *where, "--json"]
    assert json.loads(in_process(*task).stdout)["signer"] == second
    assert typed("key", "new", "--out", keys[0])[:2] == (1, "")


def test_a_signature_of_another_plan_is_refused_by_every_command(plan, typed, tmp_path):
    key, folder = tmp_path / "key.pem", tmp_path / "plan"
    assert in_process("key", "new", "--out", key).stdout.startswith("ed25519:")
    shutil.copytree(plan[0], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    signature = SigningKey.load(key).sign(BlobRef.of(b"another"))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"signature": msgspec.to_builtins(signature)}))
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "blobs"]
    open_coordinator_store(where[1], where[3]).close()
    task = ["task", "create", "--plan", folder, "--population", "p", "--goal", 3, "--rounds", 2, *where]
    for command in (["plan", "show", folder], ["plan", "verify", folder], task):
        status, out, err = typed(*command)
        assert (status, out) == (1, "")
        assert "does not have the signature of ed25519:" in " ".join(err.split())


def test_old_database_is_refused_by_every_command_until_migrated(typed, tmp_path):
    database = ["--db", f"sqlite:///{tmp_path / 'm.db'}"]
    assert in_process("coordinator", "migrate", *database).exit_code == 1
    open_coordinator_store(database[1], tmp_path / "blobs").close()
    down = in_process("coordinator", "migrate", *database, "--to", "base", "--json")
    assert json.loads(down.stdout) == {"before": HEAD, "after": "base"}
    assert typed("task", "list", *database, "--blobs", tmp_path / "blobs")[0] == 1
    assert json.loads(in_process("coordinator", "migrate", *database, "--json").stdout)["after"] == HEAD
    open_coordinator_store(database[1], tmp_path / "new").close()  # the blobs of before belong to the dropped tables
    assert in_process("task", "list", *database, "--blobs", tmp_path / "new").exit_code == 0
    collected = in_process("coordinator", "collect", *database, "--blobs", tmp_path / "new", "--json")
    assert json.loads(collected.stdout) == {"models": 0, "rows": 0, "objects": 0, "assignments": 0}


def test_tasks_are_created_listed_paused_resumed_and_cancelled(plan, tmp_path):
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "blobs"]
    open_coordinator_store(where[1], where[3]).close()
    made = in_process(
        "task", "create", "--plan", plan[0], "--population", "p", "--goal", 3, "--rounds", 2, *where, "--json"
    )
    task = json.loads(made.stdout)["task"]
    assert in_process("task", "metrics", task, *where).stdout.startswith("no round has begun: no coordinator drives")
    for command, state in (("pause", "paused"), ("resume", "active"), ("cancel", "cancelled")):
        done = in_process("task", command, task, *where)
        assert done.exit_code == 0
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["task", "name", "state", "progress"]
        assert state in done.stdout
        assert json.loads(in_process("task", "show", task, *where, "--json").stdout)["state"] == state
    assert [entry["task"] for entry in json.loads(in_process("task", "list", *where, "--json").stdout)] == [task]
    nothing = {"rounds": [], "evaluations": [], "sessions": []}
    assert json.loads(in_process("task", "metrics", task, *where, "--json").stdout) == nothing
    assert in_process("task", "checkpoint", task, "--out", tmp_path / "model.safetensors", *where).exit_code == 0

    assert load_file(tmp_path / "model.safetensors")["1.weight"].shape == (10, 64)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("export", "resnet"), 2, "no model is called 'resnet'; did you mean resnet18_gn? there are least_squares, "),
        (
            ("export", "mlp", "--algorithm", "sgd"),
            2,
            "no algorithm is called 'sgd'; did you mean fedsgd? there are fedavg, fedadam",
        ),
        (("export", "mlp", "--set", "momentum=0.9"), 2, "fedavg has no setting 'momentum'"),
        (("export", "mlp", "--set", "client_lr=-1"), 2, "client_lr must be a number above 0, not '-1'"),
        (("export", "mlp", "--set", "client_lr"), 2, "a number above 0, not True; give it a value, as client_lr=0.1"),
        (("export", "mlp", "--set", "=1"), 2, "not of the form key=value"),
        (("export", "mlp", "--colour"), 2, "No such option"),
        (("export", "mlp", "--model", "logreg"), 2, "the model is mlp already; leave one of them out"),
        (("export", "--model", "digit_cnn"), 2, "no model is called 'digit_cnn'; did you mean digits_cnn?"),
        (("simulate", "mlp", "--model", "mlp"), 2, "mlp is no file, and the model is mlp already; leave one"),
        (("simulate", "digit_cnn"), 2, "no model is called 'digit_cnn'; did you mean digits_cnn?"),
        (("simulate", "nowhere.toml"), 2, "cannot read nowhere.toml: No such file"),
        (("simulate", "tests/export/models.py:wrong_size"), 1, "wrong_size does not run on a batch"),
        (("export", "--model", "tests/export/models.py:batch_norm"), 1, "GroupNorm"),
        (("export", "mlp", "--client-lr", "0.1"), 2, "client_lr is a setting of fedavg: --set client_lr=0.1"),
        (("export", "mlp", "client_lr=0.1"), 2, "client_lr is a setting of fedavg: --set client_lr=0.1"),
        (("export", "mlp", "--algorithm=fedadam", "--tau"), 2, "tau is a setting of fedadam: --set tau=VALUE"),
        (("simulate", "--model", "mlp", "--lr=0.1"), 2, "client_lr is a setting of fedavg: --set client_lr=0.1"),
        (("simulate", "--model", "mlp", "--beta1", "0.5"), 2, "beta1 is a setting of fedadam: --set beta1=0.5"),
        (("simulate", "mlp", "--set", "rounds=3"), 2, "rounds is no setting of fedavg but an option: --rounds 3"),
        (("export", "mlp", "--set=hold_out_examples=0.1"), 2, "but an option: --hold-out-examples 0.1"),
        (("simulate", "mlp", "--set", "lr=3"), 2, "fedavg has no setting 'lr'"),
        (("simulate", "--model", "mlp", "--round", "2"), 2, "No such option: --round"),
        (("export", "mlp", "--format", "coreml"), 2, "no format is called 'coreml'; there are onnx, executorch"),
        (("export", "mlp", "--all"), 2, "name a model or pass --all"),
        (("bench", "device_step", "--model", "lenet"), 2, "no model is called 'lenet'"),
        ((*FLEET, "--backend", "tflite"), 2, "no backend is called 'tflite'; there are onnxruntime"),
        ((*FLEET, "--profile", "/nowhere.toml"), 2, "fleet profile /nowhere.toml"),
        ((*FLEET, "--profile", "x.toml", "--arch", "aarch64"), 2, "it names architectures and backends itself"),
        (("export", f"{user_models.__name__}:batch_norm"), 1, "GroupNorm"),
        (("export", "mlp", "--compress", "top_k=0.1"), 2, "top_k does not commute with sums: every device would"),
        (("simulate", "--model", "mlp", "--compress", "rotation=2"), 2, "write rotation without a number, not 2"),
        (("demo", "--algorithms", "sgd"), 2, "no algorithm is called 'sgd'"),
        (("simulate", "--model", "mlp", "--dataset", "imagenet"), 2, "no data set is called 'imagenet'"),
        (("simulate", "--model", "mlp", "--dataset", "wisdm"), 2, "--data=DIR"),
        (
            ("simulate", "--model", "mlp", "--cohort", "1000"),
            2,
            "a cohort of 1000 cannot be drawn from 60 clients: of 75 users 15 are held out; take a smaller cohort",
        ),
        (
            ("simulate", "--model", "mlp", "--engine", "graph"),
            2,
            "engine must be one of auto, graphs, torch, not graph",
        ),
        (("simulate", "--model", "mlp", "--privacy", "epsilon=8"), 2, "delta is missing"),
        (("simulate", "--model", "mlp", "--device", "cuda:7"), 2, "cannot compute on 'cuda:7'"),
        (("simulate",), 2, "name a model"),
        (("device", "run", "--coordinater", "http://x"), 2, "no option --coordinater; did you mean --coordinator?"),
        (("simulate", "--resume", "nowhere"), 2, "nowhere is not the folder of a run: it has no config.toml"),
        (("simulate", "--model", "mlp", "--out", "."), 2, ". exists already; take another folder"),
        (
            ("simulate", "--model", f"{user_models.__name__}:wrong_size"),
            1,
            "error: wrong_size does not run on a batch of x [1, 1, 8, 8]: RuntimeError: mat1 and mat2 shapes cannot be "
            "multiplied (1x64 and 65x10)",
        ),
        (
            ("simulate", "--model", f"{user_models.__name__}:wrong_size", "--engine", "torch", "--processes", "2"),
            1,
            "wrong_size does not run on a batch",
        ),
        (
            ("simulate", "--model", "mlp", "--cohort", "5", "--set", "client_lr=1e30"),
            1,
            "error: round 1: no client has a finite report: training diverged; a lower client_lr is the likely remedy",
        ),
        (("simulate", "mlp", "--set", "client_lr=0,3"), 2, "a fraction has a point: client_lr=0.3"),
        (("coordinator", "serve", "--port", "99999"), 2, "port (argument): it must be at most 65535"),
        (("plan", "show", "/nix"), 1, "/nix is not a plan bundle: there is no such folder"),
        (("key", "new", "--out", __file__), 1, "test_cli.py exists already; name another file, or remove it first"),
        (("export", "[/x]"), 2, "no model is called '[/x]'"),
        (("export", "mlp", "--out", "/dev/null/plan"), 1, "/dev/null/plan"),
        (("demo", "--out", "/"), 2, "/ exists already; take another folder"),
        (("task", "list", "--db", "sqlite:////nowhere/m.db"), 1, "sqlite:////nowhere/m.db"),
        (("plan", "show", "/nowhere"), 1, "is not a plan bundle"),
        (("coordinator", "serve", "--db", "mysql://x"), 1, "a database is given as sqlite:///PATH or postgresql://"),
    ],
)
def test_mistakes_get_one_clear_line_and_an_exit_code(arguments, code, words, typed):
    status, out, err = typed(*arguments)
    assert (status, out) == (code, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("task", "show"), "error: Missing argument 'TASK'; see `muster task show --help`"),
        (("task", "list", "--nope"), "error: No such option: --nope; see `muster task list --help`"),
        (("tsk",), "error: No such command 'tsk'. Did you mean 'task', 'ask'? See `muster --help`"),
        (
            ("demo", "--rounds", "0"),
            "error: Invalid value for '--rounds': it must be at least 1; see `muster demo --help`",
        ),
    ],
)
def test_a_command_typed_wrong_gets_one_line_and_where_to_read_on(arguments, line, typed):
    assert typed(*arguments) == (2, "", f"{line}\n")


def test_a_group_without_a_command_shows_its_help(typed):
    status, out, err = typed("task")
    assert (status, out) == (2, "")
    assert err.startswith("Usage: muster task [OPTIONS] COMMAND [ARGS]...\n\n  Create and operate tasks.\n")


def test_what_has_no_such_name_ends_with_the_code_of_usage_errors(typed, tmp_path):
    database = f"sqlite:///{tmp_path}/muster.db"
    Store(database).close()
    where = ("--db", database, "--blobs", tmp_path)
    for words in (
        ("task", "show", "nope"),
        ("model", "promote", "keyboard", "--share", "100%"),
        ("task", "metrics", "nope"),
    ):
        status, _, err = typed(*words, *where)
        assert (status, err.startswith("error: there is no ")) == (2, True), err


@pytest.mark.parametrize("command", ["simulate", "export"])
def test_help_says_that_files_hold_ones_own_code(command):
    words = " ".join(in_process(command, "--help").output.split())
    assert "your own as package.module:Class or file.py:Class" in words
    assert ("package.module:function, file.py:function, or a path" in words) is (command == "simulate")


def test_a_data_set_and_an_algorithm_are_read_from_files(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a_data_set.py").write_text(
        "from simulator import datasets\ndef people():\n    return datasets.users('digits', None, 20)[0]\n"
    )
    Path("an_algorithm.py").write_text(
        "from fedcore.algorithms.fed_avg import FedAvg\nclass Mine(FedAvg):\n    name = 'mine'\n"
    )
    own = ("--dataset", "a_data_set.py:people", "--algorithm", "an_algorithm.py:Mine")
    status, out, err = typed("simulate", "logreg", *own, "--rounds", 1, "--cohort", 3, "--processes", 1, "--json")
    assert (status, json.loads(out)["algorithm"]) == (0, "mine"), err


def test_simulate_reads_a_file_and_flags_win(typed, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('model = "logreg"\nalgorithm = "mimelite"\nrounds = 9\ncohort = 4\n[settings]\nclient_lr = 0.2\n')
    status, out, err = typed("simulate", config, "--rounds", 2, "--set", "beta1=0.5", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert (result["rounds"], result["cohort"], result["algorithm"]) == (2, 4, "mimelite")
    assert (result["settings"]["client_lr"], result["settings"]["beta1"]) == (0.2, 0.5)
    for wrong, words in (
        ('model = "mlp"\ncolour = 1', "run.toml: there is no 'colour'"),
        ('model = "mlp"\nclient_lr = 0.1', "client_lr is a setting of fedavg: write settings.client_lr = 0.1"),
        ('model = "mlp"\nrounds = "9"', "run.toml: rounds must be a whole number from 1 to 2^63 - 1, not '9'"),
        ('model = "mlp"\nsettings = 3', "run.toml: settings must be a mapping, not 3"),
        ("model = ", "cannot read"),
    ):
        config.write_text(wrong)
        result = in_process("simulate", config)
        assert (result.exit_code, words in result.output) == (2, True), result.output


def test_a_run_is_shown_resumed_and_refused_with_other_options(typed, tmp_path):
    path = tmp_path / "run"
    words = ["--model", "logreg", "--rounds", 4, "--cohort", 3, "--evaluate-every", 2, "--processes", 1]
    status, out, err = typed("simulate", *words, "--out", path)
    assert (status, "rounds" in out, f"run: {path}" in err) == (0, True, True), err
    assert "held-out loss" in err
    assert "accuracy 0." in err
    assert {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()} == {
        "1.weight": (10, 64),
        "1.bias": (10,),
    }
    assert "accuracy, unseen users" in (path / "learning-curve.svg").read_text()
    status, out, err = typed("simulate", "--resume", path, "--json")
    assert (status, json.loads(out)) == (0, json.loads((path / "result.json").read_text())), err
    status, _, err = typed("simulate", "--resume", path, "--rounds", 9)
    assert (status, "differ in rounds (4 and 9)" in err) == (2, True)
    again = tmp_path / "again"
    status, _, err = typed("simulate", path / "config.toml", "--out", again)
    assert status == 0, err
    assert (again / "config.toml").read_text() == (path / "config.toml").read_text()


def test_a_baseline_is_simulated_with_settings_of_its_own(typed):
    status, out, err = typed(
        "simulate", "--model", "ridge", "--baseline", "dane", "--set", "mu=0.5", "--rounds", 1, "--json"
    )
    assert status == 0, err
    result = json.loads(out)
    assert (result["baseline"], result["algorithm"], result["settings"]["mu"]) == ("dane", "dane", 0.5)
    assert result["test_accuracy"] > 0.5


def test_one_device_run_by_hand_reports(plan, coordinators, tmp_path):
    np.savez(tmp_path / "mine.npz", **datasets.load("digits").shard(0))
    create = ["task", "create", "--plan", plan[0], "--population", "p", "--goal", 1, "--rounds", 1]
    with coordinators.local(tmp_path) as local:
        where = ["--db", local.database, "--blobs", local.blobs]
        assert in_process(*create, "--over-selection", 1, *where).exit_code == 0
        device = ["device", "run", "--coordinator", local.url, "--population", "p", "--examples", tmp_path / "mine.npz"]
        device += ["--state", tmp_path / "state", "--once", "--json"]
        status, out, err = muster(*device)
        assert status == 0, out + err
        assert json.loads(out)["outcome"] == "reported"
        status, out, _ = muster(*device)
        assert (status, json.loads(out)["reason"]) == (75, "no-task")
    status, out, _ = muster(*(word for word in device if word != "--json"))
    assert (status, out.split()[:2]) == (1, ["failed", "unreachable"])
    assert f"Connection refused\n  does a coordinator run at {local.url}, and is that its port for devices?" in out


@pytest.mark.long
def test_a_terminated_demo_leaves_no_process_and_no_folder(tmp_path):
    temporary, cache = tmp_path / "temporary", tmp_path / "torch"  # torch's cache is there to stay
    temporary.mkdir()
    command = [sys.executable, "-m", "muster", "demo", "--algorithms", "fedavg", "--out", str(tmp_path / "a")]
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 60
    while not list(temporary.glob("muster-demo-*/devices/*/*/state")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"Traceback" not in err
    assert b"ignored" not in err
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "a").exists()
    assert str(tmp_path) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_a_coordinator_ends_well_when_told_to(tmp_path):
    database, ready = f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "url"
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--db", database]
    command += ["--blobs", str(tmp_path / "blobs"), "--ready-file", str(ready)]
    for sign in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sign)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert b"Traceback" not in err
        ready.unlink()


def test_a_coordinator_that_is_told_to_stop_while_it_starts_ends():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a database that never answers
        port = silent.getsockname()[1]
        command = [sys.executable, "-m", "muster", "coordinator", "serve", "--db", f"postgresql://m@127.0.0.1:{port}/m"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "MUSTER_KEYS": os.devnull})
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            process.terminate()
            _, err = process.communicate(timeout=8)
    assert process.returncode == 143
    assert b"Traceback" not in err


def test_commands_of_operators_find_the_store_where_the_settings_say(tmp_path, monkeypatch):
    config = tmp_path / "muster.toml"
    config.write_text(f'database = "sqlite:///{tmp_path}/m.db"\nblobs = "{tmp_path}/blobs"\nkeep_models = 1\n')
    open_coordinator_store(f"sqlite:///{tmp_path}/m.db", tmp_path / "blobs").close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_CONFIG", str(config))
    made = json.loads(in_process("coordinator", "token", "--name", "bob", "--json").stdout)["id"]
    for command in (["task", "list"], ["coordinator", "tokens"], ["coordinator", "revoke", made]):
        assert in_process(*command).exit_code == 0, command
    for command in (["coordinator", "migrate"], ["coordinator", "collect"]):
        assert in_process(*command).exit_code == 0, command
    assert not (tmp_path / "muster.db").exists()
    monkeypatch.setenv("MUSTER_DATABASE", "sqlite:///missing.db")
    assert "missing.db" in str(in_process("task", "list").exception)
    assert in_process("task", "list", "--db", f"sqlite:///{tmp_path}/m.db").exit_code == 0


def test_every_command_has_help_with_an_example_of_what_it_does():
    def walk(command, names):
        yield names
        for name, one in getattr(command, "commands", {}).items():
            yield from walk(one, [*names, name])

    names = list(walk(typer.main.get_command(app), []))
    assert ["bench", "engine"] in names
    for name in names:
        result = in_process(*name, "--help")
        assert result.exit_code == 0, name
        assert len(result.stdout.splitlines()) > 5, name


def test_a_coordinator_with_another_key_than_the_pinned_does_not_start(tmp_path, monkeypatch):
    keys, other = tmp_path / "keys", tmp_path / "other.keys"
    monkeypatch.setenv("MUSTER_DATABASE", f"sqlite:///{tmp_path / 'm.db'}")
    monkeypatch.setenv("MUSTER_KEYS", str(keys))
    with closing(Store(f"sqlite:///{tmp_path / 'm.db'}")) as database:
        pinned = Keys.open(keys, database).server.public.hex()
    monkeypatch.setenv("MUSTER_KEYS", str(other))
    command = ["coordinator", "serve", "--port", 0, "--admin-port", 0, "--blobs", tmp_path / "blobs"]
    status, _, err = muster(*command)
    assert status == 1
    assert "other.keys" in err
    assert not other.exists()
    Keys.load(keys).server.successor().save(other)  # a successor goes with it, and takes its authority along
    shown = json.loads(in_process("coordinator", "keys", "show", "--json").stdout)
    assert (shown["succeeds"], shown["key"] != pinned) == ([pinned], True)
    monkeypatch.setenv("MUSTER_KEYS", str(keys))
    status, _, err = muster(*command)
    assert status == 1
    assert shown["key"][:16] in err


def test_the_servers_key_is_rotated_and_given_up_by_commands(tmp_path, monkeypatch):
    keys = tmp_path / "m.db.keys"
    monkeypatch.setenv("MUSTER_DATABASE", f"sqlite:///{tmp_path / 'm.db'}")
    Store(f"sqlite:///{tmp_path / 'm.db'}").close()

    def run(*words):
        return json.loads(in_process("coordinator", "keys", *words, "--json").stdout)

    first = run("show")["key"]
    assert run("rotate", "--out", str(tmp_path / "offline.keys"))["key"] == first
    second = run("rotate")
    assert second["succeeds"] == [first]
    assert second["key"] == run("show")["key"] != first
    assert "is there" in str(in_process("coordinator", "keys", "rotate", "--lost").exception)
    keys.unlink()
    assert "rotate --lost" in str(in_process("coordinator", "keys", "show").exception)
    assert run("rotate", "--lost")["succeeds"] == []


def test_help_shows_words_in_square_brackets():
    assert "[1 to 100; default: 1.3]" in " ".join(in_process("task", "create", "--help").stdout.split())


def test_ctrl_c_ends_a_run_after_its_round_and_says_how_to_go_on(typed, tmp_path, monkeypatch):
    def shown(bar, config):
        return lambda number, point: os.kill(os.getpid(), signal.SIGINT) if number == 2 else None

    path = tmp_path / "run"
    words = ["--model", "logreg", "--rounds", 3, "--cohort", 3, "--processes", 1, "--set", "client_lr=1e6"]
    with monkeypatch.context() as patch:
        patch.setattr("muster.commands.simulate._shown_in", shown)
        status, _, err = typed("simulate", *words, "--out", path)
    assert (status, f"go on with --resume {path}" in err) == (130, True), err
    assert "ends after this round; press Ctrl-C again to end at once" in err
    assert [file.name for file in path.glob("checkpoint-*")] == ["checkpoint-00000002.safetensors"]
    status, out, err = typed("simulate", "--resume", path)
    assert (status, "goes on with round 3 of 3" in err) == (0, True), err
    assert re.search(r"diverged +round 1: train.loss is .*, and was 2\.\d+ at first: training diverged; a lower", out)


def test_a_loss_that_explodes_is_warned_of_once_with_the_round(typed):
    words = ["--model", "logreg", "--rounds", 3, "--cohort", 3, "--processes", 1, "--evaluate-every", 1]
    status, out, err = typed("simulate", *words, "--set", "client_lr=1e6", "--json")
    assert (status, err.count("warning: round 1: train.loss is")) == (0, 1), err
    assert json.loads(out)["diverged"] in err
    status, out, err = typed("simulate", *words)
    assert (status, "warning" in err, "diverged" in out) == (0, False, False)
