"""Federated data sets that TensorFlow Federated publishes, in its layout (simulator/datasets/tff.py).

Each is read whole, or the given number of clients is drawn. Their fields become those of the built-in models. Further
preprocessing of the papers is left out: crops and standardisation of images of CIFAR-100, and limits to the examples of
a client.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.columns import int64_of
from simulator.datasets.text import CHARACTERS, tokens, windows
from simulator.datasets.tff import Fields, Files, read_clients
from simulator.errors import DatasetError
from simulator.population import Array, Population

WORDS, SENTENCE = 10_000, 20
"""Of Stack Overflow: the size of the vocabulary, and the predicted tokens of a sentence."""


def federated_emnist(data: Path, clients: int | None = None) -> Population:
    """3,400 writers of 62 characters. `x` float32 (1, 28, 28), where 1 is paper; `y` int64."""
    files = Files(
        ("fed_emnist_train.h5", "fed_emnist_test.h5"),
        "emnist_all.sqlite",
        ("all_train", "all_test"),
        ("pixels", "label"),
    )

    def convert(raw: Fields) -> Fields:
        return {"x": raw["pixels"].reshape(-1, 1, 28, 28).astype(np.float32), "y": _labels(raw["label"])}

    return read_clients(data / "federated_emnist", files, convert, 62, clients)


def cifar100(data: Path, clients: int | None = None) -> Population:
    """600 clients of 100 images by pachinko allocation. `x` float32 (3, 32, 32) in 0 … 1; `y`, `coarse` int64."""
    files = Files(
        ("fed_cifar100_train.h5", "fed_cifar100_test.h5"),
        "cifar100.sqlite",
        ("train", "test"),
        ("image", "label", "coarse_label"),
        shared=False,
    )

    def convert(raw: Fields) -> Fields:
        x = raw["image"].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).astype(np.float32) / 255
        return {"x": np.ascontiguousarray(x), "y": _labels(raw["label"]), "coarse": _labels(raw["coarse_label"])}

    return read_clients(data / "cifar100", files, convert, 100, clients)


def tff_shakespeare(data: Path, clients: int | None = None) -> Population:
    """715 roles of all plays. `x` and `y` int64 (80,): characters, and the ones that follow, as in `shakespeare`."""
    files = Files(
        ("shakespeare_train.h5", "shakespeare_test.h5"), "shakespeare.sqlite", ("train", "test"), ("snippets",)
    )

    def convert(raw: Fields) -> Fields:
        return dict(windows(tokens(_texts(raw["snippets"]))))

    return read_clients(data / "tff_shakespeare", files, convert, len(CHARACTERS) + 4, clients)


def stackoverflow(data: Path, clients: int | None) -> Population:
    """Users of Stack Overflow, of which there are 381,235. `x` and `y` int64 (20,): words, and the ones that follow.

    An example is a sentence between a token for its start and one for its end, cut to 21 tokens. Words are numbered by
    `stackoverflow.word_count`: 0 is padding, then WORDS words, unknown, start, end.
    """
    folder = data / "stackoverflow"
    files = Files(
        ("stackoverflow_train.h5", "stackoverflow_held_out.h5", "stackoverflow_test.h5"),
        "stackoverflow.sqlite",
        ("train", "heldout", "test"),
        ("tokens",),
    )
    vocabulary = _vocabulary(folder / "stackoverflow.word_count")
    unknown, start, end = (WORDS + place for place in (1, 2, 3))

    def convert(raw: Fields) -> Fields:
        padded = np.zeros((len(raw["tokens"]), SENTENCE + 1), np.int64)
        for row, text in zip(padded, _texts(raw["tokens"]), strict=True):
            sentence = [start, *(vocabulary.get(word, unknown) for word in text.split()), end][: SENTENCE + 1]
            row[: len(sentence)] = sentence
        return {"x": padded[:, :-1].copy(), "y": padded[:, 1:].copy()}

    return read_clients(folder, files, convert, WORDS + 4, clients)


def _vocabulary(path: Path) -> dict[str, int]:
    """The most frequent words and their tokens. Every line of the file has a word and its number of users."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist; it is published beside the data set, and numbers its words")
    words = [line.split()[0] for line in path.read_text("utf-8").splitlines()[:WORDS] if line.strip()]
    return {word: token for token, word in enumerate(words, start=1)}


def _labels(array: Array) -> Array:
    return int64_of(array.reshape(-1), "a label")


def _texts(array: Array) -> list[str]:
    return [text.decode("utf-8", "replace") for text in array.reshape(-1).tolist()]
