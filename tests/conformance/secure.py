"""Scenarios under secure aggregation: a whole sum, devices that stop, and coordinators that lie."""

import threading
from dataclasses import replace

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace as replace_struct

from fedcore import checkpoint
from fedcore.masking import session_number, task_hash
from fedcore.params import VectorSpec
from fedcore.release import LineageEntry, ReleasedEvaluation
from fedcore.signing import Succession
from tests.conformance.promises import ended, promise
from tests.device_runtime import linear
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.test_bound_fields import SEED, offer_coded
from tests.device_runtime.test_noisy_rounds import offer_noisy
from tests.device_runtime.test_secure import (
    BOUNDS,
    LINEAGE,
    RELEASE,
    ROUND,
    SEGMENTS,
    SERVER,
    Aggregator,
    invitation,
    issuing,
    parties,
    private,
    public,
    releasing,
    terms,
)

TRUST = {"signers": [RELEASE.signer]}
SAYS = [1, 3, 5, 7, 9, 11]


def invite(coordinator):
    """Have a coordinator invite the device to a secure round with eight others."""
    coordinator.invite, coordinator.release = invitation(), releasing()
    coordinator.parties, coordinator.issue = parties(), issuing()
    coordinator.server, coordinator.round = Succession(public(SERVER)), ROUND
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint)).answer


def said(coordinator):
    """The numbers of the messages that the device sent."""
    return [number for number, _ in coordinator.said]


@promise("8", "a device takes part in a secure sum to its end, and sends nothing in the clear", brief=True)
def sums_securely(coordinator, device):
    invite(coordinator)
    ended(device.session(**TRUST), "reported")
    assert (said(coordinator), coordinator.reports) == (SAYS, [])


@promise("8", "a device that revealed shares joins no other attempt at the round: already-revealed")
def joins_no_second_sum(coordinator, device):
    invite(coordinator)
    ended(device.session(**TRUST), "reported")
    coordinator.attempt, coordinator.invite = 2, invitation(round=session_number(ROUND, 2))
    ended(device.session(**TRUST), "aborted", "already-revealed")
    assert said(coordinator) == SAYS


def _stopped_at(number):
    def stops(coordinator, device):
        invite(coordinator)
        reached, over = threading.Event(), threading.Event()
        aggregate, answers = coordinator.aggregate, {}

        def listen(at, message):
            if at not in answers:
                answers[at] = aggregate(at, message)
            if at == number and not reached.is_set():
                reached.set()
                over.wait(60)
            return answers[at]

        coordinator.aggregate, coordinator.hear = listen, lambda at: answers[at - 1]
        device.killed_when(reached, **TRUST)
        over.set()
        outcome = device.session(**TRUST)
        messages = dict(coordinator.said)
        assert all(messages[at] == message for at, message in coordinator.said), "it said something else again"
        if number < 7:
            ended(outcome, "aborted")
            assert said(coordinator) == [at for at in SAYS if at <= number]
        else:
            ended(outcome, "reported")
            assert sorted(set(said(coordinator))) == SAYS

    stops.__name__ = f"is_stopped_after_m{number}"
    fate = "gives the assignment up" if number < 7 else "says the same again, and goes on"
    return promise("8", f"a device that was stopped after M{number} {fate}")(stops)


for _number in SAYS:
    _stopped_at(_number)


@promise("8", "a state that was kept before M7 left goes on after an outage")
def goes_on_after_an_outage(coordinator, device):
    invite(coordinator)
    aggregate, heard = coordinator.aggregate, []

    def keep(number, message):
        heard.append(aggregate(number, message))
        return b"" if number == 7 else heard[-1]

    coordinator.aggregate, coordinator.hear = keep, lambda number: heard[-1]
    coordinator.faults["secagg"] = [None] * 4 + [refusal("unavailable", Retry_After="61")]
    ended(device.session(**TRUST), "failed", "unavailable")
    ended(device.session(**TRUST), "reported")
    assert said(coordinator) == SAYS


