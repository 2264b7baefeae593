"""Lines of 299 speaking roles of Shakespeare's plays: next characters, and the marks that end sentences."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from fedcore.decoding import UNDECODABLE, decoder
from simulator.datasets.text import tokens, windows
from simulator.errors import DatasetError
from simulator.population import Population

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
    """One client per role. `x` and `y` int64 (80,): characters, and the ones that follow (simulator/datasets/text.py).

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
