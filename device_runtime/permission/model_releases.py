"""Releases of models: this device's demands on one before it fetches what it names. Spec: docs/spec/plan.md §11."""

from __future__ import annotations

from typing import NoReturn

from msgspec import UNSET

from device_runtime.errors import ModelRefused
from device_runtime.permission.policy import Policy
from device_runtime.state.models import ModelStore
from fedcore.errors import FedcoreError
from fedcore.model_release import ModelRelease
from fedcore.release import Signed
from fedcore.signing import verified_model_release


def signed_release(policy: Policy, signed: Signed) -> ModelRelease:
    """The release, if a key that the policy names signed it; any key if it names none, as for plans of plain rounds.

    Raises ModelRefused.
    """
    if policy.signers and signed.signer not in policy.signers:
        raise ModelRefused(
            "against signers of this device's policy",
            f"the model release is signed by {signed.signer}, which the policy does not name",
        )
    try:
        return verified_model_release(signed)
    except FedcoreError as error:
        raise ModelRefused(str(error)) from error


def check_release(
    release: ModelRelease, signer: str, name: str, population: str, *, store: ModelStore, now: float
) -> None:
    """Check a release for the model `name` of a population, and remember its counter. now: seconds since 1970.

    Raises ModelRefused or StateError.
    """
    if release.population != population:
        _refuse(f"it is for population {release.population!r}")
    if release.name != name:
        _refuse(f"it is for model {release.name!r}")
    if release.expires_at is not UNSET and release.expires_at <= now:
        _refuse("it has expired")
    highest = store.highest(signer)
    if release.counter < highest:
        _refuse(f"its counter is {release.counter}; this device has seen {highest}")
    store.see(signer, release.counter)


def _refuse(why: str) -> NoReturn:
    raise ModelRefused(f"the model release is refused: {why}")
