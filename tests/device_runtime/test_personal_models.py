"""Personal models, in both runtimes: local steps of a plan, used only where they help on examples left out."""

import functools
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from device_runtime.trainer import divided
from fedcore.params import VectorSpec
from fedcore.plan import TripPlan
from tests.device_runtime import linear
from tests.device_runtime.opened import RUNTIMES, InNode, X, plain
from tests.device_runtime.personal import LINE, local_steps, loss, trainable
from tests.device_runtime.released import NAME

RELEASED = linear.PARAMS.tolist()


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "examples.npz", **linear.examples(80))
    return tmp_path


@pytest.fixture(params=RUNTIMES, ids=lambda runtime: runtime.runtime)
def opening(request, coordinator, folder):
    """Opens the device's model in one runtime, under settings of a policy if any are given."""
    return functools.partial(request.param, folder, coordinator.url)


@pytest.fixture
def model(opening):
    with opening() as opened:
        yield opened


def made_personal(coordinator, model, **release):
    """Take a release, and make it personal: the answer to that."""
    trainable(coordinator, **release)
    assert model.refresh() == (True, 1)
    return model.ask("personalise")


ENGINES = [*RUNTIMES, lambda *given: InNode(*given, "web")]


@pytest.mark.parametrize("engine", ENGINES, ids=["python", "node", "jvm", "web"])
def test_a_personal_model_is_the_local_steps_of_the_plan(coordinator, folder, engine):
    mine = linear.examples(80)
    train, out = divided(linear.plan().examples, mine)
    wanted = local_steps(linear.PARAMS, mine)
    trainable(coordinator)
    with engine(folder, coordinator.url) as model:
        assert model.refresh() == (True, 1)
        assert model.answers() == RELEASED
        answer = model.ask("personalise")
        np.testing.assert_allclose(model.answers(), wanted, rtol=1e-5)
    assert (answer["kept"], answer["personal"], answer["version"]) == (True, True, 1)
    assert (answer["examples"], answer["leftOut"]) == (len(train["y"]), len(out["y"]))
    assert answer["before"] == pytest.approx(loss(linear.PARAMS, out), rel=1e-5)
    assert answer["after"] == pytest.approx(loss(wanted, out), rel=1e-4)
    assert answer["after"] < answer["before"]
    entry = answer["journal"][-1]
    assert (entry["outcome"], entry["task"]) == ("personalised", f"model {NAME}")
    assert entry.get("plan", "linear") == "linear"
    assert (entry["examples"], entry["steps"] > 0) == (len(train["y"]), True)
    assert entry["detail"].endswith(f"on {len(out['y'])} examples left out: kept")


def test_it_opens_and_is_made_anew_without_a_request(coordinator, opening):
    with opening(cache_bytes=0) as first:
        assert made_personal(coordinator, first, graphs=linear.many_steps())["kept"]
        own = first.answers()
    calls = len(coordinator.calls)
    with opening(cache_bytes=0) as again:
        assert again.answers() == own
        assert again.ask("personalise")["kept"]
        assert again.answers() == own
    assert len(coordinator.calls) == calls


def test_many_steps_in_a_call_make_the_same_model(coordinator, model):
    made = []
    for number, graphs in enumerate((linear.graphs(), linear.many_steps()), 1):
        trainable(coordinator, number, graphs=graphs)
        assert model.refresh() == (True, number)
        answer = model.ask("personalise")
        made.append([*model.answers(), answer["before"], answer["after"]])
    assert made[0] == pytest.approx(made[1], rel=1e-6)


def test_nothing_leaves_but_requests_for_graphs_that_are_not_here(coordinator, model):
    trainable(coordinator)
    model.refresh()
    asked = len(coordinator.calls)
    for order in ("personalise", "personalise", "forget"):
        model.ask(order)
    assert (coordinator.calls[asked:], coordinator.reports) == (["blob", "blob"], [])


