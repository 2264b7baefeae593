"""A model for the app: predictions in the app's own process, from the last version that was taken. docs/device.md."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from device_runtime.backends import open_backend
from device_runtime.config import DeviceConfig
from device_runtime.errors import ConfigError, ModelClosed, NoModel
from device_runtime.models.kept import kept_version
from device_runtime.models.version import Inputs, Version
from fedcore.errors import BadRelease
from fedcore.model_release import check_model_name

if TYPE_CHECKING:
    from device_runtime.models.personalise import Personalised


class Model:
    """A model by its name: `Device.model` makes it. Any thread may call any method.

    Raises ConfigError for a name that no model may have, or a backend that is missing.
    """

    def __init__(self, config: DeviceConfig, name: str) -> None:
        try:
            check_model_name(name)
        except BadRelease as error:
            raise ConfigError(str(error)) from error
        self._config, self._name = config, name
        self._backend = open_backend(config.backend)
        self._swapping, self._refreshing = threading.Lock(), threading.Lock()
        self._closed = False
        self._version: Version | None = kept_version(config, name, self._backend)

    @property
    def version(self) -> int | None:
        """The number of the version that predicts now; None before the first, and after `close`."""
        version = self._version
        return None if version is None else version.number

    @property
    def personal(self) -> bool:
        """Whether the parameters that predict now are this device's own, by `personalise`."""
        version = self._version
        return version is not None and version.personal

    def predict(self, examples: Inputs) -> dict[str, NDArray[Any]]:
        """The model's outputs (n, …), by their names in the plan, for n examples, at least 1.

        examples: an array (n, …) for each input, by the name of its field, of the field's type; where the plan names a
        tokenizer, n texts will do, of which long ones are cut. A call that began before a swap ends on the version it
        began with. Raises NoModel before the first version, InputRefused, ModelClosed, and RuntimeFailed when an
        operator fails.
        """
        with self._swapping:
            self._check_open()
            version = self._version
        if version is None:
            raise NoModel(f"no version of model {self._name!r} is here yet: refresh() fetches one")
        return version.predict(examples)

    def refresh(self) -> bool:
        """Ask the coordinator for the version to use, now; whether it replaced the one before.

        It may download, so it blocks. Whatever goes wrong, the version before stays. Raises ModelRefused for one that
        cannot be used, StateInUse while a session or another refresh holds the state folder, TransportError, and any
        other DeviceError as a session's outcome would name it.
        """
        from device_runtime.models.refresh import newer_version  # an app that is offline needs none of it

        with self._refreshing:
            self._check_open()
            loaded = self._version
            newer = newer_version(self._config, self._name, self._backend, None if loaded is None else loaded.release)
            if newer is not None:
                self._swap(newer)
            return newer is not None

    def personalise(self) -> Personalised:
        """Train the version that is here on this device's examples, and use the result if it is better; else do not.

        The plan of the version says the steps. A part of the examples is left out, and decides: docs/device.md. It
        blocks, and runs in a process of its own, under the policy and the conditions of a session. The first call of a
        plan downloads its graphs. The result is kept, sealed, until another version comes; nothing of it leaves. Raises
        NoModel, ExamplesError where there are too few, PlanRefused for a plan whose devices make no model of their own,
        StateInUse, and any other DeviceError as a session's outcome would name it; then all stays as it was.
        """
        from device_runtime.models.personalise import personalised

        with self._refreshing:
            self._check_open()
            version, outcome = personalised(self._config, self._name, self._backend)
            self._swap(version)
            return outcome

    def forget(self) -> bool:
        """Delete what `personalise` kept, and use the released version; whether anything was kept.

        Raises StateInUse while a session, a refresh or a training holds the state folder.
        """
        from device_runtime.models.personalise import released

        with self._refreshing:
            self._check_open()
            version, dropped = released(self._config, self._name, self._backend)
            self._swap(version)
            return dropped

    def close(self) -> None:
        """Give the memory back, after the last call that is under way. What is stored stays."""
        with self._swapping:
            self._closed = True
            self._version = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _swap(self, version: Version | None) -> None:
        with self._swapping:
            self._check_open()
            self._version = version

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed(f"model {self._name!r} is closed")
