"""Releases of plans: what they must be, and who signs them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import replace as replaced

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, structs
from msgspec.structs import replace

from coordinator.errors import InvalidTask, KeysDiffer
from coordinator.rules.private_sums import report_bytes
from coordinator.rules.release import check_release
from coordinator.rules.states import TaskState
from coordinator.store.tasks import FootprintBudget, Secagg, TaskSettings, open_coordinator_store
from fedcore.bundle import Certificate, Parity
from fedcore.codecs import Rotation
from fedcore.errors import BadSignature
from fedcore.release import LineageEntry, TreeHead, decode_release
from fedcore.signing import SigningKey, verified
from muster.creating import released
from secagg.keys import climb
from tests.coordinator.bundles import EVIDENCE, FOOTPRINT, START, make_bundle, make_plan
from tests.coordinator.conftest import LINEAGE, RELEASE, Desk
from tests.coordinator.test_secure import SECURE, run, seat


def check(evidence, budget=None, formats=("onnx",)):
    """Hold a plan with the formats of `evidence` against a task."""
    settings = TaskSettings(population="p", goal=1, rounds=1, formats=formats, budget=budget or FootprintBudget())
    check_release(make_plan(formats=tuple(evidence)), Certificate("hand", evidence), settings)


def test_plan_that_costs_exactly_what_is_allowed_passes():
    exact = FootprintBudget(peak_rss_mb=50.0, step_cpu_ms=2.0, graph_bytes=3000)
    check({"onnx": EVIDENCE, "executorch": EVIDENCE}, exact, ("executorch", "onnx"))


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (
            {"peak_rss_mb": 49.5},
            "memory at the peak of format 'executorch' is 50 MB, the budget 49.5 MB (peak_rss_mb): "
            "export a smaller model or a smaller batch_size, or raise the budget",
        ),
        ({"step_cpu_ms": 1}, "CPU time of a step of format 'executorch' is 2 ms, the budget 1 ms (step_cpu_ms): "),
        (
            {"graph_bytes": 2999},
            "size of all graphs of format 'executorch' is 3,000 bytes, the budget 2,999 bytes (graph_bytes): "
            "export a smaller model, or raise the budget",
        ),
    ],
)
def test_format_beyond_the_budget_is_named_with_figure_budget_and_remedy(budget, says):
    small = replace(EVIDENCE, footprint=replace(FOOTPRINT, peak_rss_mb=1.0, step_cpu_ms=0.1, graph_bytes=1))
    with pytest.raises(InvalidTask) as refused:
        check({"onnx": small, "executorch": EVIDENCE}, FootprintBudget(**budget))
    assert says in str(refused.value)


def test_a_report_longer_than_the_budget_is_refused_masked_ones_too():
    plan, certificate = make_plan(), Certificate("hand", {"onnx": EVIDENCE})
    for secagg in (None, Secagg()):
        settings = TaskSettings(population="p", goal=10, rounds=1, secagg=secagg)
        sent = report_bytes(plan.report, settings).sent
        check_release(plan, certificate, replaced(settings, budget=FootprintBudget(report_bytes=sent)))
        with pytest.raises(InvalidTask, match=rf"a report has {sent} bytes, the budget {sent - 1} bytes .*--compress"):
            check_release(plan, certificate, replaced(settings, budget=FootprintBudget(report_bytes=sent - 1)))


def test_format_that_the_plan_lacks_is_named_with_those_it_has():
    with pytest.raises(
        InvalidTask, match=r"format 'executorch', the plan has coreml, onnx: export it for 'executorch'"
    ):
        check({"onnx": EVIDENCE, "coreml": EVIDENCE}, formats=("onnx", "executorch"))


@pytest.mark.parametrize("found", [{}, {"onnx": replace(EVIDENCE, parity=())}])
def test_format_without_evidence_is_refused_even_when_not_named(found):
    settings = TaskSettings(population="p", goal=1, rounds=1, formats=("executorch",))
    certificate = Certificate("hand", {"executorch": EVIDENCE, **found})
    with pytest.raises(InvalidTask, match="no evidence for format 'onnx'"):
        check_release(make_plan(formats=("onnx", "executorch")), certificate, settings)


@pytest.mark.parametrize(
    ("l2", "tolerance"), [(2e-5, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5), (math.inf, math.inf), (1e-6, math.nan)]
)
def test_parity_beyond_its_tolerance_is_refused_by_graph_and_format(l2, tolerance):
    parity = (Parity("report", 3, l2, 1e-7), *EVIDENCE.parity)
    with pytest.raises(InvalidTask, match="graph 'report' in format 'onnx' is "):
        check({"onnx": replace(EVIDENCE, parity=parity, tolerance=tolerance)})


def test_measurement_that_is_no_number_is_not_within_a_budget():
    evidence = replace(EVIDENCE, footprint=replace(FOOTPRINT, peak_rss_mb=math.nan))
    check({"onnx": evidence})
    with pytest.raises(InvalidTask, match="peak_rss_mb"):
        check({"onnx": evidence}, FootprintBudget(peak_rss_mb=100))


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
        (
            sign(bundle, dataclasses.replace(SETTINGS, where="region=eu")),
            "bounds of the release .*target='region = eu'",
        ),
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
