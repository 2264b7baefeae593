"""Tasks that begin at a model of another: where it is from, what keeps them from it, what its privacy has spent."""

import re

import httpx2
import msgspec
import numpy as np
import pytest

from coordinator.errors import InvalidTask, NotPrivate, UnknownRound, UnknownTask
from coordinator.rules.task_settings import PrivacyBudget
from coordinator.store.tasks import Secagg, TaskSettings
from fedcore.params import ParamSchema, TensorSpec
from fedcore.privacy.settings import decode_certificate
from fedcore.privacy.verification import verify
from fedcore.release import decode_release
from muster.creating import Creation, released_for
from tests.coordinator.bundles import START, make_bundle, make_evaluation_bundle, make_plan, make_private_bundle
from tests.coordinator.conftest import LINEAGE, RELEASE
from tests.coordinator.test_evaluated import trained as trained  # noqa: PLC0414 - a fixture
from tests.coordinator.test_privacy import promise, train

GIVEN = {"population": "phones", "goal": 2, "rounds": 3, "over_selection": 1.0}


def begin(store, bundle, source, **settings):
    return store.register_task(bundle, TaskSettings(**GIVEN | settings, starts_from=source))


def test_the_page_of_a_task_says_where_it_began(store, trained, bundle, served):
    page = httpx2.get(f"{served.admin}/tasks/{begin(store, bundle, trained).id}").text
    assert f'began at the model of task <a href="/tasks/{trained}">{trained}</a>, round 2' in page


def test_a_task_begins_at_the_model_of_another_and_says_which(store, trained, bundle):
    last, first = begin(store, bundle, trained), begin(store, bundle, f"{trained}@1")
    for task, number in ((last, 2), (first, 1)):
        params = store.checkpoint(trained, number)["params"]
        np.testing.assert_array_equal(store.checkpoint(task.id, 0)["params"], params)
        assert store.task(task.id).settings.starts_from == f"{trained}@{number}"
        assert params.tolist() != START.tolist()
    begun = begin(store, bundle, trained)
    with store.database.writing() as records:
        records.garbage.forget_models(trained, [1, 2])
    like = store.register_task(store.manifest(begun.id), begun.settings)
    assert like.initial == begun.initial
    with pytest.raises(InvalidTask, match=f"starts_from must be {trained}@2: the bundle"):
        store.register_task(store.manifest(begun.id), TaskSettings(**GIVEN))


def test_held_out_devices_stay_apart_from_a_task_that_begins_at_a_model(store, register, desk, bundle):
    parent = register(hold_out_devices=0.01)
    for given in desk.assign("a", "b"):
        desk.report(given, (1, 0, 0, 0))
    desk.pass_time(1)
    with pytest.raises(InvalidTask, match=r"hold_out_devices must be at least 0\.01"):
        begin(store, bundle, parent)
    child = begin(store, bundle, parent, hold_out_devices=0.02)
    with store.database.reading() as records:
        ancestors = records.attempts.ancestors("phones", "0" * 64, f"{child.id}@1")
    assert {one.id for one in ancestors} == {parent, child.id}


def test_models_that_a_task_cannot_begin_at_are_refused(store, trained, register, bundle, tmp_path):
    plan = make_plan()
    other = ParamSchema((TensorSpec("w", (2, 2)),))
    shaped = make_bundle(tmp_path / "shaped", msgspec.structs.replace(plan, schema=other))
    for source, wrong, error, words in (
        (trained, shaped, InvalidTask, r"it has the tensor w \[4\], the plan w \[2, 2\]"),
        (register(), bundle, InvalidTask, "has committed no round yet"),
        ("nope@1", bundle, UnknownTask, "no task 'nope'"),
        (f"{trained}@7", bundle, UnknownRound, "7"),
        (trained, make_evaluation_bundle(tmp_path / "evaluation"), InvalidTask, "leave starts_from out"),
    ):
        with pytest.raises(error, match=words):
            begin(store, wrong, source)
    with pytest.raises(InvalidTask, match="starts_from must be TASK or TASK@ROUND"):
        TaskSettings(**GIVEN, starts_from="a@0")


def test_a_release_is_of_the_model_at_which_the_task_begins(store, trained, bundle):
    store.lineage_key = lambda: LINEAGE

    def sign(bundle, settings, of):
        return released_for(store, bundle, settings, RELEASE, (), evaluation=of)

    settings = GIVEN | {"goal": 9, "secagg": Secagg(clip_norm=8.0), "starts_from": trained}
    task = Creation(bundle, sign=sign).register(store, settings)
    assert decode_release(task.release.text).checkpoint == task.initial.checkpoint_sha256
    np.testing.assert_array_equal(store.checkpoint(task.id)["params"], store.checkpoint(trained)["params"])


def test_what_the_tasks_before_have_spent_is_in_the_certificate(store, register, desk, tmp_path):
    store.lineage_key = lambda: LINEAGE
    plan, privacy = make_private_bundle(tmp_path / "private"), promise(rounds=3)
    parent = register(plan, rounds=9, privacy=privacy)
    train(desk, 2)
    store.pause(parent)
    child = begin(store, plan, f"{parent}@1", privacy=PrivacyBudget(epsilon=9, delta=1e-7, users=1000)).id
    train(desk, 1)
    certified, model = store.certificate(child), store.model(child)
    verdict = verify(model, certified, LINEAGE.signer)
    assert verdict.wrong == ()
    own, (first, _) = store.spent(child)[-1].epsilon, store.spent(parent)
    assert verdict.epsilon == own
    assert verdict.total == pytest.approx((own + first.epsilon, 1e-7 + privacy.delta))
    dropped = msgspec.structs.replace(certified, before=msgspec.UNSET)
    assert verify(model, dropped).wrong == ("before: 1 private tasks, and 0 ledgers",)
    (rows,) = certified.before
    longer = msgspec.structs.replace(certified, before=((*rows, msgspec.structs.replace(rows[0], round=2)),))
    assert {one.split(":")[0] for one in verify(model, longer).wrong} == {f"task {parent}"}
    store.cancel(child)
    public = begin(store, plan, f"{child}@1")
    with pytest.raises(NotPrivate, match=re.escape(f"of a task with ε {own + first.epsilon:.6g} at δ 1.1e-06")):
        store.certificate(public.id)
    train(desk, 1)
    store.cancel(public.id)
    last = begin(store, plan, f"{public.id}@1", privacy=privacy).id
    certified = store.certificate(last)
    (ancestor,) = decode_certificate(certified.certificate.text).before
    assert (ancestor.task, ancestor.privacy, certified.before) == (public.id, None, msgspec.UNSET)
    assert not verify(store.model(last), certified, LINEAGE.signer).total.private
