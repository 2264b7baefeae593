"""For which of the offered tasks a device waits. What it finds here it tells nobody. Spec: docs/spec/wire.md §2."""

from __future__ import annotations

from collections.abc import Sequence

from device_runtime.conditions import Conditions, Requirements
from device_runtime.examples import ExampleSource
from fedcore.wire.messages import Offer


def willing(offers: Sequence[Offer], examples: ExampleSource, now: Conditions) -> tuple[str, ...]:
    """The tasks whose every rule holds, in the order in which they were offered. Raises ExamplesError."""
    return tuple(offer.task for offer in offers if _holds(offer, now) and _enough(offer, examples))


def _holds(offer: Offer, now: Conditions) -> bool:
    wanted = Requirements(
        charging=offer.charging,
        idle=offer.idle,
        unmetered=offer.unmetered,
        min_battery=offer.min_battery,
        min_free_storage_bytes=offer.min_free_storage_bytes,
    )
    return not wanted.unmet(now)


def _enough(offer: Offer, examples: ExampleSource) -> bool:
    if not offer.min_examples:
        return True
    age_s = offer.max_example_age_s
    held = examples.count(offer.collection) if age_s is None else examples.count_recent(offer.collection, age_s)
    return held >= offer.min_examples
