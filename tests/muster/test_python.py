"""`import muster`, as a program or a notebook uses it."""

import re
import subprocess
import sys
import threading
from xml.etree import ElementTree

import numpy as np
import pytest

import muster
from coordinator.errors import InvalidTask
from export.errors import ExportError
from export.models import load as built_in
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.errors import NotWritten
from muster.remote import RemoteError
from simulator import read_run
from simulator.errors import EngineError, RunError
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, check_in, put
from tests.muster.test_remote import served
from tests.tree import ROOT
from tools import make_python_reference

__all__ = ["served"]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = {"rounds": 2, "cohort": 4, "evaluate_every": 1, "processes": 1, "engine": "torch"}


def programs():
    return PROGRAM.findall((ROOT / "docs" / "python.md").read_text())


def test_import_loads_no_large_library():
    heavy = "{'torch', 'numpy', 'msgspec', 'onnx', 'fastapi', 'typer'}"
    program = f"import sys, muster; print(sorted({heavy} & sys.modules.keys()), dir(muster) == muster.__all__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[] True\n"


def test_every_name_can_be_imported_and_others_are_named():
    assert [name for name in muster.__all__ if getattr(muster, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="module 'muster' has no attribute 'simulat0r'"):
        muster.simulat0r  # noqa: B018 - the attribute is the test


def test_the_reference_is_that_of_the_docstrings():
    found = make_python_reference.DOCUMENT.read_text()
    assert found == make_python_reference.document().rstrip() + "\n", "run `make reference`"


def test_the_simulations_of_the_document_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(programs()[0], found)
    assert found["told"].accuracy > 0.8
    assert read_run("runs/fedavg").result == found["kept"].result


def test_objects_train_as_their_names_do():
    users = muster.load("digits")
    named = muster.simulate("mlp", "digits", "fedadam", settings={"client_lr": 0.2}, **SHORT)
    spec = built_in("mlp", users.shape, users.classes)
    given = muster.simulate(spec, users, FedAdam(client_lr=0.2), **SHORT)
    assert given.params.tobytes() == named.params.tobytes()
    assert given.points == named.points
    assert given.result.settings == named.result.settings
    assert repr(named) == repr(given) == f"Run(mlp, fedadam, 2 rounds, accuracy {named.accuracy:.3f} of held-out users)"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: muster.simulate(np.zeros(3)), "model is of type ndarray; expected a name, or a ModelSpec"),
        (lambda: muster.export(FedAdam), "model is the class FedAdam; expected a name, or a ModelSpec"),
        (
            lambda: muster.simulate("mlp", algorithm=FedAdam),
            "algorithm is the class FedAdam; expected a name, or an obj",
        ),
        (lambda: muster.export("mlp", 3), "algorithm is of type int; expected a name"),
        (lambda: muster.simulate("mlp", [{}]), "users is of type list; expected a data set's name, or a Population"),
        (
            lambda: muster.simulate("mlp", dataset="digits"),
            "no option 'dataset'; did you mean users\\? there are model, users, algorithm",
        ),
        (lambda: muster.simulate("mlp", settings=["client_lr=1"]), "settings is of type list; expected a mapping"),
        (lambda: muster.export("mlp", formats="onnx"), "formats is of type str; expected several names"),
        (lambda: muster.demo("fedadam"), r"algorithms is a text; expected several names, such as \['fedadam'\]"),
        (lambda: muster.Coordinator(None), "url is of type NoneType; expected the address"),
        (
            lambda: muster.Coordinator("http://127.0.0.1:1", "t").create("plan"),
            "bundle is of type str; expected a Bundle",
        ),
    ],
)
def test_arguments_of_wrong_types_are_named_with_what_is_expected(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_a_run_in_a_folder_has_the_model_of_one_in_memory(tmp_path):
    kept = muster.simulate("logreg", out=tmp_path / "run", **SHORT)
    loose = muster.simulate("logreg", **SHORT)
    assert kept.params.tobytes() == loose.params.tobytes()
    assert kept.folder == tmp_path / "run"
    with pytest.raises(RunError, match="run"):
        muster.simulate("logreg", out=tmp_path / "run", **SHORT)


def test_a_run_is_drawn_and_tabulated(tmp_path, monkeypatch):
    run = muster.simulate("logreg", **SHORT)
    first = run.result.curve[0]
    assert run.curve.reset_index().to_dict("records") == [
        {name: value for name, value in first.items() if name != "start.loss"},
        *run.result.curve[1:],
    ]
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "pandas", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install pandas, or take `run\.result\.curve`"):
            run.curve  # noqa: B018 - the attribute is the test
    picture = run.plot(out=tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "test.accuracy" in "".join(
        ElementTree.fromstring(picture._repr_svg_()).itertext()
    )  # what a notebook asks for
    with pytest.raises(
        EngineError, match=r"no point of the run has a figure 'accurancy'; did you mean test\.accuracy\? there"
    ):
        run.plot("accurancy")
    with pytest.raises(NotWritten, match=r"^\S*none/a\.png cannot be written: No such file or directory$"):
        run.plot(out=tmp_path / "none" / "a.png")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "logreg", "cohorts": 3}, TypeError, "no option 'cohorts'; did you mean cohort\\?"),
        ({"model": "mlp", "lr": 1}, TypeError, "client_lr is a setting of fedavg: settings={'client_lr': 1}"),
        ({"model": "logreg", "algorithm": FedAdam(), "settings": {"client_lr": 1}}, TypeError, "an object has its own"),
        ({"model": "logreg", "algorithm": FedAdam(), "out": "run"}, EngineError, "takes names alone"),
        ({"model": "logreg", "rounds": 0}, EngineError, r"rounds must be a whole number from 1 to 2\^63 - 1, not 0"),
        (
            {"model": "logreg", "rounds": "9"},
            EngineError,
            r"rounds must be a whole number from 1 to 2\^63 - 1, not '9'",
        ),
        ({"model": "logreg", "privacy": 8}, EngineError, r"privacy must be PrivateTraining\(…\), or a mapping with"),
        ({"model": "logreg", "secagg": {"bit": 12}}, EngineError, "secagg: there is no 'bit'; did you mean bits"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        muster.simulate(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_users_alone_have_a_model_each():
    assert muster.simulate("logreg", baseline="local", rounds=1).params.shape == (75, 650)


def test_a_plan_is_not_replaced_unasked(tmp_path):
    spec = built_in("logreg")
    made = muster.export(spec, FedAdam(), tmp_path / "plan")
    assert made.manifest.algorithm.name == "fedadam"
    assert made.certificate.worst < 1e-5
    with pytest.raises(ExportError, match="holds a plan already; name another folder with out=, or replace it with"):
        muster.export(spec, "fedavg", tmp_path / "plan")
    again = muster.export("logreg", "fedavg", tmp_path / "plan", settings={"client_lr": 0.5}, force=True)
    assert again.manifest.algorithm.settings["client_lr"] == 0.5


def test_a_task_is_created_watched_and_operated(tmp_path, served):
    _, (_, url), store, devices = served
    with muster.Coordinator(url) as coordinator:
        bundle = make_bundle(tmp_path / "plan")
        with pytest.raises(InvalidTask, match="goal"):
            coordinator.create(bundle, population="phones", goal=0, rounds=2)
        for wrong, words in (
            ({"goal": "2"}, "goal must be a whole number from 1 to .*, not '2'"),
            ({"secagg": True}, r"secagg must be Secagg\(…\), or a mapping with some of clip_norm"),
            ({"secagg": {"bit": 12}}, "secagg: there is no 'bit'; did you mean bits"),
        ):
            with pytest.raises(InvalidTask, match=words):
                coordinator.create(bundle, **{"population": "phones", "goal": 2, "rounds": 2} | wrong)
        with pytest.raises(InvalidTask, match="population is missing: it must be a name"):
            coordinator.create(bundle, goal=2)
        with pytest.raises(InvalidTask, match="there is no 'populaton'; did you mean population"):
            coordinator.create(bundle, populaton="phones", goal=2, rounds=2)
        task = coordinator.create(bundle, name="spring", population="phones", goal=2, rounds=2, over_selection=1.0)
        assert [one.id for one in coordinator.tasks()] == [task.id]
        assert (task.name, task.state, task.facts.settings.goal) == ("spring", "active", 2)
        assert task.why
        task.pause()
        assert coordinator.task(task.id).state == "paused"
        task.resume()
        until(lambda: "session" in check_in(devices).json())  # the driver sees it a moment later
        watched = []
        follower = threading.Thread(target=lambda: watched.extend(task.watch(every_s=0.05)))
        follower.start()
        for number in (1, 2):
            for one in assign(devices, "a", "b"):
                put(devices, one.assignment, report_body([1, 0, 0, 0], 1))
            committed(store, task.id, number)
        follower.join(30)
        assert [(record.number, record.reported) for record in watched] == [(1, 2), (2, 2)]
        assert task.state == "completed"
        assert all(np.isfinite(tensor).all() for tensor in task.checkpoint(1).values())
        assert task.checkpoint().keys() == task.checkpoint(1).keys()
        evaluation = make_evaluation_bundle(tmp_path / "evaluation")
        measured = coordinator.create(evaluation, evaluate=f"{task.id}@1", population="phones", goal=2)
        assert (measured.facts.settings.rounds, measured.facts.evaluates.words) == (1, f"task {task.id}, round 1")
        assert {name: value.tolist() for name, value in measured.checkpoint().items()} == {
            name: value.tolist() for name, value in task.checkpoint(1).items()
        }
        measured.cancel()
        other = coordinator.create(bundle, population="phones", goal=2, rounds=2)
        other.cancel()
        assert (other.name, other.state) == ("hand-made", "cancelled")


def test_a_coordinator_that_is_away_is_named():
    with muster.Coordinator("http://127.0.0.1:9", "token") as coordinator, pytest.raises(RemoteError, match="reached"):
        coordinator.tasks()
