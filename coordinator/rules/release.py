"""Release check: whether a plan may go to a task's devices. Pure. Spec: docs/spec/plan.md §7, §9."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from coordinator.errors import InvalidTask
from coordinator.rules.entities import Task
from coordinator.rules.packed_segments import report_bytes
from coordinator.rules.task_settings import FootprintBudget, TaskSettings
from fedcore.bundle import Certificate, Evidence, Footprint
from fedcore.plan import Plan
from fedcore.release import Release, ReleasedEvaluation, Signed, decode_release
from fedcore.signing import verified_release

# What each part of the budget bounds, its unit, and how a plan comes to have less of it.
_FIGURES = {
    "peak_rss_mb": ("memory at the peak", "MB", "export a smaller model or a smaller batch_size"),
    "step_cpu_ms": ("CPU time of a step", "ms", "export a smaller model or a smaller batch_size"),
    "graph_bytes": ("size of all graphs", "bytes", "export a smaller model"),
}

OTHER_LINEAGE = "another lineage key"
"""What the reason of a task begins with that is paused until the key is back which its release or its noise names."""
_EXPIRED = "the release has expired: create the task anew with a new one"


def check_release(plan: Plan, certificate: Certificate, settings: TaskSettings) -> None:
    """Hold a plan and its certificate against what the task asks of them.

    Raises InvalidTask naming the format, what was found, what is allowed, and what to do.
    """
    for fmt in settings.formats:
        if fmt not in plan.graphs:
            raise InvalidTask(
                f"the task needs graphs in format {fmt!r}, the plan has {', '.join(sorted(plan.graphs)) or 'none'}: "
                f"export it for {fmt!r} too, or name other formats for the task"
            )
    # A device may run any format of the plan, so those that the task does not name count as well.
    for fmt in sorted(plan.graphs):
        evidence = certificate.formats.get(fmt)
        if evidence is None or not evidence.parity:
            raise InvalidTask(f"the certificate has no evidence for format {fmt!r}: export the plan again")
        _check_parity(fmt, evidence)
        _check_footprint(fmt, evidence.footprint, settings.budget)
    sent = max(report_bytes(trip.report, settings).sent for trip in plan.trips)
    if settings.budget.report_bytes is not None and sent > settings.budget.report_bytes:
        raise InvalidTask(
            f"a report has {_number(sent)} bytes, the budget {_number(settings.budget.report_bytes)} bytes "
            "(report_bytes): export a smaller model or compress its reports (--compress), or raise the budget"
        )


def released_seed(plans: Sequence[Plan], settings: TaskSettings) -> int | UnsetType:
    """The seed in the release of these plans: the task's if one has codecs, else none."""
    coded = any(trip.report.has_codecs for plan in plans for trip in plan.trips)
    return settings.seed if coded else UNSET


def check_signed(task: Task, wanted: Release | None, at: float) -> None:
    """Hold the signed release of a task with secure aggregation against what the task would do. Others need none.

    wanted: the release that the task needs; lineage, counter and expiry are the signer's to choose. at: now, in seconds
    since 1970. Raises InvalidTask naming what differs, or fedcore's errors when the release is not its signer's.
    """
    signed = task.release
    if wanted is None:
        if signed is not None:
            raise InvalidTask("a release is for tasks with secagg: create this one without it")
        return
    if signed is None:
        raise InvalidTask(
            "a task with secagg needs a signed release, or devices refuse it: make a key with `muster key new`, keep "
            "it apart from the coordinator, and sign with it: --release-key, or `muster task release`, for "
            "`muster task create --release` and the dashboard"
        )
    release = verified_release(signed)
    for name in ("population", "plan", "checkpoint", "bounds", "evaluation", "seed"):
        released, value = getattr(release, name), getattr(wanted, name)
        if released != value:
            raise InvalidTask(
                f"{name} of the release is {_told(released)}, the task's is {_told(value)}: sign it again"
            )
    if release.expires_at <= at:
        raise InvalidTask(_EXPIRED)


def obstacle(signed: Signed, lineage: str, at: float) -> str:
    """Why devices would refuse a task's release, or its next checkpoint; empty when they would not.

    lineage: the public key with which the coordinator signs checkpoints. at: now, in seconds since 1970.
    """
    release = decode_release(signed.text)
    if release.lineage != lineage:
        return (
            f"{OTHER_LINEAGE}: the release names {release.lineage}, this coordinator has {lineage}: put the file with "
            "the right key back, and the task goes on, or create it anew"
        )
    return _EXPIRED if release.expires_at <= at else ""


def _told(value: object) -> object:
    if isinstance(value, ReleasedEvaluation):
        return f"by plan {value.plan[:12]}… with {value.bounds} and constants {sorted(value.constants)}"
    return "not there" if value is UNSET else value


def _check_parity(fmt: str, evidence: Evidence) -> None:
    for parity in evidence.parity:
        # Written so that NaN fails too.
        if not parity.l2 <= evidence.tolerance < math.inf:
            raise InvalidTask(
                f"graph {parity.graph!r} in format {fmt!r} is {parity.l2:.1e} from its reference, "
                f"the tolerance is {evidence.tolerance:.1e}: export the plan again"
            )


def _check_footprint(fmt: str, footprint: Footprint, budget: FootprintBudget) -> None:
    for name, (figure, unit, remedy) in _FIGURES.items():
        measured, allowed = getattr(footprint, name), getattr(budget, name)
        if allowed is not None and not measured <= allowed:
            raise InvalidTask(
                f"{figure} of format {fmt!r} is {_number(measured)} {unit}, the budget {_number(allowed)} {unit} "
                f"({name}): {remedy}, or raise the budget"
            )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
