"""Labels of a device: what its host app says of it, such as `region` = `eu`. Spec: docs/spec/wire.md §2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated

import msgspec

MOST_LABELS = 16
LONGEST_VALUE = 64
"""The longest value of a label, in bytes of UTF-8."""
LONGEST_TARGET = 1000
"""The longest text of a target, the expression on labels that says which devices a task wants, in characters."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_UNSEEN = re.compile(r"[\0-\x1f\x7f-\x9f\ud800-\udfff]")
_SCHEMA = {
    "maxProperties": MOST_LABELS,
    "propertyNames": {"pattern": f"^{_NAME.pattern}$"},
    "additionalProperties": {"type": "string", "minLength": 1, "maxLength": LONGEST_VALUE},
}
Labels = Annotated[dict[str, str], msgspec.Meta(extra_json_schema=_SCHEMA)]
"""Values by name. `check_labels` says what they may be: the annotation only documents it."""
Target = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_TARGET)]


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise ValueError, which names the label and the limit, unless a device may have these labels."""
    if len(labels) > MOST_LABELS:
        raise ValueError(f"{len(labels)} labels are too many: a device has at most {MOST_LABELS}")
    for name, value in labels.items():
        _check_label(name, value if isinstance(value, str) else "\0")


@lru_cache(maxsize=4096)  # at every check-in the same few
def _check_label(name: str, value: str) -> None:
    check_label_name(name)
    if _UNSEEN.search(value):
        raise ValueError(f"label {name}: its value must be text without control characters")
    if not 1 <= (size := len(value.encode())) <= LONGEST_VALUE:
        raise ValueError(f"label {name}: its value must have 1 to {LONGEST_VALUE} bytes, not {size}")


def check_label_name(name: str) -> None:
    """Raise ValueError unless labels may be called so."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(f"label {name!r}: a name has 1 to 32 of a-z, 0-9 and _, and begins with a letter")


def labels_of(texts: Iterable[str]) -> dict[str, str]:
    """Labels from texts such as `region=eu`. Raises ValueError as `check_labels`, and for one without `=` or twice."""
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"label {text!r} is not like region=eu")
        if name in labels:
            raise ValueError(f"label {name} is given twice")
        labels[name] = value
    check_labels(labels)
    return labels
