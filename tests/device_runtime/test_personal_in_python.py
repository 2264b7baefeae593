"""Personal models in Python: what decides, sealed files and their damage, the sandbox, and the command line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.conditions import Conditions, Requirements
from device_runtime.errors import (
    ModelClosed,
    NotAllowedNow,
    PlanRefused,
    StateInUse,
    Unreachable,
)
from device_runtime.models.model import Model
from device_runtime.permission.policy import PlanLimits
from device_runtime.sandbox.process import Sandbox
from device_runtime.state.database import read_database
from device_runtime.state.folder import only_session
from device_runtime.state.records import read_journal
from device_runtime.trainer import Measured, divided, groups
from fedcore.batching import HoldOut
from muster.commands.device import parser
from tests.device_runtime import linear
from tests.device_runtime.personal import answers, away, owning, taken, trainable
from tests.device_runtime.released import NAME, POLICY


@pytest.fixture
def mine():
    return linear.examples(80)


@pytest.fixture
def owned(config, mine):
    return owning(config, mine)


def files(config):
    return list(config.state.glob("*.personal"))


def test_without_a_network_the_first_training_says_so(coordinator, owned):
    trainable(coordinator)
    taken(owned).close()
    with Model(away(owned), NAME) as model:
        with pytest.raises(Unreachable):
            model.personalise()
        assert answers(model) == linear.PARAMS.tolist()


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


def test_in_a_sandbox_the_model_has_the_same_bits(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        here = model.personalise(), answers(model)
    with Model(replace(owned, trainer=Sandbox), NAME) as model:
        assert (model.personalise(), answers(model)) == here


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


def test_forgetting_deletes_the_file(coordinator, owned):
    trainable(coordinator)
    with taken(owned) as model:
        model.personalise()
        assert len(files(owned)) == 1
        assert (model.forget(), files(owned)) == (True, [])


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
