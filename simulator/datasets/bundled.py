"""Data sets that are small files: digits, Omniglot, phone activities, and lines of Shakespeare as characters.

The alphabet is that of Reddi et al., "Adaptive federated optimization", ICLR 2021, Appendix C.3: 86 characters, and
tokens for padding, an unknown character, and the start and the end of an utterance. So a model has the same size for
any part of Shakespeare.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from export.errors import reason
from fedcore.validation import UNDECODABLE, decoder
from simulator.columns import int64_of
from simulator.errors import DatasetError
from simulator.population import Population

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
# Padding is 0, which token models exclude from loss and accuracy.
UNKNOWN, START, END = (len(CHARACTERS) + place for place in (1, 2, 3))
WINDOW = 80
_TOKENS = {character: token for token, character in enumerate(CHARACTERS, start=1)}


def characters(text: str) -> list[int]:
    """The token of each character."""
    return [_TOKENS.get(character, UNKNOWN) for character in text]


def tokens(utterances: Iterable[str]) -> NDArray[np.int64]:
    """The tokens of utterances, one after the other, each between START and END: (length,)."""
    spoken = [[START, *characters(text), END] for text in utterances]
    return np.array([token for utterance in spoken for token in utterance], np.int64)


def windows(stream: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Windows `x` (windows, WINDOW) of a stream of tokens, and `y`, the token that follows each; the last is padded.

    Every token but the first is predicted once. A stream of fewer than two tokens has no window.
    """
    count = -(-max(len(stream) - 1, 0) // WINDOW)
    padded = np.zeros(count * WINDOW + 1, np.int64)
    padded[: len(stream)] = stream[: len(padded)]
    return {"x": padded[:-1].reshape(count, WINDOW), "y": padded[1:].reshape(count, WINDOW)}


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[np.generic]]:
    """The named arrays of an npz file, or all of them, never unpickled. Raises DatasetError."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):  # which NumPy would offer to unpickle
        raise DatasetError(f"{path} is not the data set it should be: it is no npz file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names or archive.files}
    except Exception as error:  # malformed archives raise many kinds
        # NumPy's words about objects say how to unpickle them.
        words = "it holds objects, not numbers" if "allow_pickle" in str(error) else reason(error)
        raise DatasetError(f"{path} is not the data set it should be: {words}") from error
    others = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if others:
        raise DatasetError(f"{path} is not the data set it should be: {others[0]!r} is no array")
    return arrays


def digits() -> Population:
    """All digits, without users. `x` float32 (1, 8, 8) in 0 … 1, `y` int64."""
    with np.load(Path(__file__).with_name("digits.npz")) as source:
        x = (source["x"] / 16).astype(np.float32)[:, None]
        y = source["y"].astype(np.int64)
    return Population.of(["everybody"], [{"x": x, "y": y}])


def mnist_10k(data: Path) -> Population:
    """All digits, without users. `x` float32 (1, 28, 28) in 0 … 1, `y` int64."""
    arrays = read_npz(data / "mnist_10k" / "mnist_10k.npz", ["x", "y"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return Population.of(["everybody"], [{"x": x, "y": int64_of(arrays["y"], "mnist_10k: field 'y'")}])


def omniglot(data: Path) -> Population:
    """One client per writer. `x` float32 (1, 28, 28), 1 is ink; `y` int64, the character; `coarse`, its alphabet.

    A writer draws every character of one alphabet once, so held-out writers' characters are known, their hand is not.
    """
    arrays = read_npz(data / "omniglot" / "omniglot_writers_28.npz", ["x", "y", "writer", "alphabet"])
    x = arrays["x"].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    y, writers = int64_of(arrays["y"], "omniglot: field 'y'"), arrays["writer"]
    _, coarse = np.unique(arrays["alphabet"], return_inverse=True)
    names = np.unique(writers)
    shards = [{"x": x[of], "y": y[of], "coarse": coarse[of]} for of in (writers == name for name in names)]
    return Population.of([f"writer-{name:03d}" for name in names], shards)


def wisdm(data: Path) -> Population:
    """One client per user. `x` float32 (43,) standardised, `y` int64 below 6.

    Features are scaled by the mean and deviation of all users, and a missing peak becomes the mean. A deployment would
    ship such constants with the plan.
    """
    arrays = read_npz(data / "wisdm" / "wisdm_ar_v1.1.npz", ["x", "y", "user"])
    raw = arrays["x"].astype(np.float64)
    mean, deviation = np.nanmean(raw, 0), np.nanstd(raw, 0)
    deviation[deviation == 0] = 1  # XAVG is constant
    x = np.nan_to_num((raw - mean) / deviation).astype(np.float32)
    y, users = int64_of(arrays["y"], "wisdm: field 'y'"), arrays["user"]
    names = np.unique(users)
    return Population.of(
        [f"wisdm-{name}" for name in names], [{"x": x[users == name], "y": y[users == name]} for name in names]
    )


MARKS = ".?!"
SENTENCE = re.compile(rf"\s*([^{MARKS}]+)([{MARKS}])")
WORDS = 3
"""The words of a sentence, at least."""


class Role(msgspec.Struct, frozen=True):
    """A line of the file: a role, and its lines in the order of the plays."""

    client: str
    lines: list[str]


_ROLE = decoder(Role)


def shakespeare(data: Path) -> Population:
    """One client per role. `x` and `y` int64 (80,): characters, and the ones that follow.

    A role's windows are in the order of time.
    """
    roles = _roles(data)
    return Population.of([role.client for role in roles], [windows(tokens(role.lines)) for role in roles])


def shakespeare_marks(data: Path) -> Population:
    """One client per role. `text`: a sentence without the mark that ends it; `label` int64: the mark's place in MARKS.

    A dictated text has such a label without anybody's work: the mark that its user sets. Roles without a sentence of
    three words are left out. A role's sentences are in the order of time.
    """
    found = {role.client: _sentences(role.lines) for role in _roles(data)}
    said = {client: sentences for client, sentences in found.items() if sentences}
    if not said:
        raise DatasetError(f"{data / 'shakespeare'}: no role says a sentence of {WORDS} words or more")
    shards = [
        {"text": np.array([text for text, _ in each]), "label": np.array([mark for _, mark in each], np.int64)}
        for each in said.values()
    ]
    return Population.of(list(said), shards)


def _sentences(lines: list[str]) -> list[tuple[str, int]]:
    found = [SENTENCE.findall(line.replace("\n", " ")) for line in lines]
    return [(text, MARKS.index(mark)) for line in found for text, mark in line if len(text.split()) >= WORDS]


def _roles(data: Path) -> list[Role]:
    path = data / "shakespeare" / "clients.jsonl"
    if not path.is_file():
        raise DatasetError(f"{path} does not exist")
    try:
        return _ROLE.decode_lines(path.read_bytes())
    except UNDECODABLE as error:
        raise DatasetError(f"{path} is not the data set it should be: {error}") from error
