"""A model release: a signed statement that an app may use a model. The coordinator does not have the key.

Spec: docs/spec/plan.md §11. `fedcore.signing` makes and checks the signatures.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.decoding import decoded, decoder
from fedcore.errors import BadRelease
from fedcore.plan import BlobRef
from fedcore.validation import Count

MODEL_RELEASE_VERSION = 1
MODEL_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"
"""A model's name is a part of URLs and of files' names."""
_NAME = re.compile(MODEL_NAME)


class ModelOrigin(msgspec.Struct, frozen=True):
    """Where the parameters come from: the committed round of a task, which the privacy certificate is about too."""

    task: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    round: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ModelRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model that the devices of a population may use.

    name: of the model. number: of the version, 1, 2, 3 … of the name. plan: has the predict graphs, the schema and the
    frozen vectors. parameters: a checkpoint that holds `params` alone. counter: once a device has seen a release of
    this signer for the population and the name, it refuses those with a lower one, but not an older version with a
    counter that is as high. evaluation: figures of the version, by name; none where it was not measured. origin: for
    people. expires_at: seconds since 1970, after which no device takes the version; those that have it go on.
    """

    version: int = MODEL_RELEASE_VERSION
    population: str
    name: Annotated[str, msgspec.Meta(pattern=rf"^{MODEL_NAME}$(?!\n)")]
    number: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    plan: BlobRef
    parameters: BlobRef
    counter: Count
    evaluation: dict[str, float] = {}
    origin: ModelOrigin | UnsetType = UNSET
    expires_at: Count | UnsetType = UNSET


_RELEASE = decoder(ModelRelease)


def check_model_name(name: str) -> None:
    """Raise BadRelease unless a model may have this name."""
    if not _NAME.fullmatch(name):
        raise BadRelease(
            f"{name!r} is no name of a model: take 1 to 64 lower-case letters, digits, - and _, a letter or digit first"
        )


def decode_model_release(text: str) -> ModelRelease:
    """The release in a signed statement. The caller has checked the signature. Raises BadRelease."""
    return decoded(text, _RELEASE, "model release", BadRelease, MODEL_RELEASE_VERSION)
