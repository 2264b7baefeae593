"""A device inside a host application, what an app embeds, and the schedule of its sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from device_runtime.backends import BACKENDS
from device_runtime.conditions import Clock, Conditions, ConditionSource, Moment, Requirements
from device_runtime.config import DeviceConfig, secret_in
from device_runtime.errors import ConfigError, DeviceError, ModelClosed, ModelRefused, Outcome, StateInUse
from device_runtime.permission.policy import Policy, policy_in
from device_runtime.protocol.connection import address_of
from device_runtime.sandbox.channel import lacking
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.folder import KeyStore, only_session
from device_runtime.state.records import Retry
from fedcore.labels import check_labels
from fedcore.wire.messages import Attestation, RetryWindow

if TYPE_CHECKING:
    from device_runtime.models.model import Model


_LOG = logging.getLogger(__name__)
# Faults that the owner repairs on this device. After a restart it need not wait.
MENDED_HERE = frozenset({"bad-configuration", "invalid-examples"})
# When to return if the coordinator did not say; after a report at once, as the next check-in has an answer.
AFTER_WORK = RetryWindow(0.0, 2.0)
MINUTES = RetryWindow(60.0, 300.0)
HOURS = RetryWindow(2 * 3600.0, 6 * 3600.0)
# A coordinator may name any window; a device neither returns in a busy loop nor stays away forever.
SHORTEST_S, LONGEST_S = 1.0, 86_400.0
# How often to check conditions. Nothing is sent, so the checks need no random spread.
CONDITIONS = RetryWindow(60.0, 60.0)
# How often to read the clock, so as to notice that the machine slept or the clock was set.
LONGEST_NAP_S = 60.0


def run_forever(
    config: DeviceConfig,
    on_outcome: Callable[[Outcome], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
    clock: Clock | None = None,
) -> NoReturn:
    """Run sessions forever, each at a random time in the window that the last outcome names.

    That time is stored in the state folder and honoured after a restart. While conditions do not hold, they are checked
    every minute; `on_outcome` is called once for each reason. Ends with the exception that ends the process, and leaves
    a state that the next start uses.
    """
    rng, clock = rng or random.Random(), clock or Clock()
    due, told = None, ("", "")
    if left_s := _left_s(_kept_time(config, clock), clock):
        _LOG.warning("this device comes back in %.0f s: the time is kept in %s", left_s, config.state)
    while True:
        # Before every session, because another process with this state folder may have been told to stay away.
        while left_s := max(_left_s(moment, clock) for moment in (due, _kept_time(config, clock))):
            sleep(min(left_s, LONGEST_NAP_S))
        outcome = run_session(config, clock)
        due = Moment.after(_drawn_s(outcome, rng), clock)
        if outcome.outcome != "not-now" and outcome.reason not in {*MENDED_HERE, StateInUse.reason}:
            _keep_time(config, clock, due)
        ended = outcome.outcome, outcome.reason
        if outcome.outcome != "not-now" or ended != told:
            on_outcome(outcome)
        told = ended


def _drawn_s(outcome: Outcome, rng: random.Random) -> float:
    """Seconds to stay away after an outcome."""
    if outcome.retry is None:
        window = default_window(outcome)
        return rng.uniform(window.min_s, window.max_s)
    return min(max(rng.uniform(outcome.retry.min_s, outcome.retry.max_s), SHORTEST_S), LONGEST_S)


def default_window(outcome: Outcome) -> RetryWindow:
    """The window after an outcome for which the coordinator named none."""
    if outcome.outcome in {"reported", "not-needed"}:
        return AFTER_WORK
    if outcome.outcome == "not-now":
        return CONDITIONS
    return HOURS if outcome.retryable == "permanent" else MINUTES


def _left_s(due: Moment | None, clock: Clock) -> float:
    return 0.0 if due is None else due.remaining_s(clock)


def _kept_time(config: DeviceConfig, clock: Clock) -> Moment | None:
    # If the state folder cannot be used, do not wait: the session will say what is wrong with it.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        retry = Retry(database, config.coordinator, config.population)
        due = retry.not_before()
        if due is not None:
            due = due.carried_over(clock)
            retry.stay_away_until(due)
        return due
    return None


def _keep_time(config: DeviceConfig, clock: Clock, due: Moment) -> None:
    # This process waits anyway, and the next session will say what is wrong.
    with contextlib.suppress(DeviceError), only_session(config.state), open_database(config.state, clock) as database:
        Retry(database, config.coordinator, config.population).stay_away_until(due)


NO_REQUIREMENTS = Requirements()


class Device:
    """One device: it serves one population of one coordinator, with examples and a state folder of its own.

    examples: a SQLite example store or an `.npz` file. policy: what the device may do, as a Policy or its file; None
    means `policy.toml` in the state folder, or everything if that is missing. conditions, requirements: the source of
    conditions, and those under which the device may work. wait_s: the seconds that it waits to be selected.
    enrolment_secret: the secret that the device proves to know when it enrols, as bytes or its file. attest: instead of
    a secret, a function that returns the platform's attestation for a challenge of 32 bytes. keystore: holds the key
    that seals stored data, instead of a file. labels: up to 16 values by name, such as the app's version, of which the
    device tells those that its policy lists. Raises ConfigError when an argument is not valid, such as a malformed URL,
    an unknown backend or a file that is no policy.
    """

    def __init__(  # noqa: PLR0913  # one parameter per setting, most of them by name
        self,
        coordinator: str,
        population: str,
        examples: Path | str,
        state: Path | str,
        *,
        policy: Policy | Path | str | None = None,
        conditions: ConditionSource = Conditions,
        requirements: Requirements = NO_REQUIREMENTS,
        backend: str = "onnxruntime",
        wait_s: float = 30.0,
        enrolment_secret: bytes | Path | str | None = None,
        attest: Callable[[bytes], Attestation] | None = None,
        keystore: KeyStore | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        _check(coordinator, population, backend, wait_s)
        _check_paths(examples=examples, state=state)
        self._config = DeviceConfig(
            coordinator=coordinator,
            population=population,
            examples=Path(examples),
            state=Path(state),
            policy=_policy(policy, Path(state)),
            conditions=conditions,
            requirements=requirements,
            backend=backend,
            wait_s=wait_s,
            enrolment_secret=secret_in(enrolment_secret),
            attest=attest,
            keystore=keystore,
            labels=_labels(labels or {}),
        )
        self._said = False
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def run_once(self) -> Outcome:
        """Run one session now, then refresh the open models. Errors are in the outcome."""
        self._say_what_is_open()
        outcome = run_session(self._config)
        self._refresh_models(outcome)
        return outcome

    def run_forever(self, stop: threading.Event, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """Run sessions at the times that the coordinator names, until `stop` is set. Each refreshes the open models.

        Work on a plan then stops at once, and the device tells the coordinator. A device that waits to be selected
        returns after at most `wait_s`. While the device may not work, `on_outcome` is called once for each reason.
        """
        self._say_what_is_open()

        def heard(outcome: Outcome) -> None:
            if not stop.is_set():
                self._refresh_models(outcome)
            on_outcome(outcome)
            nap(0.0)

        def nap(seconds: float) -> None:
            if stop.wait(seconds):
                raise _Stopped

        config = dataclasses.replace(self._config, stopping=stop.is_set)
        with contextlib.suppress(_Stopped):
            nap(0.0)
            run_forever(config, heard, sleep=nap)

    def model(self, name: str) -> Model:
        """The model of this name, for predictions in this process: the last version that this device took, or none yet.

        It needs no network until `refresh`, which a session of this device makes too when it ends. Raises ConfigError
        for a name that no model may have, or a missing backend.
        """
        from device_runtime.models.model import Model  # rarely needed

        model = Model(self._config, name)
        self._models.add(model)
        return model

    def _refresh_models(self, outcome: Outcome) -> None:
        """Refresh the open models after a session that could use the network until its end."""
        if not outcome.bytes_down or outcome.reason == "conditions":
            return
        for model in list(self._models):
            try:
                model.refresh()
            except ModelClosed:
                self._models.discard(model)
            except ModelRefused:
                pass  # the journal has it, and the version before stays
            except DeviceError as error:
                _LOG.warning("a model was not refreshed after a session: %s", error)

    def _say_what_is_open(self) -> None:
        if self._said:
            return
        self._said = True
        policy = self._config.policy
        if policy is not None and not policy.signers:
            _LOG.warning("this device runs plans of any signer, and unsigned ones: its policy names no signers")
        if lacks := ", ".join(lacking()):
            _LOG.warning("the sandbox lacks %s: docs/threat-model.md says what code that breaks out can do", lacks)


class _Stopped(Exception):
    """The application told the device to stop."""


def _check(coordinator: str, population: str, backend: str, wait_s: float) -> None:
    """Raise ConfigError for values that no session could use."""
    address_of(coordinator)
    if not (isinstance(population, str) and population and _is_text(population)):
        raise ConfigError(f"population {population!r} is not a name")
    if backend not in BACKENDS:
        raise ConfigError(f"no backend is called {backend!r}; there is {sorted(BACKENDS)}")
    if not (isinstance(wait_s, int | float) and 0 <= wait_s < math.inf):
        raise ConfigError(f"wait_s = {wait_s!r}: it must be a finite number of seconds, at least 0")


def _check_paths(**paths: Path | str) -> None:
    for name, path in paths.items():
        if not isinstance(path, Path | str) or "\0" in str(path):
            raise ConfigError(f"{name} = {path!r} is not a path")


def _is_text(name: str) -> bool:
    """Whether a name can be sent as text; half a surrogate pair cannot."""
    return all(not 0xD800 <= ord(character) < 0xE000 for character in name)


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    try:
        check_labels(labels)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return dict(labels)


def _policy(policy: Policy | Path | str | None, state: Path) -> Policy:
    if isinstance(policy, Policy):
        return policy
    return policy_in(state) if policy is None else Policy.load(Path(policy))
