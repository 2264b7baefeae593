"""Personal models in TypeScript: the same parameters, losses and verdicts as Python's, on the engines of both kinds."""

import base64
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from msgspec import structs

from fedcore import checkpoint
from fedcore.params import VectorSpec
from tests.device_runtime import linear
from tests.device_runtime.personal import LINE, answers, owning, taken, trainable
from tests.device_runtime.released import NAME
from tests.device_runtime.test_personal_models import needing, two_trips, without_a_loss, without_a_model
from tests.device_runtime.test_typescript_models import Node, X

MOST_WRITES = 40


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "examples.npz", **linear.examples(80))
    return tmp_path


@pytest.fixture
def node(coordinator, folder):
    with Node(folder, coordinator.url) as running:
        yield running


@pytest.fixture
def pythons(config):
    """What Python makes of the version of the coordinator: the outcome, and the parameters."""

    def made(examples):
        with taken(owning(config, examples)) as model:
            return model.personalise(), answers(model)

    return made


def facts(answer):
    return {name: answer[name] for name in ("version", "before", "after", "examples", "leftOut", "kept", "personal")}


@pytest.mark.parametrize("more", [(), ("web",)])
def test_it_makes_the_model_that_python_makes(coordinator, folder, pythons, more):
    trainable(coordinator)
    wanted, parameters = pythons(linear.examples(80))
    with Node(folder, coordinator.url, *more) as node:
        assert node.refresh() == (True, 1)
        assert node.answers() == linear.PARAMS.tolist()
        answer = node.ask("personalise")
        assert facts(answer) == {
            "version": 1,
            "before": pytest.approx(wanted.before, rel=1e-5),
            "after": pytest.approx(wanted.after, rel=1e-4),
            "examples": wanted.examples,
            "leftOut": wanted.left_out,
            "kept": True,
            "personal": True,
        }
        np.testing.assert_allclose(node.answers(), parameters, rtol=1e-5)
        entry = answer["journal"][-1]
        assert (entry["outcome"], entry["task"], entry["examples"]) == (
            "personalised",
            "model keyboard",
            wanted.examples,
        )
        assert entry["steps"] > 0
        assert entry["detail"].endswith(f"on {wanted.left_out} examples left out: kept")


def test_it_opens_and_is_made_anew_without_a_request(coordinator, folder):
    trainable(coordinator, graphs=linear.many_steps())
    with Node(folder, coordinator.url, cache_bytes=0) as first:
        first.refresh()
        assert first.ask("personalise")["kept"]
        own = first.answers()
    calls = len(coordinator.calls)
    with Node(folder, coordinator.url, cache_bytes=0) as again:
        assert again.answers() == own
        assert again.ask("personalise")["kept"]
        assert again.answers() == own
    assert len(coordinator.calls) == calls


def test_a_new_version_resets_and_keeps_the_graphs_of_its_plan(coordinator, folder, node):
    first = trainable(coordinator, counter=1)
    node.refresh()
    node.ask("personalise")
    trainable(coordinator, 2, params=linear.PARAMS + 1, counter=1)
    answer = node.ask("refresh")
    assert (answer["swapped"], answer["version"], answer["personal"]) == (True, 2, False)
    assert answer["journal"][-1]["outcome"] == "personal-dropped"
    assert node.answers() == (linear.PARAMS + 1).tolist()
    blobs = coordinator.calls.count("blob")
    assert node.ask("personalise")["version"] == 2
    assert coordinator.calls.count("blob") == blobs
    coordinator.models[NAME] = first
    answer = node.ask("refresh")
    assert (answer["version"], answer["personal"], node.answers()) == (1, False, linear.PARAMS.tolist())


def test_one_that_no_longer_helps_is_used_no_more(coordinator, folder, node):
    trainable(coordinator)
    node.refresh()
    assert node.ask("personalise")["kept"]
    mine = linear.examples(80)
    np.savez(folder / "examples.npz", x=mine["x"], y=mine["x"] @ linear.PARAMS)
    answer = node.ask("personalise")
    assert (answer["kept"], answer["personal"], node.answers()) == (False, False, linear.PARAMS.tolist())


def test_a_model_that_is_as_good_as_it_gets_stays_as_released(coordinator, node, pythons):
    trainable(coordinator, params=LINE)
    wanted, _ = pythons(linear.examples(80))
    node.refresh()
    answer = node.ask("personalise")
    assert (answer["kept"], wanted.kept, node.answers()) == (False, False, LINE.tolist())


def test_forgetting_deletes_it(coordinator, folder, node):
    trainable(coordinator)
    node.refresh()
    node.ask("personalise")
    answer = node.ask("forget")
    assert (answer["forgot"], answer["personal"], node.answers()) == (True, False, linear.PARAMS.tolist())
    assert answer["journal"][-1]["detail"].endswith("are deleted: the app asked for it")
    assert node.ask("forget")["forgot"] is False
    node.ask("personalise")
    for path in (folder / "node" / "blobs").iterdir():
        path.write_bytes(b"damaged")
    answer = node.ask("forget")
    assert (answer["error"], answer["version"], answer["personal"]) == ("ModelRefused", None, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (two_trips, "has two trips"),
        (without_a_model, "no pass of plan linear makes a local model"),
        (without_a_loss, "pass train of plan linear measures examples,hits, no loss"),
    ],
)
def test_plans_without_a_local_model_are_refused(coordinator, node, change, words):
    trainable(coordinator, plan=change(linear.plan()))
    node.refresh()
    answer = node.ask("personalise")
    assert answer["error"] == "PlanRefused"
    assert words in answer["detail"]
    assert answer["journal"][-1]["reason"] == "plan-refused"


