"""Lines of 299 speaking roles of Shakespeare's plays, for the prediction of the next character."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedcore.decoding import UNDECODABLE, decoder
from simulator.datasets.text import tokens, windows
from simulator.errors import DatasetError
from simulator.population import Population


class Role(msgspec.Struct, frozen=True):
    """A line of the file: a role, and its lines in the order of the plays."""

    client: str
    lines: list[str]


_ROLE = decoder(Role)


def shakespeare(data: Path) -> Population:
    """One client per role. `x` and `y` int64 (80,): characters, and the ones that follow (simulator/datasets/text.py).

    A role's windows are in the order of time.
    """
    path = data / "shakespeare" / "clients.jsonl"
    if not path.is_file():
        raise DatasetError(f"{path} does not exist")
    try:
        roles = _ROLE.decode_lines(path.read_bytes())
    except UNDECODABLE as error:
        raise DatasetError(f"{path} is not the data set it should be: {error}") from error
    return Population.of([role.client for role in roles], [windows(tokens(role.lines)) for role in roles])
