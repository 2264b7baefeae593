"""Costs of a plan for a device, from its bundle: seconds of an example, and bytes down and up."""

from __future__ import annotations

from typing import Any

from fedcore.bundle import Bundle
from fedcore.params import FLOAT_BYTES
from fedcore.quantisation import upload_bytes


def costs_of(bundle: Bundle) -> dict[str, Any]:
    """The settings of a forecast that a bundle gives, for the format whose steps take longest.

    A step's time is that of the machine which exported the plan. Graphs and frozen vectors are kept between rounds, so
    a device downloads the checkpoint alone. Of a plan of two trips each setting is that of the dearer one. Raises
    PlanError.
    """
    trips = bundle.plan.trips
    step_s = max(evidence.footprint.step_cpu_ms for evidence in bundle.certificate.formats.values()) / 1000
    return {
        "example_s": step_s * max(sum(one.loop.epochs / one.loop.batch_size for one in trip.passes) for trip in trips),
        "bytes_down": FLOAT_BYTES * max(sum(vector.size for vector in trip.broadcast) for trip in trips),
        "bytes_up": max(upload_bytes(trip.report) for trip in trips),
    }
