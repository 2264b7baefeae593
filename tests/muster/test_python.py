"""`import muster`, as a program or a notebook uses it."""

import inspect
import re
import subprocess
import sys
import threading
import types
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import muster
from coordinator.errors import InvalidTask
from export.errors import ExportError
from export.model import ModelSpec, cross_entropy
from export.models import load as built_in
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.errors import FedcoreError, NotWritten, SchemaError, table_of
from fedcore.plan import Field
from muster.options import in_python
from muster.python.arguments import progress_line
from muster.remote import RemoteError
from simulator import read_run
from simulator.errors import EngineError, RunError, SimulatorError
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, check_in, put
from tests.muster.test_remote import served
from tests.tree import ROOT

__all__ = ["served"]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = {"rounds": 2, "cohort": 4, "evaluate_every": 1, "processes": 1, "engine": "torch"}


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))


HAND_MADE = ModelSpec("hand-made", Weights, cross_entropy, (), Field("x", "float32", (2,)))
BAD = {
    "model": "mpl",
    "users": "wisdm",
    "algorithm": "fedper",  # which needs local parameters
    "settings": {"settings": {"client_lr": -1}},
    "out": "run",
    "on_round": 3,
    "plan": "none",
    "start": "none",
    "against": {"against": "none", "baseline": "pooled"},
    "local": "9.*",
    "data": {"data": "none", "users": "wisdm"},
    "user": "who",
    "inputs": {"inputs": ["a"]},
    "target": "a",
    "drop_missing": True,
    "standardise": {"standardise": True, "plan": "none"},
    "partition": "dirichlet:x",
    "clients": 2_000,
    "baseline": "cocoa",
    "privacy": {"privacy": {"epsilon": 1}},
    "rounds": 0,
    "cohort": 1_000,
    "held_out": 1,
    "own_examples": 1,
    "fine_tune": 1,
    "hold_out_examples": 1,
    "on_held_out_examples": True,
    "evaluate_every": 0,
    "target_accuracy": 2,
    "patience": 0,
    "engine": "graph",
    "device": {"device": "cuda:1", "processes": 2},
    "processes": 0,
    "at_once": 0,
    "ray": 3,
    "compress": "bits=3",
    "seed": -1,
    "schedule": {"schedule": {"server_lr": 1}},
    "same_cohort": True,
    "secagg": {"secagg": {"bit": 12}},
}
"""For each keyword of `simulate` a bad value, or arguments that make it one."""


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
    x = torch.from_numpy(users.fields["x"])
    assert torch.equal(given.model()(x), named.model()(x))
    assert given.result.settings == named.result.settings
    measured = f"accuracy {named.accuracy:.3f} of 15 users"
    assert repr(given) == f"Run(mlp on own users, fedadam, 2 rounds: {measured})"
    assert repr(named.result) == f"SimulationResult(mlp on digits, fedadam, 2 rounds: {measured})"
    both = "".join(ElementTree.fromstring(muster.plot([named, given], "train.loss").svg).itertext())
    assert "digits" in both
    assert "own users" in both
    assert "train.loss" in both
    (swept,) = muster.sweep(spec, users, FedAdam(client_lr=0.2), grid={"cohort": [4]}, **SHORT).runs.values()
    assert swept.params.tobytes() == given.params.tobytes()
    assert torch.equal(swept.model()(x), given.model()(x))


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


@pytest.fixture(scope="module")
def loose():
    """A run in memory."""
    return muster.simulate("logreg", **SHORT)


