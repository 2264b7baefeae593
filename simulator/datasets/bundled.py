"""Sources of the data sets on disk, the check that their numbers are finite, and data sets that are small files.

The alphabet is that of Reddi et al., "Adaptive federated optimization", ICLR 2021, Appendix C.3: 86 characters, and
tokens for padding, an unknown character, and the start and the end of an utterance. So a model has the same size for
any part of Shakespeare.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from export.errors import reason
from fedcore.plan import IGNORED
from fedcore.validation import UNDECODABLE, decoder
from simulator.columns import int64_of
from simulator.errors import DatasetError
from simulator.population import Population

# Sources of the data sets on disk, and the check that their numbers are finite.


_TFF = "TensorFlow Federated, https://storage.googleapis.com/tff-datasets-public/, unpacked"
_ASK = "ask its publisher"
_LEAF = "LEAF, https://github.com/TalwalkarLab/leaf, as its preprocessing writes it"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set comes from.

    files: alternatives, one of which is enough, each with all its files; a name with * stands for any number of files.
    users, examples: how many it holds, where that is known and all of it is read. sha256: digests, in hexadecimal, of
    the files that the studies of this project read; yours may differ and be as good.
    """

    origin: str
    licence: str
    files: tuple[tuple[str, ...], ...]
    users: int | None = None
    examples: int | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)

    def missing(self, folder: Path) -> tuple[str, ...]:
        """The files that the folder of the data set lacks, of the alternative that lacks least; none if it is whole."""
        lacking = [tuple(name for name in names if not any(folder.glob(name))) for names in self.files]
        return min(lacking, key=len)


SOURCES = {
    "wisdm": Source(
        "WISDM Lab, activity prediction 1.1, https://www.cis.fordham.edu/wisdm/dataset.php, its transformed windows as "
        "x float32 (n, 43), y and user",
        "none formal; cite Kwapisz, Weiss, Moore 2010",
        (("wisdm_ar_v1.1.npz",),),
        users=28,
        examples=4357,
        sha256={"wisdm_ar_v1.1.npz": "28e1d5738d61cd6155a2f8ca497ef2af0c9d8fcca7db2bbc7c229604ae7434fd"},
    ),
    "omniglot": Source(
        "Omniglot, https://github.com/brendenlake/omniglot, five alphabets as x uint8 (n, 28, 28), y, writer and "
        "alphabet",
        "MIT; cite Lake, Salakhutdinov, Tenenbaum 2015",
        (("omniglot_writers_28.npz",),),
        users=100,
        examples=2720,
        sha256={"omniglot_writers_28.npz": "e7f968b4618dd181fe015c60038d004805d52bcb7550ff80357a75e8e43da2d9"},
    ),
    "shakespeare": Source(
        'Shakespeare\'s plays, of any edition, as a line of JSON for each role: {"client": "Hamlet", "lines": ["…"]}',
        "public domain",
        (("clients.jsonl",),),
        users=299,
        examples=13075,
        sha256={"clients.jsonl": "9af0b85b82dddae273c4aa5baeea6cc3cf820ad96970ff8e341f4309d589260b"},
    ),
    "mnist_10k": Source(
        "MNIST, http://yann.lecun.com/exdb/mnist/, 10,000 digits as x uint8 (n, 28, 28) and y",
        "CC BY-SA 3.0; cite LeCun, Cortes, Burges",
        (("mnist_10k.npz",),),
        examples=10_000,
        sha256={"mnist_10k.npz": "b25653270723a765fe1ea89f297fabff5eba0402db91a99ff2a13b2dc70dcd70"},
    ),
    "svmlight": Source("you, in svmlight format", "yours", (("*.svm",),)),
    "federated_emnist": Source(
        f"{_TFF}; of NIST Special Database 19",
        _ASK,
        (("emnist_all.sqlite",), ("fed_emnist_train.h5", "fed_emnist_test.h5")),
    ),
    "cifar100": Source(
        _TFF,
        _ASK,
        (("cifar100.sqlite",), ("fed_cifar100_train.h5", "fed_cifar100_test.h5")),
    ),
    "tff_shakespeare": Source(
        _TFF, "public domain", (("shakespeare.sqlite",), ("shakespeare_train.h5", "shakespeare_test.h5"))
    ),
    "stackoverflow": Source(
        _TFF,
        _ASK,
        (
            ("stackoverflow.sqlite", "stackoverflow.word_count"),
            (
                "stackoverflow_train.h5",
                "stackoverflow_held_out.h5",
                "stackoverflow_test.h5",
                "stackoverflow.word_count",
            ),
        ),
    ),
    "leaf_femnist": Source(f"{_LEAF}; of NIST Special Database 19", _ASK, (("**/*.json",),)),
    "leaf_shakespeare": Source(_LEAF, "public domain", (("**/*.json",),)),
}
"""By the name of the data set."""


def verified(users: Population, name: str) -> Population:
    """The same population.

    Raises DatasetError when a number is not finite, or a label is below 0. Of several labels some may be IGNORED.
    """
    for key, array in users.fields.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0])
            raise DatasetError(
                f"{name}: field {key!r} of client {_owner(users, row)!r} holds a number that is not finite (NaN or "
                "infinite); fill it in, or leave the example out"
            )
    labels: NDArray[Any] | None = users.labels
    if labels is None or labels.dtype.kind != "i":
        return users
    below = (labels < 0) & ((labels != IGNORED) | (labels.ndim == 1))
    if below.any():
        row, *place = (int(axis[0]) for axis in np.nonzero(below))
        raise DatasetError(
            f"{name}: a label of client {_owner(users, row)!r} is {labels[row, *place]}; classes count from 0"
        )
    return users


def _owner(users: Population, row: int) -> str:
    return users.clients[int(np.searchsorted(users.starts, row, side="right")) - 1]


# Data sets that are small files: digits, Omniglot, phone activities, and lines of Shakespeare as characters.


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
