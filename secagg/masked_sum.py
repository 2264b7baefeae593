"""The sum of masked vectors modulo 2⁶⁴, which may be made in parts at several places. Spec: docs/spec/secagg.md §7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from secagg import keys
from secagg.errors import BadSignature, BadVector, DuplicateUpload, Malformed
from secagg.masking import LITTLE, Words
from secagg.merkle import sha256
from secagg.messages import Masked


@dataclass(frozen=True, slots=True)
class ExpectedVector:
    """What M7 of a device must be: of the session `sid`, with `words` words, and signed with the key `signer`.

    position: the device's in the roster. signer: None in mode honest, where nothing is signed.
    """

    sid: bytes
    position: int
    signer: bytes | None
    words: int

    def open(self, message: bytes) -> Masked:
        """The masked vector in M7. Raises BadVector."""
        try:
            masked = Masked.decode(message, self.sid, self.words)
            if self.signer is not None:
                keys.verify(self.signer, masked.signature, "masked", self.sid, sha256(masked.words))
        except (Malformed, BadSignature) as error:
            raise BadVector(f"the upload of position {self.position} is unusable: {error}", [self.position]) from error
        return masked


def no_words(count: int) -> Words:
    """The sum of no vectors (W,)."""
    return np.zeros(count, np.uint64)


@dataclass(slots=True)
class MaskedSum:
    """A sum of masked vectors (W,), and the signatures of those that are in it, by position."""

    words: Words
    signatures: dict[int, bytes] = field(default_factory=dict)

    def add(self, position: int, masked: Masked) -> None:
        """Add a device's vector, once. Raises DuplicateUpload."""
        self.merge({position: masked.signature}, np.frombuffer(masked.words, LITTLE))

    def merge(self, signatures: Mapping[int, bytes], words: Words) -> None:
        """Add the sum of vectors of other positions. Raises DuplicateUpload, or BadVector for another size."""
        if twice := sorted(signatures.keys() & self.signatures):
            raise DuplicateUpload(f"position {twice[0]} sent this before", twice)
        if words.shape != self.words.shape:
            raise BadVector(f"a sum of {words.size} words is none of a session of {self.words.size}", [])
        self.words += words
        self.signatures |= signatures

    def forget(self) -> None:
        """Forget the words."""
        self.words = no_words(0)
