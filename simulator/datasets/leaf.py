"""Data sets in the layout of LEAF: JSON with `users`, `num_samples` and `user_data`.

Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: a benchmark for federated settings", 2018. Files lie
in the data set's folder, or in its folders `train` and `test`, as LEAF's preprocessing writes them. A user in both gets
the examples of both, because users are held out here, not examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from fedcore.decoding import UNDECODABLE, decoder
from simulator.datasets.text import CHARACTERS, WINDOW, characters
from simulator.errors import DatasetError
from simulator.population import Array, Population

Fields = dict[str, Array]


class Images(msgspec.Struct, frozen=True):
    """A user of FEMNIST: pixels from 0 to 1, 784 of each image, and classes."""

    x: list[list[float]]
    y: list[int]


class Texts(msgspec.Struct, frozen=True):
    """A role of Shakespeare: 80 characters, and the one that follows."""

    x: list[str]
    y: list[str]


class ImageFile(msgspec.Struct, frozen=True):
    """A file of FEMNIST."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, Images]


class TextFile(msgspec.Struct, frozen=True):
    """A file of Shakespeare."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, Texts]


_IMAGES, _TEXTS = decoder(ImageFile), decoder(TextFile)


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
    folder: Path, decode: Callable[[bytes], ImageFile | TextFile], convert: Callable[..., Fields], classes: int
) -> Population:
    shards: dict[str, list[Fields]] = {}
    for path in _files(folder):
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


def _files(folder: Path) -> Iterator[Path]:
    paths = sorted(path for place in (folder, folder / "train", folder / "test") for path in place.glob("*.json"))
    if not paths:
        raise DatasetError(f"{folder} holds no .json, nor do train/ and test/ in it")
    yield from paths
