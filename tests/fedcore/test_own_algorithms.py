"""Algorithms of a user's own: found by name where that is allowed, and refused where they break the contract."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedcore.algorithms import ALGORITHMS, create, name_of
from fedcore.algorithms.algorithm import Pass
from fedcore.algorithms.check import check
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.scaffold import Scaffold
from fedcore.algorithms.settings import positive
from fedcore.errors import InvalidAlgorithm, InvalidSetting, UnknownAlgorithm, UntrustedAlgorithm
from fedcore.schedule import Loop

FEDMINE = '''
from dataclasses import dataclass
from subprocess import Popen
from typing import ClassVar

from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.settings import positive


@dataclass(frozen=True, slots=True)
class FedMine(FedAvg):
    """pull: how much of the mean counts."""

    name: ClassVar[str] = "fedmine"

    pull: float = positive(0.5)

    def update(self, state, mean, step=None):
        return {"params": state["params"] + self.pull * mean["delta"]}


class Thawed:
    pass


@dataclass(frozen=True)
class Half:
    name: ClassVar[str] = "half"
    rate: float = 1.0


@dataclass(frozen=True)
class Again(FedAvg):
    pass


@dataclass(frozen=True)
class Bare(FedAvg):
    rate: float = 1.0


@dataclass(frozen=True)
class Forgetful(FedAvg):
    def keep(self, broadcast, carries):
        return {}
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module `my_algos` in the working folder."""
    (tmp_path / "my_algos.py").write_text(FEDMINE)
    (tmp_path / "broken_algos.py").write_text("import nothing_like_that\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_algos", raising=False)


def own(name, settings=None):
    return create(name, settings, [name.partition(":")[0]])


def test_an_algorithm_is_found_in_a_module_of_the_working_folder(mine):
    algorithm = own("my_algos:FedMine", {"pull": "0.25"})
    assert (algorithm.name, algorithm.pull, name_of(algorithm)) == ("fedmine", 0.25, "my_algos:FedMine")
    assert name_of(create("fedavg")) == "fedavg"
    check(algorithm)


