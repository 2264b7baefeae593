"""Costs of a plan for a device, from its bundle: seconds of an example, and bytes down and up."""

from __future__ import annotations

from typing import Any

from fedcore.bundle import Bundle
from fedcore.params import FLOAT_BYTES
from fedcore.quantisation import upload_bytes


def costs_of(bundle: Bundle) -> dict[str, Any]:
    """The settings of a forecast that a bundle gives, for the format whose steps take longest.

    A step's time is that of the machine which exported the plan. Graphs and frozen vectors are kept between rounds, so
    a device downloads the checkpoint alone. Raises PlanError.
    """
    plan = bundle.plan
    step_s = max(evidence.footprint.step_cpu_ms for evidence in bundle.certificate.formats.values()) / 1000
    return {
        "example_s": step_s * sum(one.loop.epochs / one.loop.batch_size for one in plan.passes),
        "bytes_down": FLOAT_BYTES * sum(vector.size for vector in plan.broadcast),
        "bytes_up": upload_bytes(plan.report),
    }