def test_steps_that_need_more_than_a_release_holds_are_refused(coordinator, node):
    graphs = needing("momentum")
    plan = linear.plan(graphs)
    plan = structs.replace(plan, broadcast=(*plan.broadcast, VectorSpec("momentum", 3)))
    trainable(coordinator, graphs=graphs, plan=plan)
    node.refresh()
    answer = node.ask("personalise")
    assert (answer["error"], answer["personal"]) == ("PlanRefused", False)
    assert "params alone, which is all that a release holds" in answer["detail"]
    assert "broadcast.momentum" in answer["detail"]


def test_too_few_examples_and_the_policy_refuse_it(coordinator, folder):
    trainable(coordinator)
    with Node(folder, coordinator.url) as node:
        assert node.ask("personalise")["error"] == "NoModel"
        node.refresh()
        np.savez(folder / "examples.npz", **linear.examples(20))
        answer = node.ask("personalise")
        assert answer["error"] == "ExamplesError"
        assert "a personal model needs 10 of each" in answer["detail"]
    for rule, error in (
        ({"collections": ["other"]}, "PlanRefused"),
        ({"populations": ["tablets"]}, "PolicyForbids"),
        ({"per_day": {"compute_seconds": 0}}, "PolicyForbids"),
        ({"plan": {"batch_examples": 2}}, "PlanRefused"),
    ):
        with Node(folder, coordinator.url, **rule) as node:
            answer = node.ask("personalise")
            assert (answer["error"], answer["personal"]) == (error, False), rule


def test_nothing_leaves_but_requests_for_graphs(coordinator, node):
    trainable(coordinator)
    node.refresh()
    asked = len(coordinator.calls)
    node.ask("personalise")
    node.ask("forget")
    assert coordinator.calls[asked:] == ["blob", "blob"]


def test_each_of_ten_thousand_answers_is_released_or_personal(coordinator, node):
    trainable(coordinator)
    node.refresh()
    node.ask("personalise")
    wanted = {node.answers()[0], linear.PARAMS.tolist()[0]}
    answer = node.ask("swaps", columns=X, calls=10_000)
    assert (set(answer["answers"]), answer["calls"]) == (wanted, 10_000)
    assert answer["swaps"] > 0


def test_killed_at_any_write_it_is_released_or_personal(coordinator, folder):
    trainable(coordinator)
    with Node(folder, coordinator.url) as node:
        node.refresh()
    ended, personal = 0, []
    while ended < MOST_WRITES:
        with Node(folder, coordinator.url, str(ended)) as node:
            answer = node.ask("personalise")
        with Node(folder, coordinator.url) as after:
            found = after.ask("predict", columns=X)
        own = found["outputs"]["output"]
        assert found["personal"] or own == linear.PARAMS.tolist()
        personal += [own] if found["personal"] else []
        if answer is not None:
            break
        ended += 1
    assert (3 <= ended < MOST_WRITES, answer["kept"]) == (True, True)
    assert all(own == personal[-1] for own in personal)


@pytest.mark.parametrize(
    "kept",
    [
        "{",
        "{}",
        '{"signed": SIGNED}',
        '{"signed": SIGNED, "parameters": "?"}',
        '{"signed": SIGNED, "parameters": "AAAA"}',
        '{"signed": SIGNED, "parameters": "LONGER"}',
        '{"signed": SIGNED, "parameters": "INFINITE"}',
    ],
)
def test_a_damaged_record_leaves_the_released_model(coordinator, folder, kept):
    signed = trainable(coordinator)
    with Node(folder, coordinator.url) as node:
        node.refresh()
        node.ask("personalise")
    with closing(sqlite3.connect(folder / "node" / "state.db", isolation_level=None)) as state:
        kept = kept.replace("SIGNED", json.dumps(structs.asdict(signed)))
        for word, vector in (("LONGER", np.ones(4, np.float32)), ("INFINITE", np.full(3, np.inf, np.float32))):
            kept = kept.replace(word, base64.b64encode(checkpoint.encode({"params": vector})).decode())
        (changed,) = state.execute("UPDATE kept SET value = ? WHERE key LIKE 'personal:%' RETURNING 1", (kept,))
    with Node(folder, coordinator.url) as node:
        assert (changed, node.answers(), node.ask("predict", columns=X)["personal"]) == (
            (1,),
            linear.PARAMS.tolist(),
            False,
        )
        trainable(coordinator, 2, params=LINE)
        assert (node.refresh(), node.answers()) == ((True, 2), LINE.tolist())