def _lies(name, what, **changes):
    def lie(coordinator, device):
        invite(coordinator)
        coordinator.invite = invitation(**changes)
        outcome = device.session(**TRUST)
        ended(outcome, "aborted", "secagg-refused")
        assert (said(coordinator), outcome.get("steps", 0)) == ([], 0)

    lie.__name__ = name
    return promise(
        "8", f"{what} is refused before it trains: secagg-refused", brief=name == "refuses_another_servers_key"
    )(lie)


_lies("refuses_another_servers_key", "an invitation that another key signed", signer=private(9))
_lies("refuses_another_mode", "an invitation of an unknown mode", mode=0)
_lies("refuses_a_small_sum", "a sum over fewer devices than is safe", min_sum=7)
_lies("refuses_another_task", "an invitation for another task", task=bytes(32))
_lies("refuses_another_model", "an invitation for another model", model_hash=bytes(32))
_lies("refuses_another_layout", "an invitation for another layout", layout_hash=bytes(32))
_lies(
    "refuses_other_segments", "an invitation without clipping", segments=(replace(SEGMENTS[0], norm=0.0), *SEGMENTS[1:])
)
_lies("refuses_another_weight", "an invitation with another greatest weight", w_max=1000)
_lies("refuses_another_round", "an invitation to another round", round=session_number(ROUND + 1, 1))
_lies("refuses_another_attempt", "an invitation to another attempt", round=session_number(ROUND, 2))
_lies("refuses_a_small_roster", "a roster too small to hide in", n_max=7)
_lies("refuses_fields_without_room", "a sum that does not fit its fields", n_max=1 << 20)