def test_a_run_in_a_folder_has_the_model_of_one_in_memory(tmp_path, loose):
    kept = muster.simulate("logreg", out=tmp_path / "run", **SHORT)
    assert kept.params.tobytes() == loose.params.tobytes()
    assert kept.folder == tmp_path / "run"
    loose.save(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert {name: tensor.shape for name, tensor in kept.tensors().items()} == {"1.weight": (10, 64), "1.bias": (10,)}
    for run in (kept, loose):
        trained = torch.cat([tensor.reshape(-1) for tensor in run.model().parameters()])
        assert trained.detach().numpy().tobytes() == run.params.tobytes()
    with pytest.raises(RunError, match="run"):
        muster.simulate("logreg", out=tmp_path / "run", **SHORT)


def test_a_run_is_drawn_and_tabulated(tmp_path, monkeypatch, loose, font):
    run = loose
    first = run.result.curve[0]
    assert run.curve.reset_index().to_dict("records") == [
        {name: value for name, value in first.items() if name != "start.loss"},
        *run.result.curve[1:],
    ]
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "pandas", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install pandas, or take `run\.result\.curve`"):
            run.curve  # noqa: B018 - the attribute is the test
    picture = run.plot()
    picture.save(str(tmp_path / "accuracy.png"))
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "test.accuracy" in "".join(
        ElementTree.fromstring(picture._repr_svg_()).itertext()
    )  # what a notebook asks for
    with pytest.raises(
        EngineError, match=r"no run has a figure 'accurancy'; did you mean test\.accuracy\? there are examples"
    ):
        run.plot("accurancy")
    with pytest.raises(NotWritten, match=r"^\S*none/a\.png cannot be written: No such file or directory$"):
        picture.save(tmp_path / "none" / "a.png")


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


def test_a_bad_value_of_every_keyword_is_told_in_words_of_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert set(BAD) == set(inspect.signature(muster.simulate).parameters)
    told = {}
    for name, given in BAD.items():
        with pytest.raises((TypeError, SimulatorError, ExportError, FedcoreError)) as refused:
            muster.simulate(**{"model": "logreg", **(given if isinstance(given, dict) else {name: given})})
        told[name] = str(refused.value)
    assert {name: words for name, words in told.items() if "--" in words or "\n" in words} == {}
    assert told["out"] == "run exists already; go on with it by simulator.resume_run('run'), or take another folder"
    assert told["device"].endswith("which several processes do not share; take device='cuda:all'")
    assert told["algorithm"].endswith("by local, such as local='1.bias'")
    assert "name the folder that holds wisdm/ with data=; " in told["data"]


def test_a_sweep_is_a_table_and_a_picture_with_bands_over_seeds(monkeypatch):
    users = muster.Population.of(
        ["<b>", "c", "d", "e"], [{"x": np.eye(3, dtype=np.float32), "y": np.arange(3) % 2}] * 4
    )
    options = {"users": users, "baseline": "dane", "rounds": 2, "evaluate_every": 1}
    made = muster.sweep("logistic", grid={"settings": {"eta": (0.5, 1.0)}}, seeds=2, **options)
    assert repr(made) == "Sweep(4 runs of 2 combinations)"
    assert [(row["settings.eta"], row["seeds"]) for row in made.means] == [(0.5, 2), (1.0, 2)]
    assert made.table.to_dict("records") == made.means
    assert made.plot("test.loss").svg == muster.plot(made, "test.loss").svg
    assert {"eta=0.5", "eta=1"} <= set(ElementTree.fromstring(made.plot("test.loss").svg).itertext())
    alone = muster.simulate("logistic", settings={"eta": 0.5}, seed=1, **options)
    assert made.runs["eta=0.5,seed=1"].result == alone.result
    assert made.runs["eta=0.5,seed=1"].folder is None
    for wrong, words in (
        ({"grid": {"cohrt": [1]}}, "the run cohrt=1 cannot be: there is no 'cohrt'; did you mean cohort"),
        ({"grid": {"cohort": 3}}, "grid.cohort must be a list of values, not 3"),
        ({"grid": {"users": ["digits"]}}, "users cannot vary where it was given as an object"),
        ({"grid": {"cohort": [3]}, "seeds": 0}, "seeds must be a whole number from 1, not 0"),
        ({"grid": {"cohort": [3]}, "out": "x"}, "takes names alone"),
        ({"grid": {}}, "a sweep varies something: give its grid lists of values"),
    ):
        with pytest.raises((RunError, EngineError), match=words):
            muster.sweep("logistic", **options | wrong)


def test_tables_of_notebooks_escape_what_is_in_them(loose):
    assert table_of(["<b>"], [["<script>\u202e", 0.12345, 12345, None, {"a": "&"}]]) == (
        "<table><thead><tr><th>&lt;b&gt;</th></tr></thead><tbody><tr><td>&lt;script&gt;\\u202e</td><td>0.1235</td>"
        "<td>12,345</td><td></td><td>a=&amp;</td></tr></tbody></table>"
    )
    shown = loose._repr_html_()
    assert "<td>logreg</td>" in shown
    assert "<td>fedavg</td>" in shown
    users = muster.Population.of(["a"], [{"<i>": np.zeros((2, 3))}])
    assert repr(users) == "Population(1 clients, 2 examples: <i> float64[3])"
    assert "field &lt;i&gt;</td><td>float64[3]" in users._repr_html_()


def test_progress_is_one_line_in_ipython_and_nothing_elsewhere(monkeypatch, capsys):
    with progress_line() as tell:
        tell("unseen")
    shells = types.SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", shells)
    with progress_line() as tell:
        tell("unseen")
    shells.get_ipython = object
    with progress_line() as tell:
        for text in ("first", "too soon", "last"):
            tell(text)
    assert capsys.readouterr() == ("", "\r\x1b[Kfirst\r\x1b[Klast\n")


def test_commands_in_messages_stay_commands():
    words = (
        "`muster key new --out a.pem` makes one; or leave --release-key out, or take --set, --at-once=2 or --data=DIR."
    )
    assert in_python(words) == (
        "`muster key new --out a.pem` makes one; or leave release_key= out, or take settings=, at_once=2 or data=DIR."
    )


def test_users_alone_have_a_model_each():
    run = muster.simulate("logreg", baseline="local", clients=4, rounds=1)
    assert run.params.shape == (4, 650)
    with pytest.raises(
        EngineError, match=r"the baseline local has no tensors, as it trains a model for each user: take"
    ):
        run.model()


def test_a_plan_is_not_replaced_unasked(tmp_path):
    spec = built_in("logreg")
    made = muster.export(spec, FedAdam(), tmp_path / "plan")
    assert made.manifest.algorithm.name == "fedadam"
    assert repr(made) == f"Bundle(logreg, fedadam, in '{tmp_path}/plan')"
    assert repr(made.plan) == "Plan('logreg-fedadam', 650 parameters, x float32[1, 8, 8], y int64[]; onnx)"
    assert "<td>650</td>" in made.plan._repr_html_()
    assert "<td>fedadam</td>" in made._repr_html_()
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
        assert all(np.isfinite(tensor).all() for tensor in task.tensors(1).values())
        assert task.tensors().keys() == task.tensors(1).keys()
        assert [point["round"] for point in task.points] == [1, 2]
        assert "spring" in ElementTree.fromstring(muster.plot(task, "train.loss").svg).itertext()
        module = task.model(HAND_MADE, 1)
        assert module.w.tolist() == task.tensors(1)["w"].tolist() != task.model(HAND_MADE).w.tolist()
        with pytest.raises(SchemaError, match="is of another model than logreg; name its model with model="):
            task.model("logreg")
        task.save(tmp_path / "model.safetensors")
        assert load_file(tmp_path / "model.safetensors")["w"].tolist() == task.tensors()["w"].tolist()
        evaluation = make_evaluation_bundle(tmp_path / "evaluation")
        measured = coordinator.create(evaluation, evaluate=f"{task.id}@1", population="phones", goal=2)
        assert (measured.facts.settings.rounds, measured.facts.evaluates.words) == (1, f"task {task.id}, round 1")
        assert {name: value.tolist() for name, value in measured.tensors().items()} == {
            name: value.tolist() for name, value in task.tensors(1).items()
        }
        measured.cancel()
        other = coordinator.create(bundle, population="phones", goal=2, rounds=2)
        other.cancel()
        assert (other.name, other.state) == ("hand-made", "cancelled")


def test_a_coordinator_that_is_away_is_named():
    with muster.Coordinator("http://127.0.0.1:9", "token") as coordinator, pytest.raises(RemoteError, match="reached"):
        coordinator.tasks()
