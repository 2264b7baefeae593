"""The choice among offered tasks. The device makes it, and does not reveal its reasons. Spec: docs/spec/wire.md §2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from device_runtime.examples import ExampleSource
from fedcore.conditions import Conditions
from fedcore.wire.messages import Offer


def acceptable_tasks(
    offers: Sequence[Offer], examples: ExampleSource, now: Conditions, shows: Callable[[str], bool]
) -> tuple[str, ...]:
    """The tasks whose rules all hold, in the order of the offers. Raises ExamplesError.

    shows: whether the owner lets a coordinator know of a collection. Any other is treated as missing.
    """
    return tuple(offer.task for offer in offers if not offer.unmet(now) and _enough(offer, examples, shows))


def _enough(offer: Offer, examples: ExampleSource, shows: Callable[[str], bool]) -> bool:
    if not shows(offer.collection):
        return not (offer.min_examples or offer.min_recent_examples)
    count, age_s = examples.count(offer.collection), offer.max_example_age_s
    recent = count if age_s is None else examples.count_recent(offer.collection, age_s)
    return count >= offer.min_examples and recent >= offer.min_recent_examples
