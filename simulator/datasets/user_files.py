"""Data sets in files of a layout, LEAF's JSON and svmlight; a user's own, by path or as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from export.errors import reason
from fedcore.errors import why
from fedcore.validation import UNDECODABLE, decoder, import_own
from simulator.configuration import EVERY_COLUMN, Columns
from simulator.datasets.bundled import CHARACTERS, WINDOW, characters
from simulator.datasets.tables import READERS, users_of
from simulator.errors import DatasetError
from simulator.population import Array, Population

# Data sets in the layouts of LEAF, JSON with `users`, and of svmlight, a file for each user.
#
# Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: a benchmark for federated settings", 2018. Files lie
# in the data set's folder, or in its folders `train` and `test`, as LEAF's preprocessing writes them. A user in both
# gets the examples of both, because users are held out here, not examples.


Fields = dict[str, Array]
T = TypeVar("T", "Images", "Texts")


class Images(msgspec.Struct, frozen=True):
    """A user of FEMNIST: pixels from 0 to 1, 784 of each image, and classes."""

    x: list[list[float]]
    y: list[int]


class Texts(msgspec.Struct, frozen=True):
    """A role of Shakespeare: 80 characters, and the one that follows."""

    x: list[str]
    y: list[str]


class LeafFile(msgspec.Struct, Generic[T], frozen=True):
    """A file of users of one of these kinds."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, T]


_IMAGES, _TEXTS = decoder(LeafFile[Images]), decoder(LeafFile[Texts])


def leaf_femnist(data: Path) -> Population:
    """Writers of 62 characters. `x` float32 (1, 28, 28), where 1 is paper; `y` int64."""

    def convert(user: Images) -> Fields:
        x = np.array(user.x, np.float32).reshape(len(user.y), 1, 28, 28)
        return {"x": x, "y": np.array(user.y, np.int64)}

    return _population(data / "leaf_femnist", _IMAGES.decode, convert, 62)


def leaf_shakespeare(data: Path) -> Population:
    """Roles. `x` and `y` int64 (80,): characters, and the ones that follow.

    As in LEAF, every character of a role is the last of an example, so examples overlap. LEAF predicts only the last
    character, this data set every one.
    """

    def convert(user: Texts) -> Fields:
        texts = [characters(text + following) for text, following in zip(user.x, user.y, strict=True)]
        both = np.array(texts, np.int64).reshape(len(texts), WINDOW + 1)
        return {"x": both[:, :-1].copy(), "y": both[:, 1:].copy()}

    return _population(data / "leaf_shakespeare", _TEXTS.decode, convert, len(CHARACTERS) + 4)


def _population(
    folder: Path, decode: Callable[[bytes], LeafFile[T]], convert: Callable[[T], Fields], classes: int
) -> Population:
    shards: dict[str, list[Fields]] = {}
    for path in _json_files(folder):
        try:
            leaf = decode(path.read_bytes())
            for user, count in zip(leaf.users, leaf.num_samples, strict=True):
                of_user = leaf.user_data[user]
                if not len(of_user.x) == len(of_user.y) == count:
                    raise ValueError(f"user {user!r} has {len(of_user.x)} x and {len(of_user.y)} y, not {count}")
                shards.setdefault(user, []).append(convert(of_user))
        except (*UNDECODABLE, KeyError, ValueError) as error:
            raise DatasetError(f"{path} is not in LEAF's layout: {error}") from error
    whole = [{name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")} for parts in shards.values()]
    return Population.of(list(shards), whole, classes)


def _json_files(folder: Path) -> Iterator[Path]:
    paths = sorted(path for place in (folder, folder / "train", folder / "test") for path in place.glob("*.json"))
    if not paths:
        raise DatasetError(f"{folder} holds no .json, nor do train/ and test/ in it")
    yield from paths


# Examples in svmlight format, one file `USER.svm` for each user: sparse features and a label of two classes.
#
#     <label> <index>:<value> <index>:<value> … # comment
#
# Labels are −1 or 0, and 1; indices begin at 1. Konečný et al.'s problem has this form. Examples become dense arrays,
# so use at most some thousands of features.

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
    users = {path.stem: _read_svmlight(path) for path in sorted(folder.glob("*.svm"))}
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


def _read_svmlight(path: Path) -> list[Example]:
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


# A user's own data sets by name: a path, or a function.


def is_own(name: str) -> bool:
    """Whether a name is `package.module:function`, or a path: one that exists, has a separator, or a file's ending."""
    return ":" in name or "/" in name or Path(name).exists() or Path(name).suffix in READERS


def own(name: str, columns: Columns = EVERY_COLUMN) -> Population:
    """The population that `package.module:function` returns, or the one at a path, whose tables have these columns.

    Raises DatasetError, naming what is wrong with the data.
    """
    path = Path(name)
    if path.exists() or ":" not in name:
        return users_of(path, columns)
    if columns != EVERY_COLUMN:
        raise DatasetError(f"{name} is a function, whose population has its fields: leave the columns of a table out")
    return _returned_by(name)


def _returned_by(name: str) -> Population:
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise DatasetError(
            f"cannot import data set {name!r}: {reason(error)}; it is read as package.module:function, since no file "
            "or folder is called so"
        ) from error
    try:
        population = make()
    except Exception as error:
        raise DatasetError(f"data set {name} fails with {reason(error)}") from error
    if not isinstance(population, Population):
        raise DatasetError(f"{name} returned {type(population).__name__}, expected simulator.population.Population")
    return population
