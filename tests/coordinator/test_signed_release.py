"""Signed releases in the coordinator: what a secure task needs, and what devices are shown of its checkpoints."""

import dataclasses
import itertools
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, structs

from coordinator.errors import InvalidTask, KeysDiffer
from coordinator.rules.states import TaskState
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.codecs.codec import Rotation
from fedcore.errors import BadSignature
from fedcore.release import LineageEntry, TreeHead, decode_release
from fedcore.signing import SigningKey, verified
from muster.releasing import released
from secagg.graph import climb
from tests.coordinator.bundles import START, make_bundle, make_plan
from tests.coordinator.conftest import LINEAGE, RELEASE, Desk
from tests.coordinator.test_secure import SECURE, run, seat

SETTINGS = TaskSettings(population="phones", over_selection=1.0, **SECURE)
OTHER = SigningKey(Ed25519PrivateKey.generate())


def sign(bundle, settings=SETTINGS, key=RELEASE, **more):
    return released(bundle, settings, key, LINEAGE.signer, **more)


def test_a_secure_task_needs_a_release_and_a_plain_one_takes_none(store, bundle):
    with pytest.raises(InvalidTask, match=r"needs a signed release.*--release-key"):
        store.register_task(bundle, SETTINGS)
    signed = sign(bundle)
    assert store.task(store.register_task(bundle, SETTINGS, signed).id).release == signed
    with pytest.raises(InvalidTask, match="for tasks with secagg"):
        store.register_task(bundle, dataclasses.replace(SETTINGS, secagg=None), signed)


def test_a_release_of_something_else_makes_no_task(store, bundle, tmp_path):
    other = make_bundle(tmp_path / "other", plan=make_plan(formats=("onnx", "executorch")))
    later = make_bundle(tmp_path / "later", start=START + 1)
    wider = dataclasses.replace(SETTINGS, secagg=dataclasses.replace(SETTINGS.secagg, clip_norm=1e6))
    more = dataclasses.replace(SETTINGS, goal=20, minimum=9)
    for release, words in (
        (sign(other), "plan of the release"),
        (sign(later), "checkpoint of the release"),
        (sign(bundle, wider), "bounds of the release"),
        (sign(bundle, more), "bounds of the release"),
        (sign(bundle, dataclasses.replace(SETTINGS, population="tablets")), "population of the release"),
        (sign(bundle, days=0), "expired"),
    ):
        with pytest.raises(InvalidTask, match=words):
            store.register_task(bundle, SETTINGS, release)
    with pytest.raises(BadSignature):
        store.register_task(bundle, SETTINGS, structs.replace(sign(bundle), signer=OTHER.signer))
    assert store.tasks() == []


def test_a_release_names_the_seed_where_the_plan_has_codecs_alone(store, bundle, tmp_path):
    segments = make_plan().report.segments
    plan = make_plan(segments=(structs.replace(segments[0], codecs=(Rotation(4),)), *segments[1:]))
    coded, seeded = make_bundle(tmp_path / "coded", plan=plan), dataclasses.replace(SETTINGS, seed=2**63 - 1)
    assert decode_release(sign(coded, seeded).text).seed == 2**63 - 1
    assert "seed" not in sign(bundle, seeded).text
    without = structs.replace(decode_release(sign(coded, seeded).text), seed=UNSET)
    for release, words in (
        (sign(coded), f"seed of the release is 0, the task's is {2**63 - 1}"),
        (RELEASE.sign_statement(without), "seed of the release is not there"),
    ):
        with pytest.raises(InvalidTask, match=words):
            store.register_task(coded, seeded, release)
    store.register_task(coded, seeded, sign(coded, seeded))


def test_every_checkpoint_comes_with_its_signed_descent(store, register, desk):
    task = register(**SECURE | {"rounds": 3})
    signed, shown = store.task(task).release, []
    for _ in range(3):
        devices = seat(desk)
        assert {device.given.release for device in devices} == {signed}
        shown.append(devices[0].given)
        run(devices)
    assert (shown[0].lineage, shown[0].checkpoint.sha256) == (None, decode_release(signed.text).checkpoint)
    for number, (before, after) in enumerate(itertools.pairwise(shown), start=1):
        entry = verified(after.lineage, LineageEntry)
        assert (after.lineage.signer, entry.release, entry.round) == (LINEAGE.signer, signed.digest, number)
        assert (entry.parent, entry.checkpoint) == (before.checkpoint.sha256, after.checkpoint.sha256)


@pytest.mark.every_engine
def test_every_release_is_logged_once_and_devices_get_the_proof(store, bundle, register, desk):
    first = store.task(register(**SECURE, population="tablets")).release
    second = sign(bundle)
    for _ in range(2):
        store.register_task(bundle, SETTINGS, second)
    third = store.task(register(**SECURE, population="watches")).release
    register(population="others")
    assert store.releases() == [first, second, third]
    given = seat(desk)[0].given
    head = verified(given.log.head, TreeHead)
    assert (given.release, given.log.head.signer, head.size, given.log.position) == (second, LINEAGE.signer, 3, 1)
    assert climb(second.leaf, 1, given.log.path).hex() == head.root


def test_a_model_that_was_rolled_back_to_is_signed_anew(store, register, desk):
    task = register(**SECURE | {"rounds": 2})
    first = seat(desk)
    run(first)
    store.pause(task)
    desk.turn()
    store.roll_back(task, 0)
    store.resume(task)
    desk.pass_time(1)
    given = seat(desk)[0].given
    entry = verified(given.lineage, LineageEntry)
    assert given.checkpoint == first[0].given.checkpoint
    assert (given.round, entry.round, entry.checkpoint) == (3, 2, given.checkpoint.sha256)
    assert entry.parent == store.rounds(task)[0].checkpoint_sha256


def test_a_rollback_under_another_lineage_key_is_refused(store, register, desk):
    task = register(**SECURE | {"rounds": 2})
    run(seat(desk))
    store.pause(task)
    desk.turn()
    store.lineage_key = lambda: OTHER
    with pytest.raises(KeysDiffer, match=f"names the lineage key {LINEAGE.signer}, and the key here is {OTHER.signer}"):
        store.roll_back(task, 0)
    assert len(store.rounds(task)) == 1
    store.lineage_key = lambda: LINEAGE
    store.roll_back(task, 0)


@pytest.mark.parametrize("fault", ["another lineage key", "an expired release"])
def test_a_task_whose_release_devices_would_refuse_is_paused(database, store, bundle, tmp_path, fault):
    signed = released(bundle, SETTINGS, RELEASE, OTHER.signer) if fault == "another lineage key" else sign(bundle)
    task = store.register_task(bundle, SETTINGS, signed).id
    late = 91 * 24 * 3600 if fault == "an expired release" else 0
    with open_coordinator_store(database, tmp_path / "blobs", clock=lambda: time.time() + late) as opened:
        Desk(opened)
    found = store.task(task)
    assert found.state is TaskState.PAUSED
    assert ("lineage key" if late == 0 else "has expired") in found.reason