def test_a_module_that_nobody_named_is_not_imported(mine):
    with pytest.raises(UntrustedAlgorithm, match="MUSTER_ALGORITHMS=my_algos"):
        create("my_algos:FedMine", None, ["your_algos"])
    assert "my_algos" not in sys.modules


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("fedmine", UnknownAlgorithm, "no algorithm is called 'fedmine'.*package.module:Class"),
        ("my_algos:FedMin", UnknownAlgorithm, "module my_algos defines no algorithm 'FedMin'; did you mean FedMine"),
        ("my_algos:Popen", UnknownAlgorithm, "module my_algos defines no algorithm 'Popen'"),
        ("my_algos:FedAvg", UnknownAlgorithm, "module my_algos defines no algorithm 'FedAvg'"),
        ("no_algos:FedMine", UnknownAlgorithm, "cannot import 'no_algos:FedMine': ModuleNotFoundError"),
        ("broken_algos:FedMine", UnknownAlgorithm, "ModuleNotFoundError: No module named 'nothing_like_that'"),
        ("my_algos:Thawed", InvalidAlgorithm, r"Thawed \(.*my_algos.py:\d+\) is no frozen dataclass"),
        ("my_algos:Half", InvalidAlgorithm, r"Half \(.*\) lacks family, weighting, init, passes, broadcast"),
        ("my_algos:Forgetful", InvalidAlgorithm, r"Forgetful \(.*\) lacks init_client"),
        ("my_algos:Again", InvalidAlgorithm, "is called 'fedavg', as a built-in algorithm is; give it another `name`"),
        ("my_algos:Bare", InvalidAlgorithm, "the fields rate are no settings; give each a default and a range"),
    ],
)
def test_what_is_no_algorithm_is_refused_by_name(mine, name, error, says):
    with pytest.raises(error, match=says):
        own(name)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pul": 1}, "fedmine has no setting 'pul'; did you mean pull"),
        ({"pull": 0}, "fedmine: pull must be a number above 0, not 0"),
    ],
)
def test_settings_of_an_own_algorithm_are_checked_as_those_of_others(mine, settings, says):
    with pytest.raises(InvalidSetting, match=says):
        own("my_algos:FedMine", settings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_built_in_algorithm_keeps_the_contract(name):
    check(create(name))


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg with functions put in their places."""

    name: ClassVar[str] = "mine"

    memory: ClassVar[list] = []
    rate: float = positive(0.5)

    def begin(self, broadcast):
        return {"params": broadcast["params"]}

    def step(self, carry, broadcast, grad):
        return {"params": carry["params"] - self.rate * grad(carry["params"])[1]}

    @property
    def passes(self):
        return (Pass("train", Loop(batch_size=4), self.begin, self.step),)


def with_functions(**functions):
    return type("Mine", (Mine,), functions)()


def aliased(self, state):
    return state


def own_scratch(self, broadcast, carries):
    total = 0.0 * carries["train"]["params"]
    total += carries["train"]["params"]
    total[..., 1:] -= broadcast["params"][..., 1:]
    length = (total**2).sum(-1)[..., None] ** 0.5
    return {"delta": total / (1.0 + length), "half": np.float64(0.5) * abs(total) * (total > 0.0)}


def test_arguments_may_be_returned_and_own_vectors_be_written_into():
    check(Mine())
    check(with_functions(broadcast=aliased, begin=aliased))
    check(with_functions(report=own_scratch, update=lambda self, state, mean, step: state))


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (
            {"init_client": lambda self, x: {"c_i": 0.0 * x, "c": 0.0 * x}},
            "init_client gives 'c', which the broadcast has too",
        ),
        ({"keep": lambda self, broadcast, carries: {}}, r"keep gives the vectors \{\}, init_client \{'c_i': \(5,\)\}"),
        (
            {"keep": lambda self, broadcast, carries: {"c_i": broadcast["c_i"][..., :1]}},
            r"'c_i': \(1,\).* must be the same",
        ),
        ({"keep": lambda self, broadcast, carries: {"c_i": np.tanh(broadcast["c_i"])}}, "keep: .*np.tanh"),
    ],
)
def test_client_state_that_the_simulator_could_not_keep_is_refused(functions, says):
    with pytest.raises(InvalidAlgorithm, match=says):
        check(type("Kept", (Scaffold,), functions)())


def adds_in_place(self, state, mean, step):
    x = state["params"]
    x += mean["delta"]
    return {"params": x}


def writes_a_slice(self, carry, broadcast, grad):
    carry["params"][..., :1] = 0.0
    return carry


def writes_a_view(self, carry, broadcast, grad):
    head = broadcast["params"][..., :2]
    head *= 2.0
    return carry


def puts_a_key(self, state):
    state["extra"] = state["params"]
    return state


def updates_the_dictionary(self, broadcast, carries):
    carries["train"].update(params=broadcast["params"])
    return {"delta": carries["train"]["params"]}


@pytest.mark.parametrize(
    ("place", "function", "line"),
    [
        ("update", adds_in_place, r"x \+= mean"),
        ("step", writes_a_slice, r"carry\[.params.\]\[..., :1\] = 0.0"),
        ("step", writes_a_view, r"head \*= 2.0"),
        ("broadcast", puts_a_key, r"state\[.extra.\] = "),
        ("report", updates_the_dictionary, r"carries\[.train.\].update"),
    ],
)
def test_a_write_into_an_argument_is_refused_with_its_line(place, function, line):
    says = rf"mine: {place}.* writes into an argument; .*\(tests/fedcore/test_own_algorithms.py:\d+: {line}"
    with pytest.raises(InvalidAlgorithm, match=says):
        check(with_functions(**{place: function}))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (np.sqrt, "np.sqrt is no operator"),
        (np.linalg.norm, "np.norm is no operator"),
        (torch.sqrt, "torch.sqrt is no operator"),
        (np.asarray, "a conversion to a NumPy array is no operator"),
        (float, r"float\(…\), or a function of the module math is no operator"),
        (len, r"len\(…\) is no operator"),
        (max, "a loop over its values is no operator"),
        (lambda x: x.mean(), ".mean is no operator"),
        (lambda x: x.shape, ".shape is no operator"),
        (lambda x: x.sum(), r"\.sum\(\) over all axes"),
        (lambda x: x if x[:1] > 0 else -x, "a branch on its values"),
        (lambda x: x + np.ones(5), "arithmetic with ndarray is no operator"),
        (lambda x: np.ones(5) + x, "np.add is no operator"),
        (lambda x: x * [1.0] * 5, "arithmetic with list"),
        (lambda x: x[x > 0], "an index that is Probe"),
    ],
)
def test_what_is_no_operator_is_refused_with_its_line(asked, says):
    def step(self, carry, broadcast, grad):
        return {"params": asked(carry["params"])}

    with pytest.raises(InvalidAlgorithm, match=rf"mine: step of pass train: {says}.*test_own_algorithms.py:\d+: "):
        check(with_functions(step=step))


@pytest.mark.parametrize(
    ("place", "function", "says"),
    [
        ("init", lambda self, x: {"model": x}, "init gives no params, which are the model"),
        ("init", lambda self, x: {"params": x[:2]}, "init gives params of size 2 for a model of size 5"),
        ("init", lambda self, x: {"params": x, "round": 0.0}, r"init gives 'round' as float; .* 0.0 \* params"),
        ("init", lambda self, x: x, "init returns Probe, not a dictionary"),
        ("broadcast", lambda self, s: {"x": s["params"]}, "broadcast gives no params"),
        ("broadcast", lambda self, s: {"params": s["params"], "a.b": s["params"]}, "broadcast calls a vector 'a.b'"),
        ("report", lambda self, b, c: {}, "report must give vectors"),
        ("report", lambda self, b, c: {"weight": b["params"]}, "none of them called 'weight'"),
        ("report", lambda self, b, c: None, "report returns NoneType, not a dictionary"),
        ("report", lambda self, b, c: {"n": b["params"].sum(-1)}, r"'n' in the shape \(\); .*\[\.\.\., None\]"),
        (
            "update",
            lambda self, s, m, t: {"params": m["delta"][:1]},
            r"the vectors params \(5,\) .* gives params \(1,\)",
        ),
        ("update", lambda self, s, m, t: s | {"new": m["delta"]}, r"gives new \(5,\), params \(5,\)"),
        ("update", lambda self, s, m: s, r"update fails with TypeError: .* takes 3 positional arguments"),
        ("step", lambda self, c, b, g: {"y": c["params"]}, r"the vectors params \(5,\) .* gives y \(5,\)"),
        (
            "step",
            lambda self, c, b, g: {"params": g(c["params"][..., :1])[1]},
            r"grad\(…\) takes the vector of a model",
        ),
        ("step", lambda self, c, b, g: {"params": c["y"]}, "step of pass train fails with KeyError: 'y'"),
    ],
)
def test_a_wrong_vector_is_refused_with_its_line(place, function, says):
    with pytest.raises(InvalidAlgorithm, match=rf"mine: .*{says}.*test_own_algorithms.py:\d+"):
        check(with_functions(**{place: function}))


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"weighting": "median"}, "weighting is 'median'; it must be one of examples, uniform"),
        ({"passes": ()}, r"its passes are called \[\]; there must be one at least"),
        ({"passes": Mine().passes * 2}, r"its passes are called \['train', 'train'\]; .* each with a name of its own"),
    ],
)
def test_a_weighting_or_passes_that_no_plan_has_are_refused(declared, says):
    algorithm = Mine(**declared) if "weighting" in declared else with_functions(**declared)
    with pytest.raises(InvalidAlgorithm, match=f"mine: {says}"):
        check(algorithm)


def of_the_first_device(self, broadcast, carries):
    return {"delta": carries["train"]["params"][:1] - broadcast["params"]}


def over_devices(self, broadcast, carries):
    return {"delta": carries["train"]["params"] / carries["train"]["params"].sum(-1)}


def remembered(self, broadcast, carries):
    self.memory.append(1.0)
    return {"delta": carries["train"]["params"] * len(self.memory)}


def random_numbers(self, broadcast, carries):
    return {"delta": carries["train"]["params"] * float(np.random.default_rng().normal())}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (of_the_first_device, "'delta' of a report is another when 2 devices are computed at once; a report is averag"),
        (over_devices, "report fails with 2 devices at once with ValueError.*; a report is averaged"),
        (remembered, "another 'delta' for the same examples: it keeps something from one call to the next"),
        (random_numbers, "another 'delta' for the same examples: .* or draws random numbers"),
    ],
)
def test_a_report_that_is_no_mean_is_refused(function, says):
    with pytest.raises(InvalidAlgorithm, match=says):
        check(with_functions(report=function))


def test_the_check_says_nothing_of_settings_that_only_train_badly():
    check(dataclasses.replace(create("mimelite", {"optimizer": "adam"}), client_lr=1e6))