@promise("8", "a device whose codecs have the seed of release and invitation takes part in a secure sum", brief=True)
def sums_coded_reports(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    ended(device.session(**TRUST), "reported")
    assert (said(coordinator), coordinator.reports) == (SAYS, [])


@promise("8", "a seed of codecs that is not the invitation's is refused before it trains: secagg-refused", brief=True)
def refuses_another_seed(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    release = releasing(seed=SEED + 1)(coordinator.plan, coordinator.checkpoint)
    coordinator.lies = {"seed": SEED + 1, "release": release}
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise("8", "a seed of codecs that is not the release's is refused before it trains: secagg-refused")
def refuses_an_unreleased_seed(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    for released in ({}, {"seed": SEED + 1}):
        coordinator.release = releasing(**released)
        ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise(
    "8", "noise is counted on from no more devices than are honest in a roster as large as invited: secagg-refused"
)
def refuses_a_roster_too_large_for_its_noise(coordinator, device):
    invite(coordinator)
    changes = offer_noisy(coordinator)
    coordinator.invite = invitation(**changes, n_max=25)
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []
    coordinator.attempt, again = 2, changes | {"round": session_number(ROUND, 2)}
    coordinator.invite = invitation(**again)
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint, **again)).answer
    ended(device.session(**TRUST), "reported")


@promise("8", "a release that demands a larger sum than the invitation is held to: secagg-refused")
def refuses_a_smaller_sum_than_released(coordinator, device):
    invite(coordinator)
    coordinator.release = releasing(bounds=replace_struct(BOUNDS, min_sum=9))
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise("8", "a target that is not the release's is refused before it trains: secagg-refused")
def refuses_another_target(coordinator, device):
    invite(coordinator)
    for released, target in ((UNSET, "region = eu"), ("region = eu", UNSET), ("region = eu", "region = us")):
        coordinator.release = releasing(bounds=replace_struct(BOUNDS, target=released))
        coordinator.lies = {"target": target}
        outcome = device.session(**TRUST)
        ended(outcome, "aborted", "secagg-refused")
        assert (said(coordinator), outcome.get("steps", 0)) == ([], 0)
    coordinator.lies = {"target": "region = eu"}
    ended(device.session(**TRUST), "reported")


@promise("8", "a coordinator that says a message again, in the place of the next one, gets no answer")
def answers_nothing_twice(coordinator, device):
    invite(coordinator)
    for attempt, number in enumerate(SAYS[:-1], start=1):
        coordinator.said.clear()
        coordinator.attempt = attempt
        coordinator.invite = invitation(round=session_number(ROUND, attempt))
        again = terms(coordinator.plan, coordinator.checkpoint, round=session_number(ROUND, attempt))
        coordinator.aggregate = Aggregator(again, repeats=number).answer
        ended(device.session(**TRUST), "aborted", "secagg-refused")
        assert said(coordinator) == [at for at in SAYS if at <= number]


@promise("8", "a roster that is damaged, or cut, is refused")
def refuses_a_damaged_roster(coordinator, device):
    for attempt, damage in enumerate(
        (lambda m: m[:-1], lambda m: m[:50] + bytes(32) + m[82:], lambda m: m[:1]), start=1
    ):
        invite(coordinator)
        coordinator.said.clear()
        coordinator.attempt = attempt
        coordinator.invite = invitation(round=session_number(ROUND, attempt))
        answer = Aggregator(
            terms(coordinator.plan, coordinator.checkpoint, round=session_number(ROUND, attempt))
        ).answer
        coordinator.aggregate = lambda number, message, answer=answer, damage=damage: damage(answer(number, message))
        ended(device.session(**TRUST), "aborted", "secagg-refused")
        assert said(coordinator) == [1]


def _unreleased(name, what, release):
    def lacks(coordinator, device):
        invite(coordinator)
        coordinator.release = release
        ended(device.session(**TRUST), "aborted", "plan-refused")
        assert said(coordinator) == []

    lacks.__name__ = name
    return promise("4", f"a secure round {what} is plan-refused")(lacks)


_unreleased("refuses_no_release", "without a release", lambda plan, checkpoint: None)
_unreleased("refuses_a_strangers_release", "that a stranger released", releasing(signer=LINEAGE))
_unreleased("refuses_another_population", "released for another population", releasing(population="tablets"))
_unreleased("refuses_an_expired_release", "whose release expired", releasing(expires_at=1))
_unreleased("refuses_another_checkpoint", "from a model without an origin", releasing(checkpoint="ab" * 32))


def evaluate(coordinator, params=linear.PARAMS, number=5, signer=LINEAGE, entry=None, **changes):
    """Have a coordinator invite the device to evaluate the model of a round, under the release of its training.

    params: the model of that round. entry, changes: of the entry of the lineage, and of the release.
    """
    invite(coordinator)
    plan, evaluation = coordinator.plan, changes.pop("evaluation", {})
    if evaluation is not UNSET:
        evaluation = ReleasedEvaluation(**{"plan": plan.sha256, "bounds": BOUNDS, "constants": {}} | evaluation)
    fields = {"plan": "ab" * 32, "checkpoint": "cd" * 32, "evaluation": evaluation} | changes
    coordinator.release = releasing(fields.pop("signer_of_release", RELEASE), **fields)
    released = coordinator.release(plan, coordinator.checkpoint)
    made = {"release": released.digest, "round": number, "parent": f"{number:064x}", "checkpoint": f"{number + 1:064x}"}
    made |= {"params": checkpoint.digest(params)} | (entry or {})
    coordinator.lineage = signer.sign_statement(LineageEntry(**made))


def evaluated_again(coordinator, task, **changes):
    """Invite the device to evaluate in a task of another name."""
    coordinator.said.clear()
    coordinator.lies = {"assignment": f"of-{task}", "task": task}
    coordinator.invite = invitation(task=task_hash(task))
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint, task=task_hash(task))).answer


@promise("4", "a device evaluates a model that the lineage of a release names, once for each round", brief=True)
def evaluates_models_of_the_lineage(coordinator, device):
    evaluate(coordinator)
    ended(device.session(**TRUST), "reported")
    assert (said(coordinator), coordinator.reports) == (SAYS, [])
    for task, number, expected in (
        ("again", 5, ("aborted", "already-revealed")),
        ("older", 2, ("reported",)),
        ("newer", 6, ("reported",)),
    ):
        evaluate(coordinator, number=number)
        evaluated_again(coordinator, task)
        ended(device.session(**TRUST), *expected)
        assert said(coordinator) == (SAYS if expected == ("reported",) else [])


