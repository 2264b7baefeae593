"""A disk that fails when a test says so."""

from __future__ import annotations

from contextlib import contextmanager


class Disk:
    """Stands before a database: transactions fail, or are written although whoever wrote them hears of a failure.

    `faults` befall the next ones, one each: "fails", "is lost", or "" for none.
    """

    def __init__(self, database, clock):
        self._writing, self._clock = database.writing, clock
        self.faults, self.last_at = [], 0.0
        database.writing = self.writing

    @contextmanager
    def writing(self, *args, **kwargs):
        fault = self.faults.pop(0) if self.faults else ""
        self.last_at = self._clock() if fault else self.last_at
        with self._writing(*args, **kwargs) as records:
            yield records
            if fault == "fails":
                raise OSError("the disk is full")
        if fault == "is lost":
            raise OSError("the connection broke while the transaction was committed")
