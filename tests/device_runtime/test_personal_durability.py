"""A process that is killed while a model becomes personal has the released model or a whole personal one."""

import base64
import json
import signal
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.models.model import Model
from device_runtime.state.records import read_journal
from fedcore import checkpoint
from tests.device_runtime import linear
from tests.device_runtime.opened import X
from tests.device_runtime.personal import LINE, answers, away, local_steps, owning, taken, trainable
from tests.device_runtime.released import NAME, POLICY
from tests.forked import DEVICE, forked

CALL = """
import os, signal, sys
from device_runtime import Device, Policy
from device_runtime.state.database import StateDatabase

coordinator, examples, state, signer, call, at = sys.argv[1:]
steps = 0

def durable(method, counts=lambda *arguments: True):
    def dying(*arguments):
        global steps
        given = method(*arguments)
        if counts(*arguments):
            steps += 1
            if steps == int(at):
                os.kill(os.getpid(), signal.SIGKILL)
        return given
    return dying

device = Device(coordinator, "phones", examples, state, policy=Policy(signers=(signer,)))
with device.model("keyboard") as model:
    os.replace, os.unlink = durable(os.replace), durable(os.unlink)
    StateDatabase.execute = durable(StateDatabase.execute, lambda self, sql, *values: not sql.startswith("SELECT"))
    getattr(model, call)()
    print(steps, model.personal)
"""
MOST_STEPS = 40


@pytest.fixture
def owned(coordinator, config):
    """A device that has version 1, and has trained nothing."""
    config = owning(config, linear.examples(80))
    trainable(coordinator)
    taken(config).close()
    return config


def ended(config, call, at=0):
    arguments = config.coordinator, config.examples, config.state, POLICY.signers[0], call, at
    command = [sys.executable, "-c", CALL, *map(str, arguments)]
    done = forked(DEVICE).run(command)
    return done.returncode, done.stdout.split(), done.stderr


def opened(config):
    """Whether the model that opens offline is personal, and what it predicts with."""
    with Model(away(config), NAME) as model:
        return model.personal, answers(model)


def killed_at_each_step(config, call, allowed):
    """Kill the call after each of its durable steps, in turn; what is there is whole. The number of steps."""
    for step in range(1, MOST_STEPS):
        code, out, err = ended(config, call, step)
        assert opened(config) in allowed, step
        if code == 0:
            return step - 1, out
        assert code == -signal.SIGKILL, err
    raise AssertionError("it has no end")


def test_killed_at_a_durable_step_it_is_released_or_personal(owned):
    released = linear.PARAMS.tolist()
    with Model(owned, NAME) as model:
        model.personalise()
        personal = answers(model)
        model.forget()
    steps, out = killed_at_each_step(owned, "personalise", ((False, released), (True, personal)))
    assert steps >= 4
    assert out == [str(steps), "True"]
    assert opened(owned) == (True, personal)
    assert {"interrupted", "personalised"} <= {entry.outcome for entry in read_journal(owned.state)}
    assert not list(owned.state.glob("*.partial"))


def test_killed_while_it_is_made_anew_it_is_the_old_or_the_new(owned):
    with Model(owned, NAME) as model:
        model.personalise()
        old = answers(model)
    more = linear.examples(120, seed=1)
    owning(owned, more)
    new = local_steps(linear.PARAMS, more).astype("float32").tolist()
    allowed = ((True, old), (True, pytest.approx(new, rel=1e-5)))
    killed_at_each_step(owned, "personalise", allowed)
    assert opened(owned) == allowed[1]


def test_killed_while_it_is_forgotten_it_is_personal_or_released(owned):
    with Model(owned, NAME) as model:
        model.personalise()
        personal = answers(model)
    code, _, err = ended(owned, "forget", 1)
    assert code == -signal.SIGKILL, err
    assert opened(owned) in ((False, linear.PARAMS.tolist()), (True, personal))
    assert ended(owned, "forget")[0] == 0
    assert opened(owned) == (False, linear.PARAMS.tolist())
    assert not list(owned.state.glob("*.personal"))


def test_killed_while_another_version_comes_it_is_that_of_one(coordinator, owned):
    with Model(owned, NAME) as model:
        model.personalise()
        personal = answers(model)
    trainable(coordinator, 2, params=linear.PARAMS + 1)
    newer = (False, (linear.PARAMS + 1).tolist())
    killed_at_each_step(owned, "refresh", ((True, personal), newer))
    assert opened(owned) == newer


def test_killed_in_training_leaves_an_entry_that_says_so(owned):
    killed = """
import os, signal
from device_runtime.sandbox.process import Sandbox
Sandbox.train = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
"""
    arguments = owned.coordinator, owned.examples, owned.state, POLICY.signers[0], "personalise", 0
    done = forked(DEVICE).run([sys.executable, "-c", killed + CALL, *map(str, arguments)])
    assert done.returncode == -signal.SIGKILL
    entry = read_journal(owned.state)[-1]
    assert (entry.outcome, entry.task) == ("interrupted", "model keyboard")
    assert opened(replace(owned)) == (False, linear.PARAMS.tolist())


def test_a_device_elsewhere_killed_at_any_write_is_released_or_personal(owned, elsewhere):
    with elsewhere() as node:
        node.refresh()
    ended, personal = 0, []
    while ended < MOST_STEPS:
        with elsewhere(str(ended)) as node:
            answer = node.ask("personalise")
        with elsewhere() as after:
            found = after.ask("predict", columns=X)
        own = found["outputs"]["output"]
        assert found["personal"] or own == linear.PARAMS.tolist()
        personal += [own] if found["personal"] else []
        if answer is not None:
            break
        ended += 1
    assert (3 <= ended < MOST_STEPS, answer["kept"]) == (True, True)
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
def test_a_damaged_record_elsewhere_leaves_the_released_model(coordinator, owned, tmp_path, kept, elsewhere):
    signed = coordinator.models[NAME]
    with elsewhere() as node:
        node.refresh()
        node.ask("personalise")
    with closing(sqlite3.connect(tmp_path / elsewhere.func.runtime / "state.db", isolation_level=None)) as state:
        kept = kept.replace("SIGNED", json.dumps(structs.asdict(signed)))
        for word, vector in (("LONGER", np.ones(4, np.float32)), ("INFINITE", np.full(3, np.inf, np.float32))):
            kept = kept.replace(word, base64.b64encode(checkpoint.encode({"params": vector})).decode())
        (changed,) = state.execute("UPDATE kept SET value = ? WHERE key LIKE 'personal:%' RETURNING 1", (kept,))
    with elsewhere() as node:
        assert (changed, node.answers(), node.ask("predict", columns=X)["personal"]) == (
            (1,),
            linear.PARAMS.tolist(),
            False,
        )
        trainable(coordinator, 2, params=LINE)
        assert (node.refresh(), node.answers()) == ((True, 2), LINE.tolist())
