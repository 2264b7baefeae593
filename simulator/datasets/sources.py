"""Sources of the data sets on disk, and the check that their numbers are finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcore.plan import IGNORED
from simulator.errors import DatasetError
from simulator.population import Population

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
