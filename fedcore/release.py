"""A release: a signed statement of what devices may run in secure rounds. The coordinator does not have the key.

Spec: docs/spec/plan.md §9. `fedcore.signing` makes and checks the signatures.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.errors import BadRelease
from fedcore.labels import Target
from fedcore.validation import Count, Digest, decoded, decoder

CLIP = "clip"
"""The vector of a broadcast that bounds the L2 norm of every report of the round: one value."""
RELEASE_VERSION = 1
Positive = Annotated[float, msgspec.Meta(gt=0)]
Bits = Annotated[int, msgspec.Meta(ge=2, le=20)]
NoiseMultiplier = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Signed(msgspec.Struct, frozen=True):
    """A statement in JSON, exactly as it was signed, with the signer's public key and the signature, both as text."""

    text: str
    signer: str
    value: str

    @property
    def digest(self) -> str:
        """SHA-256 of the statement, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def leaf(self) -> bytes:
        """The statement and its signer, as the log of releases has them."""
        return f"{self.signer}\n{self.text}".encode()


class SumBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a secure round's sums, which only the release key can change.

    clip_norm: the L2 norm to which a longer mean segment is scaled down, and the range of its values. bits: of
    precision per value. max_examples: the greatest weight of a device. min_sum: the fewest devices in one sum.
    noise_multiplier: the standard deviation of the noise that `honest` devices together add to each value of a sum,
    over the greatest L2 norm of a report; 0 is no noise. honest: the number of devices in every sum that are assumed to
    add their share; 0 without noise. target: the expression on labels that says which devices the rounds want.
    """

    clip_norm: Positive
    bits: Bits
    max_examples: Count
    min_sum: Count
    noise_multiplier: NoiseMultiplier = 0.0
    honest: Count = 0
    target: Target | UnsetType = UNSET


class ReleasedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """How devices may evaluate the models of a released training.

    plan: the digest of the plan that evaluates. constants: the digests of the vectors of its checkpoint, by name, but
    for the model, `params`, which an entry of the lineage names.
    """

    plan: Digest
    bounds: SumBounds
    constants: dict[str, Digest]


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The work that the devices of a population may do in secure rounds.

    plan, checkpoint: digests of the plan and of the first checkpoint. evaluation: of the models that the plan trains,
    if they may be evaluated. seed: the task's, if a plan has codecs, whose keys are made of it. lineage: the public key
    that signs every later checkpoint. counter: once a device has seen a release of this signer for the population, it
    refuses those with a lower one. expires_at: seconds since 1970.
    """

    version: int = RELEASE_VERSION
    population: str
    plan: Digest
    checkpoint: Digest
    bounds: SumBounds
    evaluation: ReleasedEvaluation | UnsetType = UNSET
    seed: Count | UnsetType = UNSET
    lineage: str
    counter: Count
    expires_at: Count

    def evaluation_by(self, plan: str) -> ReleasedEvaluation | None:
        """The evaluation that a plan, by digest, is released for; None for the plan that trains and for any other."""
        evaluation = self.evaluation
        return None if evaluation is UNSET or plan == self.plan or evaluation.plan != plan else evaluation

    def bounds_of(self, plan: str) -> SumBounds:
        """The bounds of the rounds of one of its plans, by digest."""
        evaluation = self.evaluation_by(plan)
        return self.bounds if evaluation is None else evaluation.bounds


class LineageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a checkpoint: round `round` of a release, from the checkpoint `parent`. All by digest.

    params: the digest of the model in the checkpoint, if it is evaluated.
    """

    release: Digest
    round: Count
    parent: Digest
    checkpoint: Digest
    params: Digest | UnsetType = UNSET


class TreeHead(msgspec.Struct, frozen=True, kw_only=True):
    """A log of releases at one moment: the number of releases, and the root of their Merkle tree, in hex."""

    size: Count
    root: Digest


class LogProof(msgspec.Struct, frozen=True, kw_only=True):
    """The proof that a release is in a log: the log's head, signed with the lineage key, the index and the path."""

    head: Signed
    position: Count
    path: bytes


_RELEASE, _ENTRY, _HEAD = decoder(Release), decoder(LineageEntry), decoder(TreeHead)


def decode_release(text: str) -> Release:
    """The release in a signed statement. The caller has checked the signature. Raises BadRelease."""
    return decoded(text, _RELEASE, "release", BadRelease, RELEASE_VERSION)


def decode_entry(text: str) -> LineageEntry:
    """The entry of a lineage in a signed statement. The caller has checked the signature. Raises BadRelease."""
    return decoded(text, _ENTRY, "lineage entry", BadRelease)


def decode_head(text: str) -> TreeHead:
    """The head of a log in a signed statement. The caller has checked the signature. Raises BadRelease."""
    return decoded(text, _HEAD, "head of the log", BadRelease)
