"""The record of a running session: its outcome so far, and its entry in the owner's journal."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from device_runtime.errors import DeviceError, NotAllowedNow, StateError
from device_runtime.outcome import Outcome, SessionFacts, failed
from device_runtime.protocol.transport import Transport
from device_runtime.state.journal import RUNNING, Entry, Journal
from device_runtime.state.spending import Spending, Spent


class SessionRecord:
    """Outcome, journal entry and spending of one session. The entry is written when the record is made."""

    def __init__(
        self, journal: Journal, spending: Spending, transport: Transport, coordinator: str, population: str
    ) -> None:
        self.outcome = Outcome()
        self._journal = journal
        self._spending = spending
        self._counted = Spent()
        self._transport = transport
        self._public: str | None = None
        self._number, self._entry = journal.open(coordinator, population)

    def note(self, **facts: Any) -> None:
        """Add to the outcome."""
        self.outcome = replace(self.outcome, **facts)

    def notice(self, kind: str, words: str) -> None:
        """Tell the owner about something else than the session's end, also in the journal. Raises StateError."""
        self.note(notices=(*self.outcome.notices, words))
        self._journal.remark(kind, words)

    def know(self, **facts: Any) -> None:
        """Add to the journal's entry. The next write stores it."""
        self._entry = replace(self._entry, **facts)

    def write(self, **facts: Any) -> None:
        """Add to the journal's entry, and store it. Raises StateError."""
        self.know(**facts)
        entry = replace(self._merged(), outcome=RUNNING)
        self._count(entry)
        self._journal.write(self._number, entry)

    def fail(self, error: DeviceError) -> None:
        """The session ends with this error."""
        self.outcome = failed(self.outcome, error)
        # The private part of an error may quote a path or a value, and the journal may be shown to others.
        self._public = str(error) if isinstance(error, NotAllowedNow) else error.detail

    def close(self, **facts: Any) -> Outcome:
        """Write the entry, with `facts` added, for the last time. A failure becomes a notice."""
        entry = replace(self._merged(), **facts)
        self.note(bytes_up=entry.bytes_up, bytes_down=entry.bytes_down)
        try:
            self._count(entry)
            self._journal.close(self._number, entry)
        except StateError as error:
            self.note(notices=(*self.outcome.notices, f"the journal lacks the end of this session: {error}"))
        return self.outcome

    def _count(self, entry: Entry) -> None:
        """Add the use since the last call to the day's spending."""
        before, now = self._counted, Spent(entry.compute_s, entry.bytes_up + entry.bytes_down)
        if now != before:
            self._spending.add(Spent(now.seconds - before.seconds, now.bytes - before.bytes))
            self._counted = now

    def _merged(self) -> Entry:
        facts = {name: getattr(self.outcome, name) for name in SessionFacts.__struct_fields__}
        if self._public is not None:
            facts["detail"] = self._public
        facts |= {"bytes_up": self._transport.bytes_up, "bytes_down": self._transport.bytes_down}
        return replace(self._entry, **facts)
