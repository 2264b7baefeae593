"""What commands tell a person: what to type next, what is missing, what is in the way."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.store.tasks import open_coordinator_store
from fedcore.algorithms import create
from fedcore.signing import SucceedingKey, key_text
from muster.app import app
from muster.commands.stores import given_again
from muster.local.demo_tasks import SETTINGS
from tests.coordinator.bundles import make_bundle
from tests.forked import COMMAND, forked
from tests.muster.test_cli import in_process, muster

LOADED = """
import sys
from muster.cli import main
sys.argv[0] = "muster"
try:
    main()
except SystemExit as ended:
    print(ended.code, *sorted({"torch", "numpy"} & set(sys.modules)))
"""


def next_steps(err):
    """The commands that are offered, as words after `muster`."""
    return [shlex.split(line)[1:] for line in err.splitlines() if line.startswith("  muster ")]


@contextmanager
def serving(folder, *options, **environment):
    """A coordinator as a person starts it, in `folder`; gives what it has said when it was ready."""
    said = folder / "said"
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--ready-file", str(folder / "url"), *map(str, options)]
    with said.open("w") as output:
        environment = {**os.environ, "MUSTER_LOG_FORMAT": "text", **environment}
        process = forked(COMMAND).start(command, stderr=output, cwd=folder, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "url").exists():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield said.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_each_command_offers_the_next_and_it_works_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = in_process("export", "logreg", "--out", "my plan")
    serve, create = next_steps(made.stderr)
    assert serve == ["coordinator", "serve", "--accept-unattested"]
    with serving(tmp_path, *serve[2:]) as said:
        created = in_process(*create)
        assert created.exit_code == 0, created.output
        fleet, metrics = next_steps(created.stderr)
        url = (tmp_path / "url").read_text().splitlines()[0]
        assert fleet[:6] == ["fleet", "run", "--coordinator", url, "--population", "demo"]
        assert fleet[6:] == ["--devices", "60", "--concurrency", "26"]
        assert in_process(*metrics).exit_code == 0
        assert metrics[2] in in_process("task", "list").stdout
        again, token = next_steps(said)
        assert [word if word != "plan" else "my plan" for word in again] == create
        assert in_process(*token).exit_code == 0


def test_each_step_of_a_secure_trial_works_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_process("export", "logreg", "--out", "plan")
    with serving(tmp_path, "--trial") as said:
        assert "protect nobody's reports" in said
        create = next_steps(said)[0]
        assert create[-5:] == ["--secagg", "--clip-norm", "1", "--release-key", "muster-trial/release.pem"]
        created = in_process(*create)
        assert created.exit_code == 0, created.output
        fleet = next_steps(created.stderr)[0]
        shown = in_process("key", "show", "muster-trial/release.pem").stdout.strip()
        assert fleet[fleet.index("--signer") + 1] == shown
    keys = [path.read_bytes() for path in sorted((tmp_path / "muster-trial").glob("*.[kp]e[ym]"))]
    (tmp_path / "url").unlink()
    with serving(tmp_path, "--trial"):
        assert [path.read_bytes() for path in sorted((tmp_path / "muster-trial").glob("*.[kp]e[ym]"))] == keys
    assert len(keys) == 2


def test_a_trial_of_a_coordinator_with_an_authority_is_refused(tmp_path):
    key = SucceedingKey.new("authority")
    options = ["--authority", key_text(key.public), "--authority-url", "http://127.0.0.1:1", "--trial"]
    ended = in_process("coordinator", "serve", *options, "--db", f"sqlite:///{tmp_path / 'm.db'}")
    assert ended.exit_code == 2
    assert "this coordinator has an authority; leave one of the two out" in ended.output


def test_next_steps_name_the_store_that_was_given_and_programs_hear_none(tmp_path):
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", str(tmp_path / "b")]
    open_coordinator_store(where[1], where[3]).close()
    words = ["task", "create", "--plan", make_bundle(tmp_path / "plan").folder, "--population", "p", "--goal", 3]
    made = in_process(*words, "--rounds", 2, *where)
    fleet, metrics = next_steps(made.stderr)
    assert fleet[3] == "http://127.0.0.1:8080"
    assert metrics[3:] == where
    assert in_process(*words, "--rounds", 2, *where, "--json").stderr == ""
    with serving(tmp_path, *where) as said:
        create, token = next_steps(said)
        assert create[-4:] == where
        assert token[-2:] == where[:2]
    (tmp_path / "url").unlink()
    with serving(tmp_path, *where, MUSTER_LOG_FORMAT="json") as said:
        assert next_steps(said) == []


def test_a_task_that_devices_by_default_refuse_says_so(tmp_path, monkeypatch):
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", str(tmp_path / "b")]
    open_coordinator_store(where[1], where[3]).close()
    words = ["task", "create", "--plan", make_bundle(tmp_path / "plan").folder, "--population", "p", "--goal", 3]
    plain = in_process(*words, "--rounds", 2, *where)
    assert (plain.exit_code, "cache_bytes" in plain.stderr) == (0, False)
    monkeypatch.setattr("muster.releasing_models.Policy", lambda: SimpleNamespace(cache_bytes=10))
    done = in_process(*words, "--rounds", 2, *where)
    assert done.exit_code == 0, done.exception
    said = " ".join(done.stderr.split())
    assert "Those whose policy has cache_bytes of 0 MB, as by default, refuse it" in said


def test_next_steps_repeat_no_password():
    again = given_again(
        db="postgresql://bob:hunter2@db:5432/muster?password=hunter2", blobs="b", coordinator="https://bob:hunter2@here"
    )
    assert again == ["--db", "postgresql://bob:***@db:5432/muster", "--blobs", "b", "--coordinator", "https://here"]


@pytest.mark.parametrize(
    ("options", "warned"),
    [([], True), (["--accept-unattested"], False), (["--enrolment-secret-file", "secret"], False)],
)
def test_coordinator_that_can_enrol_nobody_names_the_options(tmp_path, options, warned):
    (tmp_path / "secret").write_text("0123456789abcdef")
    with serving(tmp_path, *options, MUSTER_ACCEPT_UNATTESTED="0") as said:
        line = [line for line in said.splitlines() if "no new device can enrol" in line]
    assert bool(line) is warned
    assert not warned or ("--enrolment-secret-file FILE" in line[0] and "--accept-unattested" in line[0])


@pytest.mark.parametrize(("option", "other"), [("--port", "--admin-port"), ("--admin-port", "--port")])
def test_a_port_in_use_is_named_with_the_option_that_changes_it(tmp_path, option, other):
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "b"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = muster("coordinator", "serve", option, port, other, 0, *where)
    assert status == 1
    assert err.splitlines()[-1] == (
        f"error: 127.0.0.1: port {port} is taken; choose another with {option} (0 takes a free one)"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "mlp", "--algorithm", "mimelit"], "did you mean mimelite? there are fedavg, fedadam, mimelite"),
        (["simulate", "--model", "mlp", "--algorithm", "fedadm"], "did you mean fedadam? there are"),
        (["demo", "--algorithms", "fedavg,mimelit"], "did you mean mimelite? there are"),
        (
            ["export", "mlp", "--algorithm", "scaffold", "--set", "clip_norm=1"],
            "clip_norm is not for scaffold, whose clients keep vectors",
        ),
        (["export", "mlp", "--set", "cleint_lr=1"], "did you mean client_lr? there are client_lr, epochs"),
        (["simulate", "--model", "mlp", "--set", "lr=1"], "did you mean client_lr? there are"),
    ],
)
def test_a_wrong_algorithm_or_setting_is_said_before_torch_is_loaded(arguments, says):
    command = [sys.executable, "-c", LOADED, *arguments]
    done = forked("muster.app").run(command)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "digit_cnn"], "did you mean digits_cnn? there are least_squares"),
        (["export", "mlp", "--format", "onx"], "did you mean onnx? there are"),
        (["simulate", "--model", "mlp", "--dataset", "emnist"], "did you mean federated_emnist? there are"),
        (
            ["fleet", "run", "--coordinator", "http://x", "--population", "p", "--backend", "onnxruntim"],
            "did you mean onnxruntime? there are",
        ),
    ],
)
def test_other_misspelt_names_get_the_closest_match(arguments, says):
    assert says in str(in_process(*arguments).exception)


def test_the_demo_is_tuned_for_algorithms_that_exist():
    for name, settings in SETTINGS.items():
        create(name, settings)


def test_networks_of_proxies_that_are_none_are_named():
    code, _, said = muster("authority", "serve", "--key", "k", "--trusted-proxies", "10.0.0.1/8")
    assert code == 2
    assert "trusted_proxies: 10.0.0.1/8 has host bits set" in said


def test_the_version_is_that_of_the_package():
    assert muster("--version") == (0, f"muster {version('muster-fl')}\n", "")


@pytest.mark.parametrize("words", [[], ["task"], ["task", "create"], ["device"], ["device", "run"]])
def test_short_and_long_options_for_help_are_one(words, typed):
    assert typed(*words, "-h") == typed(*words, "--help")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("muster coord", ["coordinator"]),
        ("muster task che", ["checkpoint"]),
        ("muster export --alg", ["--algorithm"]),
        ("muster de", ["demo", "device"]),
    ],
)
def test_the_shell_completes_commands_and_options(line, words):
    environment = {"_MUSTER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [str(Path(sys.executable).parent / "muster")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    assert sorted(done.stdout.split()) == words


def test_export_replaces_a_plan_when_told_to_and_clears_the_old(tmp_path, typed):
    folder = tmp_path / "plan"
    assert in_process("export", "logreg", "--out", folder).exit_code == 0
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    refused = typed("export", "mlp", "--out", folder)
    assert refused[:2] == (2, "")
    assert f"{folder} holds a plan already; name another folder, or replace the plan with --force" in " ".join(
        refused[2].split()
    )
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    made = in_process("export", "mlp", "--out", folder, "--force", "--json")
    assert json.loads(made.stdout)["model"] == "mlp"
    fresh = tmp_path / "fresh"
    in_process("export", "mlp", "--out", fresh)
    assert len(list((folder / "blobs").iterdir())) == len(list((fresh / "blobs").iterdir()))
    assert not {path.name for path in before if path.parent.name == "blobs"} & {
        path.name for path in (folder / "blobs").iterdir()
    }


def test_export_of_all_replaces_no_plan_unless_told_to(tmp_path):
    assert in_process("export", "logreg", "--out", tmp_path / "logreg").exit_code == 0
    refused = in_process("export", "--all", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "holds a plan already" in " ".join(refused.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logreg"]


def test_a_checkpoint_replaces_a_file_only_when_told_to(tmp_path, typed):
    where = ["--db", f"sqlite:///{tmp_path / 'm.db'}", "--blobs", tmp_path / "b"]
    open_coordinator_store(where[1], where[3]).close()
    words = ["task", "create", "--plan", make_bundle(tmp_path / "plan").folder, "--population", "p", "--goal", 3]
    task = json.loads(in_process(*words, "--rounds", 2, *where, "--json").stdout)["task"]
    out = tmp_path / "model.safetensors"
    out.write_text("mine" * 1000)
    save = ["task", "checkpoint", task, "--out", out, *where]
    status, _, err = typed(*save)
    assert status == 2
    assert f"{out} exists; name another file, or replace it with --force" in " ".join(err.split())
    assert out.read_text() == "mine" * 1000
    assert in_process(*save, "--force").exit_code == 0
    fresh = tmp_path / "fresh"
    assert in_process("task", "checkpoint", task, "--out", fresh, *where).exit_code == 0
    assert out.read_bytes() == fresh.read_bytes()


def test_lists_of_commands_are_not_cut_at_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ["", *(group.name for group in app.registered_groups)]:
        out = in_process(*filter(None, [name]), "--help").stdout
        assert [line for line in out.split("Commands:")[1].splitlines() if re.search(r"\.\.\.$", line)] == []