def test_a_new_version_resets_and_keeps_the_graphs_of_its_plan(coordinator, opening):
    first = trainable(coordinator, counter=1)
    with opening(cache_bytes=0) as model:
        model.refresh()
        model.ask("personalise")
        trainable(coordinator, 2, params=linear.PARAMS + 1, counter=1)
        answer = model.ask("refresh")
        assert (answer["swapped"], answer["version"], answer["personal"]) == (True, 2, False)
        assert answer["journal"][-1]["outcome"] == "personal-dropped"
        assert model.answers() == (linear.PARAMS + 1).tolist()
        blobs = coordinator.calls.count("blob")
        assert model.ask("personalise")["version"] == 2
        assert coordinator.calls.count("blob") == blobs
        coordinator.models[NAME] = first
        answer = model.ask("refresh")
        assert (answer["version"], answer["personal"], model.answers()) == (1, False, RELEASED)


def test_a_model_that_is_as_good_as_it_gets_stays_as_released(coordinator, opening):
    with opening() as model:
        answer = made_personal(coordinator, model, params=LINE)
        assert (answer["kept"], answer["personal"], model.answers()) == (False, False, LINE.tolist())
    with opening() as again:
        assert not again.ask("predict", columns=X)["personal"]


def test_one_that_no_longer_helps_is_used_no_more(coordinator, opening, folder):
    mine = linear.examples(80)
    with opening() as model:
        assert made_personal(coordinator, model)["kept"]
        np.savez(folder / "examples.npz", x=mine["x"], y=mine["x"] @ linear.PARAMS)  # the released model is exact
        answer = model.ask("personalise")
        assert (answer["kept"], answer["personal"], model.answers()) == (False, False, RELEASED)
    with opening() as again:
        assert not again.ask("predict", columns=X)["personal"]


def test_forgetting_deletes_it_even_without_the_release(coordinator, model):
    assert model.ask("forget")["forgot"] is False
    made_personal(coordinator, model)
    answer = model.ask("forget")
    assert (answer["forgot"], answer["personal"], model.answers()) == (True, False, RELEASED)
    entry = answer["journal"][-1]
    wanted = f"the personal parameters of model {NAME} are deleted: the app asked for it"
    assert (entry["outcome"], entry["detail"]) == ("personal-dropped", wanted)
    assert model.ask("forget")["forgot"] is False
    model.ask("personalise")
    for path in Path(model.state / "blobs").iterdir():
        path.write_bytes(b"damaged")
    answer = model.ask("forget")
    assert answer.get("forgot", answer.get("error")) == (True if model.runtime == "python" else "ModelRefused")
    assert (answer["version"], answer["personal"]) == (None, False)


def needing(name):
    """Graphs whose step reads another vector of the broadcast."""
    step = [
        *linear.gradient_nodes("carry.params"),
        ("Add", ["gradient", f"broadcast.{name}"], "corrected"),
        ("Mul", ["corrected", "rate"], "move"),
        ("Sub", ["carry.params", "move"], "next.params"),
    ]
    inputs = [("carry.params", linear.FLOAT, [3]), (f"broadcast.{name}", linear.FLOAT, [3]), *linear.BATCH]
    outputs = [("next.params", linear.FLOAT, [3]), ("metrics", linear.FLOAT, [2])]
    constants = [("half", linear.FLOAT, [0.5]), ("rate", linear.FLOAT, [0.1])]
    return linear.graphs() | {"train.step": linear.graph(step, inputs, outputs, constants)}


def receiving(plan, name, size):
    """The plan, with a vector more in its broadcast."""
    return structs.replace(plan, broadcast=(*plan.broadcast, VectorSpec(name, size)))


def two_trips(plan):
    second = TripPlan(**{name: getattr(plan, name) for name in ("broadcast", "passes", "report", "graphs")})
    return structs.replace(plan, second=second)


def without_a_model(plan):
    passes = tuple(structs.replace(one, carry=(VectorSpec("dual", 3),)) for one in plan.passes)
    return structs.replace(plan, passes=passes)


def without_a_loss(plan):
    return structs.replace(
        plan, passes=tuple(structs.replace(one, metrics=("examples", "hits")) for one in plan.passes)
    )


