"""A device's policy for secure aggregation: its conditions for taking part. Spec: docs/spec/secagg.md §6."""

from __future__ import annotations

from dataclasses import dataclass

from secagg import keys, packing, parameters
from secagg.errors import ModelMismatch, PolicyViolation, ReplayedRound
from secagg.invite import ACTIVE, HONEST, Invite
from secagg.parameters import GraphParameters


@dataclass(frozen=True, slots=True)
class AggregationPolicy:
    """Constants of the device, which no server can change.

    `server_key` and `authority` are Ed25519 public keys of 32 bytes: the server's, and the enrolment authority's.
    Without an authority the device cannot tell its peers from devices that the server made up. `min_sum` is the least
    number of devices that a sum may have. `allow_honest` admits the mode without signatures, which is for simulations.
    """

    server_key: bytes
    authority: bytes | None
    min_sum: int
    allow_honest: bool = False

    def accept(self, message: bytes, hashes: tuple[bytes, bytes], last_round: int) -> Invite:
        """The invitation in M0, if this device may accept it. This checks one signature, so call it before other work.

        `hashes` are of the model and the layout that the device holds, `last_round` is the greatest round of
        the task that it ever answered for. Raises Malformed, UnsupportedSuite, BadSignature, ReplayedRound,
        PolicyViolation, HeadroomError or ModelMismatch.
        """
        invite, signature = Invite.decode(message)
        if invite.mode == ACTIVE:
            keys.verify(self.server_key, signature, "invite", keys.NO_CONTEXT, invite.hash)
        if invite.round <= last_round:
            raise ReplayedRound(f"round {invite.round} is over for this device: it answered for {last_round}")
        self._check_strength(invite)
        packing.check_headroom(invite.segments, invite.n_max)
        if (invite.model_hash, invite.layout_hash) != hashes:
            raise ModelMismatch("the invitation is for another model or layout than this device holds")
        return invite

    def _check_strength(self, invite: Invite) -> None:
        if invite.mode == HONEST and not self.allow_honest:
            raise PolicyViolation("the session has no signatures (mode honest), which is for simulations")
        if invite.n_max < parameters.LEAST_COHORT:
            raise PolicyViolation(
                f"a cohort of at most {invite.n_max} devices is refused: a sum over fewer than "
                f"{parameters.LEAST_COHORT} says too much about each"
            )
        if not max(self.min_sum, 1) <= invite.min_sum <= invite.n_max:
            raise PolicyViolation(
                f"the sum would be over at least {invite.min_sum} of at most {invite.n_max} devices; this device "
                f"insists on {self.min_sum}"
            )

    def check_parameters(self, chosen: GraphParameters) -> None:
        """Raise PolicyViolation when a graph is weaker than this device accepts."""
        parameters.check(chosen)
