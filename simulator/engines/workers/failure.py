"""Failures of other processes that train: what went wrong there, in words, to be raised here."""

from __future__ import annotations

import msgspec

from export.errors import ExportError, reason
from simulator.errors import EngineError


class Failure(msgspec.Struct, frozen=True):
    """What went wrong in another process, in words. of_model: with the user's model, as ExportError says."""

    words: str
    of_model: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of whatever was raised; its kind is in the words where neither the engine nor the exporter raised it."""
        ours = isinstance(error, (EngineError, ExportError))
        return cls(str(error) if ours else reason(error), isinstance(error, ExportError))

    def raised(self) -> EngineError | ExportError:
        """The error to raise in this process."""
        return ExportError(self.words) if self.of_model else EngineError(self.words)
