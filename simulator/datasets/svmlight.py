"""Examples in svmlight format, one file `USER.svm` for each user: sparse features and a label of two classes.

    <label> <index>:<value> <index>:<value> … # comment

Labels are −1 or 0, and 1; indices begin at 1. Konečný et al.'s problem has this form. Examples become dense arrays, so
use at most some thousands of features.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcore.errors import why
from simulator.errors import DatasetError
from simulator.population import Array, Population

LABELS = {"-1": 0, "0": 0, "1": 1, "+1": 1}
MOST_NUMBERS = 1 << 29
"""The most numbers in all examples together, when dense: 2 GiB."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32."""
MOST_SHOWN = 80
"""The most characters of a malformed word that an error shows."""

Example = tuple[int, dict[int, float]]
"""The class, and the values by index from 1."""


def svmlight(data: Path) -> Population:
    """The users of `data/svmlight/*.svm`, by name. `x` float32 (largest index + 1,), a constant 1 last; `y` int64.

    Raises DatasetError, naming file and line, when there are no users or something is malformed.
    """
    folder = data / "svmlight"
    users = {path.stem: _read(path) for path in sorted(folder.glob("*.svm"))}
    if not users:
        raise DatasetError(f"{folder} holds no file USER.svm")
    largest = max((index for examples in users.values() for _, values in examples for index in values), default=0)
    numbers = (largest + 1) * sum(map(len, users.values()))
    if numbers > MOST_NUMBERS:
        raise DatasetError(
            f"{folder} has features up to index {largest:,}: dense, its examples are {numbers:,} numbers, more than "
            f"{MOST_NUMBERS:,}; leave rare features out"
        )
    return Population.of(list(users), [_dense(examples, largest) for examples in users.values()])


def _read(path: Path) -> list[Example]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {why(error)}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            examples.append(_example(words, f"{path}:{number}"))
    if not examples:
        raise DatasetError(f"{path} holds no examples")
    return examples


def _example(words: list[str], where: str) -> Example:
    if words[0] not in LABELS:
        raise DatasetError(f"{where}: the label is {words[0][:MOST_SHOWN]!r}, not one of {', '.join(LABELS)}")
    values = {}
    for word in words[1:]:
        name, _, text = word.partition(":")
        try:
            if "_" in word:
                raise ValueError("Python would read 1_0 as 10")
            index, value = int(name), float(text)
        except ValueError:
            raise DatasetError(f"{where}: {word[:MOST_SHOWN]!r} is not index:value, as in 7:0.5") from None
        if index < 1 or not abs(value) <= LARGEST:
            raise DatasetError(f"{where}: {word[:MOST_SHOWN]!r} needs an index from 1 and a finite value of float32")
        if index in values:
            raise DatasetError(f"{where}: index {index} is there twice")
        values[index] = value
    return LABELS[words[0]], values


def _dense(examples: list[Example], largest: int) -> dict[str, Array]:
    x = np.zeros((len(examples), largest + 1), np.float32)
    x[:, -1] = 1
    for row, (_, values) in enumerate(examples):
        x[row, np.array(list(values), np.int64) - 1] = list(values.values())
    return {"x": x, "y": np.array([label for label, _ in examples], np.int64)}
