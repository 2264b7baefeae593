"""The version of a model that an earlier refresh took, from the state folder alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from device_runtime.backends.backend import Backend
from device_runtime.config import DeviceConfig
from device_runtime.errors import DeviceError, ModelRefused
from device_runtime.identification import sealer_of
from device_runtime.models.version import Parts, Version, load, predict_of
from device_runtime.permission.model_releases import signed_release
from device_runtime.permission.policy import Policy, policy_in
from device_runtime.state.cache import BLOBS
from device_runtime.state.database import NAME, read_database
from device_runtime.state.models import KeptVersion, ModelStore
from device_runtime.state.personal import PersonalStore
from fedcore.errors import FedcoreError, why
from fedcore.plan import BlobRef, Plan

_LOG = logging.getLogger(__name__)


def policy_of(config: DeviceConfig) -> Policy:
    """What this device may do. Raises ConfigError."""
    return config.policy or policy_in(config.state)


def personal_store(config: DeviceConfig, name: str) -> PersonalStore:
    """The store of a model's personal parameters."""
    return PersonalStore(config.state, sealer_of(config), config.population, name)


def kept_version(config: DeviceConfig, name: str, backend: Backend) -> Version | None:
    """The version that this device has, with its personal parameters if there are any.

    None if there is none, or a warning says why it cannot be used any more.
    """
    if not (config.state / NAME).is_file():
        return None
    try:
        with read_database(config.state) as database:
            current = ModelStore(database, config.population, name).get().current
        if current is None:
            return None
        parts = kept_parts(config, current, backend)
        return load(with_personal(config, name, parts), backend)
    except DeviceError as error:
        _LOG.warning("the kept version of model %s cannot be used: %s", name, error)
        return None


def kept_parts(config: DeviceConfig, current: KeptVersion, backend: Backend) -> Parts:
    """The parts of a kept version as it was released. The policy may have changed since, and files too.

    Raises ModelRefused.
    """
    release = signed_release(policy_of(config), current.release)
    try:
        plan = Plan.decode(_read(config, release.plan))
        frozen = None if plan.frozen is None else _checked(config, plan.frozen.blob)
        graph = _read(config, predict_of(plan, backend.format).graphs[backend.format])
        tokenizers = {name: _read(config, ref) for name, ref in plan.tokenizers.items()}
        parameters = _read(config, release.parameters)
        return Parts(current.release, release.number, plan, graph, parameters, frozen, tokenizers)
    except FedcoreError as error:
        raise ModelRefused(str(error)) from error


def with_personal(config: DeviceConfig, name: str, parts: Parts) -> Parts:
    """The parts with the personal parameters, unless there are none, or a warning says why they cannot be had."""
    try:
        own = personal_store(config, name).get(parts.release)
    except DeviceError as error:
        _LOG.warning("the personal parameters of model %s cannot be used, the released ones are: %s", name, error)
        return parts
    return parts if own is None else replace(parts, parameters=own, personal=True)


def _read(config: DeviceConfig, ref: BlobRef) -> bytes:
    return ref.check(_checked(config, ref).read_bytes())


def _checked(config: DeviceConfig, ref: BlobRef) -> Path:
    path = config.state / BLOBS / ref.sha256
    try:
        ref.check_file(path)
        return path
    except OSError as error:
        raise ModelRefused(f"blob {ref.sha256[:12]}… is not in the cache any more: {why(error)}") from error