def _unproven(name, what, *, fetched=False, brief=False, **changes):
    def lies(coordinator, device):
        evaluate(coordinator, **changes)
        ended(device.session(**TRUST), "aborted", "plan-refused")
        assert said(coordinator) == []
        assert ("blob" in coordinator.calls) == fetched

    lies.__name__ = name
    return promise("4", f"an evaluation {what} is plan-refused", brief=brief)(lies)


_unproven("refuses_no_evaluation", "under a release that names none", brief=True, evaluation=UNSET)
_unproven("refuses_another_evaluation", "by a plan that the release does not name", evaluation={"plan": "ef" * 32})
_unproven("refuses_an_expired_evaluation", "whose release expired", expires_at=1)
_unproven("refuses_a_strangers_evaluation", "that a stranger released", signer_of_release=LINEAGE)
_unproven("refuses_another_lineage", "whose entry another key signed", signer=RELEASE)
_unproven("refuses_an_entry_of_another_release", "whose entry is of another release", entry={"release": "ab" * 32})
_unproven("refuses_an_entry_without_a_model", "whose entry names no model", entry={"params": UNSET})
_unproven("refuses_a_start_from_elsewhere", "whose first round began elsewhere", number=1)
_unproven(
    "refuses_another_model_to_evaluate", "of a model that the entry does not name", fetched=True, brief=True,
    params=linear.PARAMS + 1,
)  # fmt: skip


@promise("4", "an evaluation with other constants than are released is plan-refused", brief=True)
def refuses_other_constants(coordinator, device):
    edges = np.array([0.0, 1.0], np.float32)
    plan = replace_struct(linear.plan(), broadcast=(*linear.plan().broadcast, VectorSpec("edges", 2)))
    for released in ({}, {"edges": checkpoint.digest(edges + 1)}):
        coordinator.offer(plan, linear.graphs(), {"params": linear.PARAMS, "edges": edges})
        evaluate(coordinator, evaluation={"constants": released})
        outcome = device.session(**TRUST)
        ended(outcome, "aborted", "plan-refused")
        assert "edges of the checkpoint is not the released one" in outcome["detail"].replace("'", "")
    assert said(coordinator) == []


@promise("4", "an evaluation without an entry, or in a second round, is plan-refused")
def refuses_an_evaluation_without_its_entry(coordinator, device):
    evaluate(coordinator)
    coordinator.lineage = None
    ended(device.session(**TRUST), "aborted", "plan-refused")
    evaluate(coordinator)
    coordinator.lies = {"round": 2}
    ended(device.session(**TRUST), "aborted", "plan-refused")
    assert said(coordinator) == []


@promise("4", "an expiry that was put off after the release was signed is plan-refused")
def refuses_a_later_expiry(coordinator, device):
    evaluate(coordinator)
    released = coordinator.release(coordinator.plan, coordinator.checkpoint)
    altered = replace_struct(released, text=released.text.replace(str(2**33), str(2**34)))
    assert altered != released
    coordinator.release = lambda plan, checkpoint: altered
    ended(device.session(**TRUST), "aborted", "plan-refused")
    assert said(coordinator) == []


@promise("4", "two entries of a round, or one that another does not descend from, are plan-refused")
def refuses_two_models_of_a_round(coordinator, device):
    evaluate(coordinator)
    ended(device.session(**TRUST), "reported")
    for number, entry in (
        (5, {"checkpoint": "ef" * 32}), (5, {"params": "ef" * 32}), (4, {"checkpoint": "ef" * 32}),
        (6, {"parent": "ef" * 32}),
    ):  # fmt: skip
        evaluate(coordinator, number=number, entry=entry)
        evaluated_again(coordinator, f"of-{number}")
        ended(device.session(**TRUST), "aborted", "plan-refused")
        assert said(coordinator) == []


@promise("4", "an evaluation whose sum is made otherwise than released is secagg-refused")
def refuses_other_bounds_of_an_evaluation(coordinator, device):
    evaluate(coordinator, evaluation={"bounds": replace_struct(BOUNDS, clip_norm=2.0)})
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []
