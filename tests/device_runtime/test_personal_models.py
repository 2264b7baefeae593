"""Personal models: local steps of a release's plan on a device, used only where they help on examples left out."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.conditions import Conditions, Requirements
from device_runtime.errors import (
    DeviceError,
    ExamplesError,
    ModelClosed,
    NoModel,
    NotAllowedNow,
    PlanRefused,
    PolicyForbids,
    StateInUse,
    Unreachable,
)
from device_runtime.models.model import Model
from device_runtime.permission.policy import PerDay, PlanLimits
from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from device_runtime.state.database import read_database
from device_runtime.state.folder import only_session
from device_runtime.state.journal import read_journal
from device_runtime.state.records import kept_blobs
from device_runtime.trainer import Measured, divided, groups
from fedcore.hold_out import HoldOut
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, TripPlan
from muster.commands.device import parser
from tests.device_runtime import linear
from tests.device_runtime.personal import LINE, answers, away, local_steps, loss, owning, taken, trainable
from tests.device_runtime.released import NAME, POLICY


@pytest.fixture
def mine():
    return linear.examples(80)


@pytest.fixture
def owned(config, mine):
    return owning(config, mine)


def files(config):
    return list(config.state.glob("*.personal"))


def test_a_personal_model_is_the_local_steps_of_the_plan(coordinator, owned, mine):
    trainable(coordinator)
    with taken(owned) as model:
        released = answers(model)
        outcome = model.personalise()
        train, out = divided(linear.plan().examples, mine)
        wanted = local_steps(linear.PARAMS, mine)
        np.testing.assert_allclose(answers(model), wanted, rtol=1e-5)
        assert (outcome.kept, model.personal, model.version, outcome.version) == (True, True, 1, 1)
        assert (outcome.examples, outcome.left_out) == (len(train["y"]), len(out["y"]))
        assert outcome.before == pytest.approx(loss(linear.PARAMS, out), rel=1e-5)
        assert outcome.after == pytest.approx(loss(wanted, out), rel=1e-4)
        assert outcome.after < outcome.before
        assert released == linear.PARAMS.tolist()


def test_it_opens_offline_and_is_made_anew_offline(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        personal = answers(model)
    calls = len(coordinator.calls)
    with Model(away(owned), NAME) as model:
        assert (model.personal, answers(model)) == (True, personal)
        assert model.personalise().kept
        assert answers(model) == personal
    assert len(coordinator.calls) == calls


def test_only_the_first_training_of_a_plan_fetches_its_graphs(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        assert coordinator.calls.count("blob") == 3
        model.personalise()
        assert coordinator.calls.count("blob") == 5
        model.personalise()
        assert coordinator.calls.count("blob") == 5


def test_without_a_network_the_first_training_says_so(coordinator, owned):
    trainable(coordinator)
    taken(owned).close()
    with Model(away(owned), NAME) as model:
        with pytest.raises(Unreachable):
            model.personalise()
        assert answers(model) == linear.PARAMS.tolist()


def test_graphs_of_the_same_plan_stay_with_the_next_version(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
    trainable(coordinator, 2, params=linear.PARAMS + 1)
    narrow = replace(owned, policy=structs.replace(POLICY, cache_bytes=0))
    with Model(narrow, NAME) as model:
        assert model.refresh()
    with Model(away(narrow), NAME) as model:
        assert (model.version, model.personal) == (2, False)
        assert model.personalise().version == 2


def test_nothing_leaves_but_requests_for_graphs(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        asked = len(coordinator.calls)
        model.personalise()
        model.forget()
    assert set(coordinator.calls[asked:]) == {"blob"}
    assert coordinator.reports == []


def test_a_model_that_is_as_good_as_it_gets_stays_as_released(coordinator, owned):
    trainable(coordinator, params=LINE)
    with taken(owned) as model:
        outcome = model.personalise()
        assert (outcome.kept, model.personal, answers(model)) == (False, False, LINE.tolist())
    assert files(owned) == []


def test_one_that_no_longer_helps_is_used_no_more(coordinator, owned, mine):
    trainable(coordinator)
    with taken(owned) as model:
        assert model.personalise().kept
        np.savez(owned.examples, x=mine["x"], y=mine["x"] @ linear.PARAMS)  # the released model is exact on these
        assert not model.personalise().kept
        assert (model.personal, answers(model)) == (False, linear.PARAMS.tolist())
    with Model(owned, NAME) as model:
        assert not model.personal


def test_chance_seldom_makes_a_model_personal(coordinator, config):
    """The examples have nothing to learn, so half of all trainings would come out better by two means."""
    trainable(coordinator, params=np.zeros(3, np.float32))
    rng = np.random.default_rng(1)
    kept = 0
    with taken(owning(config, linear.examples(80))) as model:
        for _ in range(40):
            x, y = rng.normal(size=(80, 3)).astype(np.float32), rng.normal(size=80).astype(np.float32)
            np.savez(config.examples, x=x, y=y)
            kept += model.personalise().kept
    assert kept <= 4


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ([0.1] * 10, True),
        ([0.0] * 10, False),
        ([-0.1] * 10, False),
        ([1.0, *[-0.01] * 9], False),  # better in the mean, by one lucky group
        ([0.02, 0.01, 0.03, 0.02, 0.01, 0.02, 0.04, 0.01, -0.01, 0.02], True),
    ],
)
def test_the_mean_of_pairs_decides_with_its_standard_error(gains, better):
    after = np.full(10, 2.0, np.float32)
    measured = Measured(np.zeros(3, np.float32), after + np.array(gains, np.float32), after)
    assert measured.is_better == better


@pytest.mark.parametrize(("count", "size", "most"), [(10, 4, 10), (40, 4, 32), (500, 4, 125), (500, 20, 32)])
def test_groups_are_alike_and_within_a_batch(count, size, most):
    sizes = [len(rows) for rows in groups(count, size)]
    assert (sum(sizes), len(sizes)) == (count, most)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def test_what_the_plan_holds_out_is_measured_on_and_not_trained(mine):
    spec = structs.replace(linear.plan().examples, hold_out=HoldOut(0.4))
    train, out = divided(spec, mine)
    kept = spec.kept(mine)
    np.testing.assert_array_equal(train["y"], mine["y"][kept])
    small = structs.replace(spec, hold_out=HoldOut(0.05, "held-out"))
    assert set(mine["y"][small.kept(mine)]) <= set(divided(small, mine)[1]["y"])
    assert set(train["y"]) & set(out["y"]) == set()


def test_too_few_examples_are_named_with_their_numbers(coordinator, config):
    trainable(coordinator)
    config = owning(config, linear.examples(20))
    with taken(config) as model:
        with pytest.raises(
            ExamplesError, match=r"of 20 examples of collection 'default', .* needs 10 of each"
        ) as error:
            model.personalise()
        assert error.value.reason == "too-few-examples"
    assert read_journal(config.state)[-1].reason == "too-few-examples"


def test_many_steps_in_a_call_make_the_same_model(coordinator, owned):
    made = []
    for number, graphs in enumerate((linear.graphs(), linear.many_steps()), 1):
        trainable(coordinator, number, graphs=graphs)
        with taken(owned) as model:
            outcome = model.personalise()
            made.append((answers(model), outcome.before, outcome.after))
    np.testing.assert_allclose(made[0][0], made[1][0], rtol=1e-6)
    assert made[0][1:] == pytest.approx(made[1][1:], rel=1e-6)


def test_in_a_sandbox_the_model_has_the_same_bits(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        here = model.personalise(), answers(model)
    with Model(replace(owned, trainer=Sandbox), NAME) as model:
        assert (model.personalise(), answers(model)) == here


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


def test_steps_that_need_more_than_a_release_holds_are_refused(coordinator, owned):
    graphs = needing("momentum")
    plan = linear.plan(graphs)
    plan = structs.replace(plan, broadcast=(*plan.broadcast, VectorSpec("momentum", 3)))
    trainable(coordinator, graphs=graphs, plan=plan)
    with taken(owned) as model:
        with pytest.raises(PlanRefused, match=r"'params' alone, which .* a release holds: .*broadcast\.momentum"):
            model.personalise()
        assert answers(model) == linear.PARAMS.tolist()


def test_vectors_that_only_the_report_reads_are_not_needed(coordinator, owned):
    plan = linear.plan()
    trainable(coordinator, plan=structs.replace(plan, broadcast=(*plan.broadcast, VectorSpec("clip", 1))))
    with taken(owned) as model:
        assert model.personalise().kept


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
    ("change", "words"),
    [
        (two_trips, "has two trips"),
        (
            without_a_model,
            "no pass of plan 'linear' makes a local model: none of .*'train', 'sweep'.* carries 'params'",
        ),
        (without_a_loss, "pass 'train' of plan 'linear' measures .* no loss"),
    ],
)
def test_plans_without_a_local_model_are_refused_with_the_reason(coordinator, owned, change, words):
    trainable(coordinator, plan=change(linear.plan()))
    with taken(owned) as model:
        calls = len(coordinator.calls)
        with pytest.raises(PlanRefused, match=words) as error:
            model.personalise()
        assert "\n" not in str(error.value)
        assert len(coordinator.calls) == calls


def test_without_a_version_there_is_nothing_to_train(coordinator, owned):
    with Model(owned, NAME) as model, pytest.raises(NoModel, match="no version of model 'keyboard' is here yet"):
        model.personalise()
    with Model(owned, NAME) as model:
        assert (model.forget(), model.personal) == (False, False)


@pytest.mark.parametrize(
    ("policy", "kind", "words"),
    [
        ({"collections": ("other",)}, PlanRefused, "against collections"),
        ({"populations": ("tablets",)}, PolicyForbids, "against populations"),
        ({"require_https": True}, PolicyForbids, "against require_https"),
        ({"plan": PlanLimits(batch_examples=2)}, PlanRefused, "plan.batch_examples"),
        ({"plan": PlanLimits(memory_bytes=2)}, PlanRefused, "plan.memory_bytes"),
        ({"plan": PlanLimits(compute_seconds=0)}, PlanRefused, "plan.compute_seconds"),
        ({"per_day": PerDay(compute_seconds=0)}, PolicyForbids, "per_day.compute_seconds"),
        ({"per_day": PerDay(bytes=2)}, PolicyForbids, "per_day.bytes"),
    ],
)
def test_the_owners_policy_holds_for_it_as_for_a_session(coordinator, owned, policy, kind, words):
    trainable(coordinator)
    taken(owned).close()
    config = replace(owned, policy=structs.replace(POLICY, **policy))
    with Model(config, NAME) as model:
        with pytest.raises(kind, match=words):
            model.personalise()
        assert not model.personal
    assert files(owned) == []


def test_the_conditions_of_the_device_hold_for_it(coordinator, owned):
    trainable(coordinator)
    taken(owned).close()
    config = replace(owned, conditions=lambda: Conditions(charging=False), requirements=Requirements(charging=True))
    with Model(config, NAME) as model, pytest.raises(NotAllowedNow, match="charging"):
        model.personalise()
    assert read_journal(owned.state)[-1].outcome == "not-now"


def test_its_seconds_count_for_the_day(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
    with read_database(owned.state) as database:
        ((seconds, sessions),) = database.execute("SELECT sum(seconds), sum(sessions) FROM spent")
    assert (seconds > 0, sessions) == (True, 0)
    entry = read_journal(owned.state)[-1]
    assert entry.compute_s == pytest.approx(seconds)


def test_the_journal_names_each_training_and_what_became_of_it(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        outcomes = [model.personalise() for _ in range(2)]
        model.forget()
    *trainings, dropped = read_journal(owned.state)[-3:]
    for entry, outcome in zip(trainings, outcomes, strict=True):
        assert (entry.outcome, entry.task, entry.plan, entry.times) == ("personalised", "model keyboard", "linear", 1)
        assert (entry.examples, entry.steps > 0) == (outcome.examples, True)
        assert entry.detail.endswith(f"on {outcome.left_out} examples left out: kept")
    assert dropped.outcome == "personal-dropped"
    assert dropped.detail == "the personal parameters of model keyboard are deleted: the app asked for it"


def test_a_new_version_resets_and_the_old_one_comes_back_as_released(coordinator, owned):
    first = trainable(coordinator, counter=1)
    with taken(owned) as model:
        model.personalise()
        trainable(coordinator, 2, params=linear.PARAMS + 1, counter=1)
        assert (model.refresh(), model.version, model.personal) == (True, 2, False)
        assert answers(model) == (linear.PARAMS + 1).tolist()
        assert (files(owned), read_journal(owned.state)[-1].outcome) == ([], "personal-dropped")
        coordinator.models[NAME] = first
        assert (model.refresh(), model.personal, answers(model)) == (True, False, linear.PARAMS.tolist())


def test_what_belongs_to_another_version_does_not_open(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
    (file,) = files(owned)
    kept = file.read_bytes()
    trainable(coordinator, 2, params=linear.PARAMS + 1)
    with taken(owned) as model:
        file.write_bytes(kept)
    with Model(owned, NAME) as model:
        assert (model.version, model.personal) == (2, False)


def test_the_same_version_taken_again_stays_personal(coordinator, owned):
    trainable(coordinator)
    with Model(owned, NAME) as early, taken(owned) as model:
        model.personalise()
        assert (early.refresh(), early.personal, answers(early)) == (True, True, answers(model))


def test_forgetting_deletes_the_file_and_uses_the_release(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        assert len(files(owned)) == 1
        assert (model.forget(), model.personal, answers(model)) == (True, False, linear.PARAMS.tolist())
        assert (files(owned), model.forget()) == ([], False)


def test_what_is_forgotten_predicts_no_more_even_without_the_release(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        (owned.state / "blobs" / BlobRef.of(linear.predict_graph()).sha256).write_bytes(b"other")
        assert (model.forget(), model.personal, model.version) == (True, False, None)


def test_what_a_killed_process_left_half_written_goes_too(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        (file,) = files(owned)
        partial = file.with_name(f"{file.name}.abc.partial")
        for call in (model.personalise, model.forget):
            partial.write_bytes(b"half")
            call()
            assert not partial.exists()


def test_what_is_kept_is_sealed(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        own = np.array(answers(model), np.float32).tobytes()
    assert not any(own in path.read_bytes() for path in owned.state.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["changed", "cut", "other key"])
def test_a_damaged_file_leaves_the_released_model(coordinator, owned, damage):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
    (file,) = files(owned)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "other key":
        (owned.state / "sealing-key").write_bytes(bytes(32))
    else:
        file.write_bytes(data if damage == "changed" else data[:7])
    with Model(owned, NAME) as model:
        assert (model.version, model.personal, answers(model)) == (1, False, linear.PARAMS.tolist())


def test_a_locked_keystore_leaves_the_released_model(coordinator, owned, caplog):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
    (owned.state / "sealing-key").write_bytes(b"short")
    with Model(owned, NAME) as model:
        assert answers(model) == linear.PARAMS.tolist()
    assert "the personal parameters of model keyboard cannot be used, the released ones are" in caplog.text


def test_while_a_session_has_the_state_folder_it_says_so(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model, only_session(owned.state):
        for call in (model.personalise, model.forget):
            with pytest.raises(StateInUse):
                call()
    with pytest.raises(ModelClosed):
        model.personalise()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (PlanLimits(compute_seconds=0.01), "against plan.compute_seconds"),
        (PlanLimits(memory_bytes=1_000_000), "the process of the training gave up"),
    ],
)
def test_a_sandbox_that_ends_early_leaves_all_as_it_was(coordinator, owned, limits, words):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        before = answers(model)
    config = replace(owned, trainer=Sandbox, policy=structs.replace(POLICY, plan=limits))
    with Model(config, NAME) as model:
        with pytest.raises(PlanRefused, match=words):
            model.personalise()
        assert (model.personal, answers(model)) == (True, before)
    assert read_journal(owned.state)[-1].outcome == "failed"
    with Model(owned, NAME) as model:
        assert answers(model) == before


def test_training_that_diverges_is_an_error_and_changes_nothing(coordinator, owned):
    graphs = linear.graphs()
    steep = graphs["train.step"].replace(np.float32(0.1).tobytes(), np.float32(1e30).tobytes())
    assert steep != graphs["train.step"]
    trainable(coordinator, graphs=graphs | {"train.step": steep})
    with taken(owned) as model:
        with pytest.raises(DeviceError, match="diverged") as error:
            model.personalise()
        assert (error.value.reason, answers(model)) == ("non-finite-report", linear.PARAMS.tolist())


def test_a_session_keeps_the_graphs_and_the_personal_model(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        before = answers(model)
    narrow = replace(owned, policy=structs.replace(POLICY, cache_bytes=0, signers=()))
    assert run_session(narrow).outcome == "reported"
    with read_database(owned.state) as database:
        kept = kept_blobs(database)
    assert {BlobRef.of(linear.graphs()[name]).sha256 for name in ("train.begin", "train.step")} <= kept
    with Model(away(narrow), NAME) as model:
        assert answers(model) == before
        assert model.personalise().kept


def test_each_of_ten_thousand_answers_is_released_or_personal(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        wanted = {tuple(answers(model)), tuple(linear.PARAMS.tolist())}
        left, found, errors, swaps = threading.Semaphore(10_000), set(), [], []

        def ask():
            while left.acquire(blocking=False) or len(swaps) < 3:  # a busy machine may answer before it swaps
                try:
                    found.add(tuple(answers(model)))
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            model.forget()
            swaps.append(model.personalise())
        for thread in threads:
            thread.join()
    assert errors == []
    assert found == wanted


def test_a_command_makes_a_model_personal(coordinator, owned, capsys):
    trainable(coordinator)
    where = ["--coordinator", owned.coordinator, "--population", "phones", "--state", str(owned.state)]

    def told(*more):
        options = parser().parse_args(["model", NAME, *where, *more])
        assert options.act(options) == 0
        return capsys.readouterr().out

    found = json.loads(told("--json", "--personalise", str(owned.examples)))
    assert (found["personal"], found["personalised"]["kept"]) == (True, True)
    assert json.loads(told("--json", "--offline"))["personal"]
    assert "personal, version 1" in told("--offline", "--personalise", str(owned.examples))
