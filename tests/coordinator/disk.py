"""A disk that fails when a test says so."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial


class Disk:
    """Stands before a database: transactions fail, or are written although whoever wrote them hears of a failure.

    `faults` befall the next ones, one each: "fails", "is lost", or "" for none.
    """

    def __init__(self, database, clock):
        self._clock = clock
        self.faults, self.last_at = [], 0.0
        database.writing = partial(self._begin, database.writing)
        database.writing_at_once = partial(self._begin, database.writing_at_once)

    @contextmanager
    def _begin(self, writing):
        fault = self.faults.pop(0) if self.faults else ""
        self.last_at = self._clock() if fault else self.last_at
        with writing() as records:
            yield records
            if fault == "fails":
                raise OSError("the disk is full")
        if fault == "is lost":
            raise OSError("the connection broke while the transaction was committed")
