"""Released models: who is given which version, what is kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.errors import InvalidModel, UnknownBlob, UnknownModel, UnknownTask
from coordinator.rules.alerts import STORE
from coordinator.rules.roll_outs import Gate, Model, RollOut, RollOutKind, check_promotion, earlier, version_for
from coordinator.store.garbage_collection import Retention, collect
from fedcore import checkpoint
from fedcore.batching import is_held_out
from fedcore.errors import BadRelease, BadSignature, DigestMismatch
from fedcore.plan import BlobRef
from fedcore.signing import ModelOrigin, SigningKey
from fedcore.wire import messages
from fedcore.wire.messages import ReleasedModel
from tests.coordinator.bundles import START, make_plan
from tests.coordinator.released import PREDICT, predicting_bundle, predicting_plan, version

OTHER = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32))
DEVICES = [f"{number:032x}" for number in range(4000)]
KEYBOARD = ("phones", "keyboard")


def rolled(*steps):
    """Roll-outs of these numbers and shares."""
    kind = RollOutKind.PROMOTE
    of_model = {"population": "phones", "name": "keyboard"}
    return [RollOut(**of_model, number=n, share=s, kind=kind, at=float(at)) for at, (n, s) in enumerate(steps)]


def given(number, *steps, devices=DEVICES):
    """The devices that are given a version."""
    return {device for device in devices if version_for(device, {}, rolled(*steps)) == number}


@pytest.fixture
def task(register, tmp_path):
    """A task of the population, whose plan has a predict graph."""
    return register(predicting_bundle(tmp_path / "predicting"), goal=1, rounds=9)


@pytest.fixture
def released(store, task):
    """Three versions, which no device has yet."""
    return [store.release_model(version(store, number, START + number)) for number in (1, 2, 3)]


def test_a_share_that_grows_keeps_the_devices_that_it_had():
    shares = [given(2, (1, 1), (2, share)) for share in (0.05, 0.2, 0.8, 1)]
    assert shares[0] < shares[1] < shares[2] < shares[3] == set(DEVICES)
    for share, inside in zip((0.05, 0.2, 0.8), shares, strict=False):
        assert len(inside) / len(DEVICES) == pytest.approx(share, abs=0.02)


def test_the_devices_of_a_share_are_the_same_for_every_version():
    assert given(2, (1, 1), (2, 0.05)) == given(7, (1, 1), (2, 1), (7, 0.05))


def test_the_devices_of_a_share_are_others_for_other_models_and_hold_outs():
    first = given(1, (1, 0.2))
    (one,) = rolled((1, 0.2))
    other = {device for device in DEVICES if version_for(device, {}, [replace(one, name="camera")])}
    far = {device for device in DEVICES if version_for(device, {}, [replace(one, population="tablets")])}
    held = {device for device in DEVICES if is_held_out("phones", device, 0.2)}
    for these in (other, far, held):
        assert len(first & these) / len(first) == pytest.approx(0.2, abs=0.05)


def test_devices_outside_have_what_all_had_before():
    assert version_for(DEVICES[0], {}, []) is None
    assert given(None, (1, 0.2)) == set(DEVICES) - given(1, (1, 0.2))
    assert given(1, (1, 1), (2, 0.2)) == set(DEVICES) - given(2, (1, 1), (2, 0.2))
    assert given(1, (1, 1), (2, 0.5), (3, 0.2)) == set(DEVICES) - given(3, (3, 0.2))
    assert given(1, (1, 1), (2, 1), (1, 1), (3, 0.2)) == set(DEVICES) - given(3, (3, 0.2))


@pytest.mark.parametrize(
    ("steps", "back"),
    [
        ([(1, 1), (2, 0.2)], 1),
        ([(1, 1), (2, 1)], 1),
        ([(1, 1), (2, 1), (3, 0.2)], 2),
        ([(1, 1), (2, 1), (3, 1), (2, 1)], 1),
    ],
)
def test_a_roll_back_returns_to_what_all_had_before(steps, back):
    assert earlier(rolled(*steps), None) == back


@pytest.mark.parametrize(
    ("steps", "asked", "told"),
    [
        (
            [(1, 1), (2, 1)],
            (1, 0.2),
            "version 1 is earlier than version 2, .* `muster model roll-back keyboard --to 1`",
        ),
        ([(1, 1), (2, 0.2)], (1, 1), "version 1 is earlier than version 2"),
        ([(1, 1), (2, 1)], (2, 0.2), "all devices have version 2 already: `muster model roll-back keyboard`"),
    ],
)
def test_a_promotion_takes_no_version_from_devices(steps, asked, told):
    with pytest.raises(InvalidModel, match=told):
        check_promotion(rolled(*steps), *asked)


@pytest.mark.parametrize(
    ("steps", "asked"),
    [([], (2, 0.2)), ([(2, 0.2)], (2, 0.5)), ([(2, 0.5)], (2, 0.2)), ([(1, 1), (2, 1), (1, 1)], (2, 0.2))],
)
def test_a_share_may_grow_or_shrink_before_all_devices_have_it(steps, asked):
    check_promotion(rolled(*steps), *asked)


@pytest.mark.parametrize("steps", [[(1, 1)], [(1, 0.2)], [(1, 0.2), (2, 0.2)], [(1, 1), (1, 0), (2, 1)]])
def test_a_roll_back_withdraws_what_none_preceded(steps):
    assert earlier(rolled(*steps), None) is None
    withdrawn = (steps[-1][0], 0)
    assert given(None, *steps, withdrawn) == set(DEVICES)
    check_promotion(rolled(*steps, withdrawn), 1, 0.2)
    assert given(None, *steps, withdrawn, (3, 0.2)) == set(DEVICES) - given(3, (3, 0.2))


def test_a_roll_back_to_what_is_no_earlier_version_is_refused():
    with pytest.raises(InvalidModel, match="version 1 was withdrawn, and no device is given any: promote a version"):
        earlier(rolled((1, 1), (1, 0)), None)
    with pytest.raises(InvalidModel, match="version 3 is not earlier than version 2"):
        earlier(rolled((1, 1), (2, 1)), 3)
    with pytest.raises(UnknownModel, match="no version of the model was rolled out yet"):
        earlier([], None)


def test_a_gate_refuses_only_what_is_surely_worse():
    def figures(mean, half):
        return {"evaluate.m": mean, "evaluate.m.low": mean - half, "evaluate.m.high": mean + half}

    more, less = Gate.parse("m >= previous"), Gate.parse("m<=previous")
    assert "m of the new version is from 0.7 to 0.9, of the previous one 0.85" in more.check(
        figures(0.8, 0.1), figures(0.85, 0.01)
    )
    with pytest.raises(InvalidModel, match=r"refuses the version: m of the new version is from 0\.7 to 0\.8"):
        more.check(figures(0.75, 0.05), figures(0.85, 0.2))
    less.check(figures(0.75, 0.05), figures(0.85, 0.2))
    less.check(figures(0.9, 0.1), figures(0.85, 0.2))
    with pytest.raises(InvalidModel, match="refuses the version"):
        less.check(figures(0.9, 0.04), figures(0.85, 0.2))


def test_a_gate_names_a_metric_that_nobody_reported():
    whole = {"evaluate.m": 1.0, "evaluate.m.low": 0.0, "evaluate.m.high": 2.0}
    with pytest.raises(InvalidModel, match=r"the new version has no evaluate\.m\.low"):
        Gate.parse("m >= previous").check({}, whole)
    with pytest.raises(InvalidModel, match=r"that all devices have has no evaluate\.m: no gate"):
        Gate.parse("m >= previous").check(whole, {})
    for text in ("m > previous", "m >= 0.9", ">= previous", "m >= previous or so"):
        with pytest.raises(InvalidModel, match="is no gate"):
            Gate.parse(text)


@pytest.mark.every_engine
def test_versions_are_released_promoted_and_rolled_back(store, released):
    assert store.models() == [model_of(3)]
    assert store.model_versions(*KEYBOARD) == released
    assert store.model_history(*KEYBOARD) == []
    store.promote_model(*KEYBOARD, 1, 1.0)
    assert store.models() == [model_of(3, 1, 1.0)]
    store.promote_model(*KEYBOARD, 2, 0.05)
    assert store.models() == [model_of(3, 2, 0.05, 1)]
    assert store.roll_back_model(*KEYBOARD).number == 1
    assert store.models() == [model_of(3, 1, 1.0)]
    with pytest.raises(InvalidModel, match=r"no version was before version 1: .* say --withdraw"):
        store.roll_back_model(*KEYBOARD)
    assert store.roll_back_model(*KEYBOARD, withdraw=True, by="erin").share == 0
    assert store.models() == [model_of(3, 1, 0.0)]
    done = [(one.number, one.share, one.kind, one.actor) for one in store.model_history(*KEYBOARD)]
    rolled_out = [(1, 1.0, "promote", STORE), (2, 0.05, "promote", STORE), (1, 1.0, "roll-back", STORE)]
    assert done == [*rolled_out, (1, 0.0, "roll-back", "erin")]
    logged = [(one.actor, one.action, one.subject) for one in store.audit()][-7:-1]
    actions = ["model-released"] * 3 + ["model-promoted"] * 2 + ["model-rolled-back"]
    assert logged == [(STORE, action, "keyboard") for action in actions]


@pytest.mark.every_engine
def test_a_promotion_passes_its_gate_and_keeps_what_it_compared(store, task):
    def figures(low, mean, high):
        return {"evaluate.m": mean, "evaluate.m.low": low, "evaluate.m.high": high}

    for number, found in enumerate(((0.7, 0.8, 0.9), (0.75, 0.85, 0.95), (0.5, 0.6, 0.7)), 1):
        store.release_model(version(store, number, evaluation=figures(*found)))
    assert "compares nothing" in store.promote_model(*KEYBOARD, 1, 1.0, "m >= previous").gate
    passed = store.promote_model(*KEYBOARD, 2, 1.0, "m >= previous")
    assert passed.gate == "m of the new version is from 0.75 to 0.95, of the previous one 0.8"
    with pytest.raises(InvalidModel, match=r"the gate refuses the version: m of the new version is from 0\.5 to 0\.7"):
        store.promote_model(*KEYBOARD, 3, 0.05, "m >= previous")
    with pytest.raises(InvalidModel, match="'m > previous' is no gate"):
        store.promote_model(*KEYBOARD, 3, 0.05, "m > previous")
    assert store.model_history(*KEYBOARD)[-1] == passed
    assert store.audit()[-1].detail.endswith(passed.gate)


def model_of(versions, current=None, share=None, others=None):
    of_model = {"population": "phones", "name": "keyboard"}
    return Model(**of_model, versions=versions, current=current, share=share, others=others)


@pytest.mark.every_engine
def test_released_models_are_never_collected(store, task, desk, tmp_path):
    for number in range(4):
        desk.report(*desk.assign("a"), delta=[number + 1, 0, 0, 0])
    first = BlobRef.of(store.blobs.get(store.rounds(task)[0].checkpoint_sha256))
    apart = version(store, 2, START * 3)
    store.release_model(version(store, 1, store.checkpoint(task, 1)["params"], parameters=first))
    store.release_model(apart)
    assert collect(store, Retention(models=1, grace_s=-10)).models == 3
    collect(store, Retention(models=1, grace_s=-10))
    for one in store.model_versions(*KEYBOARD):
        for ref in (one.statement.plan, one.statement.parameters, BlobRef.of(PREDICT)):
            assert ref.check(store.blobs.get(ref.sha256))
            with store.database.reading() as records:
                assert records.blob(ref.sha256, public=True) == ref


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"number": 2}, "version 2 of model 'keyboard' is not the next: that is version 1"),
        ({"population": "tablets"}, "there is no population 'tablets'"),
        ({"params": START[:3]}, "the parameters do not fit plan 'hand-made': vector 'params' is float32"),
        ({"params": START * np.float32(np.inf)}, "the parameters hold an infinite or undefined number"),
        ({"expires_at": 1}, "version 1 of model 'keyboard' has expired"),
    ],
)
def test_a_release_that_fits_nothing_is_refused(more, words, store, task):
    with pytest.raises(InvalidModel, match=words):
        store.release_model(version(store, **more))
    assert store.models() == []


def test_a_checkpoint_with_more_than_parameters_is_refused(store, task):
    more = store.blobs.put(checkpoint.encode({"params": START, "clip": np.ones(1, np.float32)}))
    with pytest.raises(InvalidModel, match="vectors are"):
        store.release_model(version(store, parameters=more))


def test_a_plan_that_cannot_predict_is_refused(store, register):
    register()
    with pytest.raises(InvalidModel, match="plan 'hand-made' has no predict graph, so no app can predict with it"):
        store.release_model(version(store, plan=BlobRef.of(make_plan().encode())))


def test_a_release_whose_blobs_are_not_there_is_refused(store, register):
    register()
    with pytest.raises(UnknownBlob):  # the plan
        store.release_model(version(store))
    store.blobs.put(predicting_plan().encode())
    with pytest.raises(UnknownBlob, match=BlobRef.of(PREDICT).sha256[:12]):
        store.release_model(version(store))
    store.blobs.put(PREDICT)
    missing = BlobRef.of(b"parameters that nobody uploaded")
    with pytest.raises(UnknownBlob, match=missing.sha256[:12]):
        store.release_model(version(store, parameters=missing))
    good = store.release_model(version(store)).statement.parameters
    with pytest.raises(DigestMismatch):
        store.release_model(version(store, 2, parameters=msgspec.structs.replace(good, size=good.size + 1)))


def test_a_release_that_was_altered_is_refused(store, task):
    good = version(store)
    altered = msgspec.structs.replace(good, text=good.text.replace('"counter":1', '"counter":2'))
    for bad in (altered, msgspec.structs.replace(good, signer=OTHER.signer)):
        with pytest.raises(BadSignature, match="model release does not have the signature"):
            store.release_model(bad)
    with pytest.raises(BadRelease, match="malformed model release"):
        store.release_model(version(store, name="Key Board"))


def test_a_counter_below_that_of_an_earlier_version_of_the_key_is_refused(store, task):
    store.release_model(version(store, 1, counter=5))
    with pytest.raises(InvalidModel, match="has the counter 4, and version 1 of the same key 5: devices"):
        store.release_model(version(store, 2, counter=4))
    store.release_model(version(store, 2, counter=1, key=OTHER))
    store.release_model(version(store, 3, counter=5))


def test_a_version_that_its_key_forbade_is_not_rolled_out(store, task):
    for number, counter in ((1, 1), (2, 2)):
        store.release_model(version(store, number, counter=counter))
        store.promote_model(*KEYBOARD, number, 1.0)
    for act in (store.roll_back_model, lambda *model: store.promote_model(*model, 1, 0.5)):
        with pytest.raises(InvalidModel, match="version 1 has the counter 1, and version 2 of the same key 2"):
            act(*KEYBOARD)


def test_an_origin_that_cannot_be_is_refused(store, register, task):
    other = register()
    for origin, error, words in (
        (ModelOrigin(other, 1), InvalidModel, "version 1 of model 'keyboard' names an origin of another population"),
        (ModelOrigin("nowhere", 1), UnknownTask, "nowhere"),
    ):
        with pytest.raises(error, match=words):
            store.release_model(version(store, origin=origin))
    assert store.release_model(version(store, origin=ModelOrigin(task, 1))).statement.origin.round == 1


def test_the_parts_of_a_plan_that_apps_need_are_read_by_digest(store, task):
    plan = predicting_plan()
    assert store.plan_part(task) == plan.encode()
    assert store.plan_part(task, BlobRef.of(PREDICT).sha256) == PREDICT
    for other in (store.task(task).initial.checkpoint_sha256, "0" * 64):  # stored, and not
        with pytest.raises(UnknownBlob, match=f"the plan of task {task} names no predict graph or frozen vectors"):
            store.plan_part(task, other)
    with pytest.raises(UnknownTask):
        store.plan_part("nope")


@pytest.mark.parametrize("share", [0, -0.1, 1.01, 5, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share, store, released):
    with pytest.raises(InvalidModel, match="at most 1, which is all; of a hundred, write 5%"):
        store.promote_model(*KEYBOARD, 1, share)


def test_models_and_versions_that_are_not_there_are_named(store, released):
    with pytest.raises(UnknownModel, match="version 4 of model 'keyboard' was not released; the last one is 3"):
        store.promote_model(*KEYBOARD, 4, 1.0)
    for act in (store.model_versions, store.model_history, store.roll_back_model):
        with pytest.raises(UnknownModel, match="population 'phones' has no model 'camera'; `muster model list`"):
            act("phones", "camera")
        with pytest.raises(UnknownModel, match="population 'tablets' has no model 'keyboard'"):
            act("tablets", "keyboard")


def test_a_share_with_a_target_is_of_the_devices_that_match():
    beta = [*rolled((1, 1), (2, 1)), replace(rolled((3, 1))[0], target="ring = beta")]
    assert [version_for(DEVICES[0], labels, beta) for labels in ({}, {"ring": "beta"}, {"ring": "old"})] == [2, 3, 2]
    small = [*beta[:2], replace(beta[2], share=0.2)]
    inside = {device for device in DEVICES if version_for(device, {"ring": "beta"}, small) == 3}
    assert inside == given(3, (1, 1), (3, 0.2))
    assert earlier(beta, None) == 2
    assert earlier(beta, 2) == 2
    check_promotion(beta, 3, 0.5, "region = eu")
    check_promotion(beta, 3, 1.0)
    with pytest.raises(InvalidModel, match="all devices have version 3 already"):
        check_promotion([*beta, *rolled((3, 1))], 3, 1.0, "ring = beta")
    with pytest.raises(InvalidModel, match="version 2 is earlier than version 3"):
        check_promotion(beta, 2, 1.0)


@pytest.mark.every_engine
def test_a_version_is_promoted_to_the_devices_of_a_target(store, released):
    store.promote_model(*KEYBOARD, 1, 1.0)
    made = store.promote_model(*KEYBOARD, 2, 1.0, where="not ring in(old,older)")
    assert made == store.model_history(*KEYBOARD)[-1]
    assert made.target == "ring not in (old, older)"
    (model,) = store.models()
    assert (model.current, model.share, model.others, model.state) == (2, 1.0, 1, "for a share")
    assert model.wanted == "devices whose ring is none of old, older"
    assert store.audit()[-1].detail == "version 2 for 1 of the devices of phones where ring not in (old, older)"
    for labels, number in (({}, 1), ({"ring": "beta"}, 2), ({"ring": "old"}, 1)):
        assert store.model_for(DEVICES[0], labels, *KEYBOARD) == released[number - 1].release
    with pytest.raises(InvalidModel, match="where must be an expression on labels; column 6: there is no operator"):
        store.promote_model(*KEYBOARD, 3, 1.0, where="ring == beta")
    assert store.roll_back_model(*KEYBOARD).target == ""
    assert store.model_for(DEVICES[0], {"ring": "beta"}, *KEYBOARD) == released[0].release


def test_a_device_asks_with_the_labels_that_it_tells(store, released, client):
    def ask(query):
        return client.get(f"/v1/populations/phones/models/keyboard{query}", auth=client.devices["a"])

    store.promote_model(*KEYBOARD, 1, 1.0, where="city = 'São Paulo' and app_version >= 3.2")
    found = ask("?app_version=3.10&city=S%C3%A3o%20Paulo")
    assert messages.decode(found.content, ReleasedModel).release == released[0].release
    assert ask("?app_version=3.1&city=S%C3%A3o+Paulo").headers["Muster-Problem"] == "no-model"
    for wrong in (
        "?ring=a&ring=b",
        "?Ring=a",
        f"?ring={'a' * 65}",
        "?ring=%00",
        f"?{'&'.join(f'n{n}=a' for n in range(17))}",
    ):
        assert ask(wrong).headers["Muster-Problem"] == "malformed-message", wrong


def test_a_device_is_given_its_version_and_may_fetch_it(store, released, client):
    def ask(device, name="keyboard", population="phones"):
        return client.get(f"/v1/populations/{population}/models/{name}", auth=client.devices[device])

    names = [f"device {number}" for number in range(12)]
    for nothing in (ask("device 0"), ask("device 0", "camera"), ask("device 0", population="nowhere")):
        assert (nothing.status_code, nothing.headers["Muster-Problem"]) == (404, "no-model")
    store.promote_model(*KEYBOARD, 1, 1.0)
    before = set()
    for share in (0.3, 0.7, 1.0):
        store.promote_model(*KEYBOARD, 2, share)
        shown = {name: messages.decode(ask(name).content, ReleasedModel).release for name in names}
        inside = {name for name in names if shown[name] == released[1].release}
        assert {shown[name] for name in set(names) - inside} <= {released[0].release}
        assert inside == {name for name in names if version_for(client.devices.id(name), {}, rolled((2, share))) == 2}
        assert before <= inside
        before = inside
    assert before == set(names)
    store.roll_back_model(*KEYBOARD)
    assert {messages.decode(ask(name).content, ReleasedModel).release for name in names} == {released[0].release}
    statement = released[0].statement
    for ref in (statement.plan, statement.parameters, BlobRef.of(PREDICT)):
        ref.check(client.get(f"/v1/blobs/{ref.sha256}", auth=client.devices["device 0"]).content)
    assert client.get("/v1/populations/phones/models/keyboard").headers["Muster-Problem"] == "unsigned"
