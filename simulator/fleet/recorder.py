"""Records of what emulated devices quantised, sent and revealed in secure rounds, to check sums.

The device runtime must not record any of this, so a recorder is put into a device's process from outside.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from secagg import packing
from secagg.encoding import MessageType
from secagg.keys import SIGNATURE_BYTES
from secagg.masking import LITTLE, Words
from secagg.messages import Unmask
from secagg.packing import PackedSegment

SESSION = slice(2, 34)
"""The bytes of a message that name its session."""
ENCODE = packing.encode


class Recorder:
    """Writes into a folder, one set of files for each assignment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # A session that continues a killed one should send the same again: both are kept.
        self._session = f"{os.getpid()}-{time.time_ns()}"
        self._quantised: dict[str, NDArray[np.generic]] = {}

    def record_quantised(self) -> None:
        """Record from now on what this process quantises, before masking."""

        def encode(
            segments: Sequence[PackedSegment],
            vector_D: NDArray[np.float32],
            weight: int,
            w_max: int,
            new_key: Callable[[], bytes] = packing.fresh_key,
        ) -> Words:
            words = ENCODE(segments, vector_D, weight, w_max, new_key)
            terms = json.dumps([[asdict(segment) for segment in segments], w_max])
            self._quantised = {"words": words.copy(), "terms": np.array(terms)}
            return words

        packing.encode = encode

    def record_message(self, assignment: str, number: MessageType, message: bytes) -> None:
        """Record a message that is about to be sent, if it holds a masked report or shares."""
        if number == MessageType.MASKED and self._quantised:
            np.savez(self._folder / f"{assignment}.quantised.npz", **self._quantised)  # type: ignore[arg-type]
        if number in {MessageType.MASKED, MessageType.UNMASK}:
            (self._folder / f"{assignment}.M{number}.{self._session}").write_bytes(message)

    def record_death(self, assignment: str, number: MessageType, *, sent: bool) -> None:
        """Record that the process is killed at a message."""
        (self._folder / f"{assignment}.died.{self._session}").write_text(f"{'after' if sent else 'before'} M{number}")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A report before masking: words (W,), and the segments and largest weight that decode them."""

    words: Words
    segments: tuple[PackedSegment, ...]
    w_max: int


class Recording:
    """All records below a folder, to be read once the recording processes have ended."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, dict[Path, str]] = defaultdict(dict)
        for path in sorted(folder.rglob("recorded/*")):
            assignment, what, _ = path.name.rsplit(".", 2)
            self._files[what][path] = assignment
        self._quantised = {assignment: path for path, assignment in self._files["quantised"].items()}

    def quantised(self, assignment: str) -> Quantised:
        """The report that an assignment's device quantised last."""
        with np.load(self._quantised[assignment]) as file:
            segments, w_max = json.loads(file["terms"].item())
            return Quantised(file["words"], tuple(PackedSegment(**segment) for segment in segments), w_max)

    def uploads(self) -> dict[str, Words]:
        """The masked words of every upload that was sent, by assignment."""
        return {
            assignment: np.frombuffer(path.read_bytes()[SESSION.stop : -SIGNATURE_BYTES], LITTLE)
            for path, assignment in self._files[f"M{MessageType.MASKED}"].items()
        }

    def shares(self) -> Iterator[tuple[str, bytes, dict[int, tuple[int, int]]]]:
        """The assignment, the session and the shares (kind and share, by position of their owner) in every M11 sent."""
        for path, assignment in self._files[f"M{MessageType.UNMASK}"].items():
            message = path.read_bytes()
            session = message[SESSION]
            yield assignment, session, Unmask.decode(message, session).shares

    def deaths(self) -> dict[str, list[str]]:
        """The messages at which processes were killed, by assignment."""
        deaths = defaultdict(list)
        for path, assignment in self._files["died"].items():
            deaths[assignment].append(path.read_text())
        return dict(deaths)
