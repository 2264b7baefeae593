"""Assignments for the devices that a round drew."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.driver.memory.selector import Selector
from coordinator.lineage import log_proof
from coordinator.rules.assignment_ids import assignment_id
from coordinator.rules.entities import AssignedDevice
from coordinator.rules.silence import lost_after_s
from coordinator.secure.round import SecureRoundFactory
from coordinator.secure.terms import SecureRoundSettings, invitation
from coordinator.store.records.records import Records
from fedcore.signing import SigningKey
from fedcore.wire.messages import Assignment


def assigned_devices(selector: Selector, round_: OpenRound, devices: Sequence[str], first: int) -> list[AssignedDevice]:
    """The assignments of devices that a round drew, from the slot `first` on, under ids that any replica can check."""
    key, replica = selector.secure.keys.of_assignments, selector.sessions.replica
    return [
        AssignedDevice(assignment_id(key, replica, round_.id, slot, device), slot, device)
        for slot, device in enumerate(devices, first)
    ]


def common_part(records: Records, round_: OpenRound, key: SigningKey, now: float) -> Assignment:
    """The part that is the same in all assignments that a round gives now; without the invitation of a secure round.

    key: the lineage key, which signs the head of the log of releases.
    """
    task, policy = round_.task.record, round_.value.policy
    return Assignment(
        assignment="",
        task=task.id,
        round=round_.number,
        attempt=round_.attempt,
        slot=0,
        seed=task.settings.seed,
        plan=records.blob(task.plan_sha256, public=True),
        checkpoint=records.blob(round_.base.checkpoint_sha256, public=True),
        report_within_s=round_.report_within_s(now),
        plan_signature=task.plan_signature,
        release=task.release,
        lineage=round_.base.lineage,
        log=None if task.release is None else log_proof(key, records.releases.log(), task.release),
        minimum=policy.minimum,
        over_selected=round_.value.attainable > policy.goal,
        lost_after_s=lost_after_s(policy.cohort),
        purpose=task.settings.purpose or msgspec.UNSET,
    )


def invite(
    factory: SecureRoundFactory, round_: OpenRound, common: Assignment, assignments: Sequence[AssignedDevice], at: float
) -> OpenRound:
    """The round with the secure aggregation of its first devices. at: now, in seconds since 1970."""
    task, policy, slots = round_.task, round_.value.policy, {device.id: device.slot for device in assignments}
    message = invitation(task.settings, policy, round_.plan, common, deadline=int(at + common.report_within_s))
    settings = SecureRoundSettings.of(task.settings.secagg, policy, round_.value.deadline)
    return replace(round_, secure=factory.open(message, slots, settings))


def for_device(common: Assignment, device: AssignedDevice) -> Assignment:
    """The assignment of one device."""
    return replace(common, assignment=device.id, slot=device.slot)