@pytest.mark.parametrize(
    ("graphs", "change", "words"),
    [
        (None, two_trips, ["has two trips"]),
        (None, without_a_model, ["no pass of plan linear makes a local model"]),
        (None, without_a_loss, ["pass train of plan linear measures ", "no loss"]),
        (
            needing("momentum"),
            lambda plan: receiving(plan, "momentum", 3),
            ["params alone, which is all that a release holds", "broadcast.momentum"],
        ),
    ],
    ids=["trips", "model", "loss", "vector"],
)
def test_plans_without_a_local_model_are_refused_with_the_reason(coordinator, model, graphs, change, words):
    plan = change(linear.plan() if graphs is None else linear.plan(graphs))
    answer = made_personal(coordinator, model, graphs=graphs, plan=plan)
    assert (answer["error"], answer["personal"], model.answers()) == ("PlanRefused", False, RELEASED)
    assert [part for part in words if part not in plain(answer["detail"])] == []
    assert "\n" not in answer["detail"]
    assert answer["journal"][-1]["reason"] == "plan-refused"


def test_vectors_that_only_the_report_reads_are_not_needed(coordinator, model):
    assert made_personal(coordinator, model, plan=receiving(linear.plan(), "clip", 1))["kept"]


def test_too_few_examples_are_named_with_their_numbers(coordinator, model, folder):
    assert model.ask("personalise")["error"] == "NoModel"
    np.savez(folder / "examples.npz", **linear.examples(20))
    answer = made_personal(coordinator, model)
    assert answer["error"] == "ExamplesError"
    assert "of 20 examples of collection default" in plain(answer["detail"])
    assert "needs 10 of each" in answer["detail"]
    assert answer["journal"][-1]["reason"] == "too-few-examples"


@pytest.mark.parametrize(
    ("policy", "error", "rule"),
    [
        ({"collections": ["other"]}, "PlanRefused", "collections"),
        ({"populations": ["tablets"]}, "PolicyForbids", "populations"),
        ({"require_https": True}, "PolicyForbids", "require_https"),
        ({"plan": {"batch_examples": 2}}, "PlanRefused", "plan.batch_examples"),
        ({"plan": {"memory_bytes": 2}}, "PlanRefused", "plan.memory_bytes"),
        ({"plan": {"compute_seconds": 0}}, "PlanRefused", "plan.compute_seconds"),
        ({"per_day": {"compute_seconds": 0}}, "PolicyForbids", "per_day.compute_seconds"),
        ({"per_day": {"bytes": 2}}, "PolicyForbids", "per_day.bytes"),
    ],
    ids=str,
)
def test_the_owners_policy_holds_for_it_as_for_a_session(coordinator, opening, policy, error, rule):
    trainable(coordinator)
    with opening() as model:
        model.refresh()
    with opening(**policy) as model:
        answer = model.ask("personalise")
    assert (answer["error"], answer["personal"]) == (error, False)
    assert rule in answer["detail"]


def test_training_that_diverges_is_an_error_and_changes_nothing(coordinator, model):
    graphs = linear.graphs()
    steep = graphs["train.step"].replace(np.float32(0.1).tobytes(), np.float32(1e30).tobytes())
    assert steep != graphs["train.step"]
    answer = made_personal(coordinator, model, graphs=graphs | {"train.step": steep})
    assert (answer["personal"], model.answers()) == (False, RELEASED)
    assert answer["error"]
    assert answer["journal"][-1]["reason"] == "non-finite-report"


def test_a_session_keeps_the_graphs_and_the_personal_model(coordinator, opening):
    coordinator.offer(linear.plan(), linear.graphs(), {"params": linear.PARAMS})
    with opening(cache_bytes=0, signers=[]) as model:
        made_personal(coordinator, model)
        before = model.answers()
        assert model.ask("session")["outcome"]["outcome"] == "reported"
    calls = len(coordinator.calls)
    with opening(cache_bytes=0, signers=[]) as model:
        assert model.answers() == before
        assert model.ask("personalise")["kept"]
    assert len(coordinator.calls) == calls


def test_each_of_ten_thousand_answers_is_released_or_personal(coordinator, model):
    made_personal(coordinator, model)
    wanted = {model.answers()[0], RELEASED[0]}
    answer = model.ask("swaps", columns=X, calls=10_000)
    assert (set(answer["answers"]), answer["calls"]) == (wanted, 10_000)
    assert answer["swaps"] > 0
