"""`muster doctor`: the examination of an installation, and of a deployment's security."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from muster.commands.stores import Blobs, Database, Remote, located
from muster.output import Json, emit, say, show_fields, show_table

_WORDS = {True: "yes", False: "no", None: "not seen from here"}


def doctor(
    security: Annotated[
        bool, typer.Option("--security", help="Check which assumptions of docs/threat-model.md hold.")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option(help="With --security: the devices' policy.toml, to check too.")
    ] = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Say what this installation can do and what it lacks.

    The exit code is 0 when everything that `muster demo` needs is there, 1 otherwise. The rest is optional: other
    runtimes, emulated ARM devices, a GPU.

    With --security it checks the deployment instead: the coordinator's settings, keys and store, and the devices'
    policy if you name it. With --coordinator and an operator's token it asks a running coordinator. Without, it takes
    the settings with which this shell would start one. The exit code is 0 when no assumption fails.
    """
    if security:
        raise typer.Exit(0 if _secure(policy, db, blobs, coordinator, json=json) else 1)
    if policy is not None:
        raise typer.BadParameter("it goes with --security", param_hint="--policy")
    raise typer.Exit(0 if _able(json=json) else 1)


def _secure(policy: Path | None, db: str | None, blobs: str | None, coordinator: str | None, *, json: bool) -> bool:
    from coordinator.security import of_stopped
    from device_runtime.permission.policy import Policy
    from muster.doctor import of_device
    from muster.remote import RemoteStore

    of_devices = () if policy is None else of_device(Policy.load(policy))
    if coordinator is None:
        assumptions = (*of_stopped(located(db, blobs)), *of_devices)
    else:
        with RemoteStore(coordinator, os.environ.get("MUSTER_TOKEN")) as service:
            assumptions = (*service.security(), *of_devices)
    if json:
        emit(assumptions)
    else:
        show_table(
            ("assumption", "holds", "found"),
            [(assumption.name, _WORDS[assumption.holds], assumption.found) for assumption in assumptions],
        )
        lacking = {assumption.name: assumption.remedy for assumption in assumptions if assumption.holds is False}
        if lacking:
            say()
            say("To make the others hold:")
            show_fields(lacking)
        if policy is None:
            say()
            say("Devices' demands are in their policy: name it with --policy")
    return all(assumption.holds is not False for assumption in assumptions)


def _able(*, json: bool) -> bool:
    from muster.doctor import examine

    report = examine()
    if json:
        emit(report)
    else:
        show_table(
            ("what", "found", "for"), [(finding.name, finding.found, finding.purpose) for finding in report.findings]
        )
        lacking = {finding.name: finding.get for finding in report.findings if not finding.found}
        if lacking:
            say()
            say("To get what was not found:")
            show_fields(lacking)
        say()
        missing = [finding.name for finding in report.findings if finding.needed and not finding.found]
        say(f"muster demo lacks {', '.join(missing)}" if missing else "muster demo has what it needs")
    return report.core_works
