"""Facts about algorithms: sizes that a rehearsal finds, and words that docstrings have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.facts import Size, facts_of, total
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.settings import positive


@dataclass(frozen=True)
class Counted(FedAvg):
    """One more scalar goes each way.

    pull: how strong it is, in words that take
        two lines.
    """

    name: ClassVar[str] = "counted"

    pull: float = positive(0.5)

    def init(self, params_D):
        return {"params": params_D, "round": 0.0 * params_D[:1]}

    def broadcast(self, state):
        return dict(state)

    def report(self, broadcast, carries: Mapping):
        return super().report(broadcast, carries) | {"count": broadcast["round"] + 1}

    def update(self, state, mean, step=None):
        return {"params": state["params"] + mean["delta"], "round": state["round"] + mean["count"]}


def test_sizes_follow_from_the_vectors_that_go_down_and_come_up():
    facts = facts_of(Counted())
    (trip,) = facts.trips
    assert trip.down == {"params": Size(1), "round": Size(0, 1)}
    assert trip.up == {"delta": Size(1), "count": Size(0, 1)}
    assert list(map(str, (*facts.down, *facts.up, total(facts.state)))) == ["d + 1"] * 3


def test_sizes_are_those_of_the_settings():
    momentum, adam = (facts_of(create("mimelite", {"optimizer": name})) for name in ("momentum", "adam"))
    assert [str(one.down[0]) for one in (momentum, adam)] == ["2d", "3d"]
    assert adam.state == {"params": Size(1), "m": Size(1), "v": Size(1)}
    assert [one.name for one in adam.trips[0].passes] == ["train", "sweep"]


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_facts_of_an_algorithm_that_was_fitted_to_a_model(name):
    facts = facts_of(create(name, {"local": "2816..3206"}))
    assert facts.kept == {"own": Size(1)}
    assert "2816..3206" in {setting.value for setting in facts.settings}


@pytest.mark.parametrize(("size", "words"), [(Size(), "0"), (Size(1), "d"), (Size(3, 2), "3d + 2"), (Size(0, 4), "4")])
def test_a_size_is_said_in_parameters(size, words):
    assert str(size) == words


def test_a_setting_has_its_value_its_range_and_its_meaning():
    settings = {one.name: one for one in facts_of(Counted(pull=2.0, epochs=3)).settings}
    assert (settings["pull"].value, settings["pull"].values) == (2.0, "a number above 0")
    assert settings["pull"].meaning == "how strong it is, in words that take two lines."
    assert settings["epochs"].value == 3
    assert settings["epochs"].meaning == settings["batch_size"].meaning == "E and B of the paper."


def test_the_paper_is_the_citation_that_opens_a_paragraph():
    assert facts_of(create("fedadam")).paper == "Reddi, ICLR 2021, Algorithm 2"
    assert facts_of(Counted()).paper == ""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_every_algorithm_has_a_meaning(name):
    facts = facts_of(create(name))
    assert [one.name for one in facts.settings if not one.meaning] == []
    assert facts.summary.endswith(".")
    assert facts.family


def test_a_clipped_algorithm_has_the_facts_of_its_inner_one_and_its_bound():
    facts = facts_of(create("mimelite", {"clip_norm": 0.5, "clip_quantile": 0.8}))
    (trip,) = facts.trips
    assert (facts.name, facts.paper) == ("mimelite", facts_of(create("mimelite")).paper)
    assert (trip.down["clip"], trip.up["clip_indicator"], facts.state["clip_1"]) == (Size(0, 1),) * 3
    assert [one.name for one in facts.settings if one.name.startswith("clip_")] == [
        "clip_norm",
        "clip_quantile",
        "clip_lr",
    ]
