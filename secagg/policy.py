"""What a device insists on before it takes part. Spec: docs/spec/secagg.md §6."""

from __future__ import annotations

from dataclasses import dataclass

from secagg import parameters
from secagg.errors import PolicyViolation
from secagg.messages import HONEST, Invite
from secagg.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Policy:
    """Constants of the device, which no server may change.

    `server_key` and `authority` are Ed25519 public keys of 32 bytes: the server's, and that of whoever enrols devices.
    Without an authority the device cannot tell its peers from devices that the server made up. `min_sum` is the least
    number of devices that a sum may have. `allow_honest` admits the mode without signatures, which is for simulations.
    """

    server_key: bytes
    authority: bytes | None
    min_sum: int
    allow_honest: bool = False

    def check_invite(self, invite: Invite) -> None:
        """Raise PolicyViolation when a session is weaker than this device accepts."""
        if invite.mode == HONEST and not self.allow_honest:
            raise PolicyViolation("the session has no signatures (mode honest), which is for simulations")
        if not max(self.min_sum, 1) <= invite.min_sum <= invite.n_max:
            raise PolicyViolation(
                f"the sum would be over at least {invite.min_sum} of at most {invite.n_max} devices; this device "
                f"insists on {self.min_sum}"
            )

    def check_parameters(self, chosen: Parameters) -> None:
        """Raise PolicyViolation when a graph is weaker than this device accepts."""
        parameters.check(chosen)
