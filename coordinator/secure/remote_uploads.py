"""Masked reports of a group that other replicas add: which of them may, which of them did, and whose sums are here.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator.errors import Unavailable


class RemoteUploads:
    """The claims of one session, by slot. A report is in one sum only, since one replica at a time has the claim.

    dropped: the slots of reports that a replica was taking when its sum came, or was given up.
    """

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, str]] = {}
        """Of reports that are not added yet: the replica that may add it, and the digest."""
        self._added: dict[str, dict[int, bytes]] = {}
        """By replica, the signatures of the reports that it has added."""
        self._handed, self.dropped = set[str](), set[int]()

    def claim(self, slot: int, replica: str, sha256: str) -> None:
        """Let a replica add the report of a slot. Raises Unavailable while another may, or after its hand-over."""
        self.check_free(slot, replica)
        if replica in self._handed:
            raise Unavailable("this replica has handed its sum over; send the message again")
        self._claims[slot] = replica, sha256

    def check_free(self, slot: int, replica: str = "") -> None:
        """Raise Unavailable while another replica than this one may add the report of a slot."""
        if slot in self._claims and self._claims[slot][0] != replica:
            raise Unavailable("another replica is taking this message; send it again")

    def claimed(self, slot: int) -> bool:
        """Whether a replica may add the report of a slot, and has not told that it did."""
        return slot in self._claims

    def added(self, replica: str, signatures: Mapping[int, bytes]) -> dict[int, str]:
        """A replica has added these reports: the digests of those that are new, by slot."""
        new = {
            slot: sha256 for slot, (owner, sha256) in self._claims.items() if owner == replica and slot in signatures
        }
        for slot in new:
            del self._claims[slot]
            self._added.setdefault(replica, {})[slot] = signatures[slot]
        return new

    def release(self, replica: str, checking: Collection[int] = ()) -> None:
        """Drop the claims of a replica that came to nothing: of reports that it is not `checking`."""
        self._claims = {slot: claim for slot, claim in self._claims.items() if claim[0] != replica or slot in checking}

    def in_sum_of(self, replica: str) -> Mapping[int, bytes]:
        """The signatures of the reports that a replica has added, by slot."""
        return self._added.get(replica, {})

    def hand_over(self, replica: str) -> None:
        """The sum of a replica is here. What it was checking will be in none."""
        self._handed.add(replica)
        self.dropped.update(slot for slot, (owner, _) in self._claims.items() if owner == replica)
        self.release(replica)

    def handed(self, replica: str) -> bool:
        """Whether the sum of a replica is here, or not waited for any more."""
        return replica in self._handed

    @property
    def owing(self) -> set[str]:
        """The replicas that may add reports, or have, and whose sums are not here."""
        return ({replica for replica, _ in self._claims.values()} | self._added.keys()) - self._handed

    def give_up(self, replica: str) -> set[int]:
        """Wait for the sum of a replica no more: the slots of reports that are lost with it."""
        lost = set(self._added.pop(replica, ()))
        self.hand_over(replica)
        return lost
