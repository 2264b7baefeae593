"""`muster doctor`, `key` and `audit`, `muster coordinator keys`, `devices` and `alerts`, and `muster plan log`."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import UNSET

from muster.commands.stores import Blobs, Database, HeadFile, Remote, located, open_store, with_store
from muster.output import Json, answer, at_utc, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.keys import Keys
    from coordinator.operations import TaskStore
    from coordinator.rules.alerts import Alert
    from coordinator.rules.entities import Device
    from fedcore.release import Release, Signed, TreeHead


# `muster doctor`: the examination of an installation, and of a deployment's security.


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


# `muster key`: keys that sign plans and releases; and `muster plan log`, the log of releases.


key_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make and show keys that sign plans and releases."
)


@key_app.command()
def new(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. A device's policy names the public key, and then the device runs only plans that
    the key signed, and takes part only in secure rounds that it released. Keep the file away from the coordinator.
    """
    from fedcore.signing import SigningKey

    signer = SigningKey.new(out).signer
    if json:
        emit({"file": str(out), "signer": signer})
    else:
        say(signer)
        say_next("sign a plan with it", ["muster", "plan", "sign", "plan", "--key", out])
        task = ["--plan", "plan", "--population", "phones", "--goal", 10, "--rounds", 20]
        say_next("start a secure task with it", ["muster", "task", "create", *task, "--secagg", "--release-key", out])
        remark("on devices, in policy.toml:")
        remark(f'  signers = ["{signer}"]')


@key_app.command()
def show(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="The file of a private key, from `muster key new`.")],
    json: Json = False,
) -> None:
    """Print the public key of a private one."""
    from fedcore.signing import SigningKey

    signer = SigningKey.load(key).signer
    if json:
        emit({"file": str(key), "signer": signer})
    else:
        say(signer)


@with_store
def log(*, head_file: HeadFile = None, store: TaskStore, json: Json = False) -> None:
    """Show and verify the log of releases for secure rounds.

    Every signature is checked, and the log's root computed. With --head-file the log must begin with the one whose head
    the file holds. A head that a device was shown can be compared in the same way. The exit code is 1 for a broken log.
    """
    from fedcore.release import Release, TreeHead, decode_head
    from fedcore.signing import verified

    saved = decode_head(head_file.read_text()) if head_file is not None and head_file.exists() else None
    signed = store.releases()
    releases = [verified(one, Release) for one in signed]
    _demand_grown(signed, saved)
    head = TreeHead(size=len(signed), root=_root(signed))
    if head_file is not None:
        head_file.write_bytes(msgspec.json.encode(head))
    if json:
        entries = [{"signer": entry.signer, "digest": entry.digest, "text": entry.text} for entry in signed]
        emit({"head": head, "releases": entries})
        return
    rows = [
        (place, release.population, release.plan[:12], _evaluation(release), release.counter, entry.signer)
        for place, (release, entry) in enumerate(zip(releases, signed, strict=True))
    ]
    show_table(("place", "population", "plan", "evaluated by", "counter", "signer"), rows)
    show_fields({"releases": head.size, "root": head.root})


def _evaluation(release: Release) -> str:
    """The first digits of the plan that may evaluate the models of a release; empty where none may."""
    return "" if release.evaluation is UNSET else release.evaluation.plan[:12]


def _demand_grown(signed: Sequence[Signed], saved: TreeHead | None) -> None:
    """Raise BadRelease unless the log begins with the releases of an earlier head."""
    from fedcore.errors import BadRelease

    if saved is not None and (len(signed) < saved.size or _root(signed[: saved.size]) != saved.root):
        raise BadRelease(
            f"the log has {len(signed)} releases, and its first {saved.size} are not those of the saved head: it was "
            "changed, and devices were shown something else"
        )


def _root(signed: Sequence[Signed]) -> str:
    """The root over these releases in hex; zeros if there are none."""
    from secagg.keys import EMPTY, Tree

    return (Tree([entry.leaf for entry in signed]).root if signed else EMPTY).hex()


# `muster coordinator keys`, `devices` and `alerts`, and `muster audit`: what administrators look at.


keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show or rotate the server's key.")


@keys_app.command("show")
def show_key(db: Database = None, json: Json = False) -> None:
    """Show the server's public key, after a check that file and database agree, and the lineage key.

    The lineage key signs checkpoints of released tasks, and privacy certificates.
    """
    from coordinator.keys import Keys
    from coordinator.store.database import Database as Store

    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        _show_key(Keys.open(settings.keys_file, database), settings.keys_file, json)


@keys_app.command()
def rotate(
    db: Database = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the successor to this file, which replaces the old one later.")
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="A file is lost: make an unrelated key, which devices that know the lost one refuse.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Give the server's key a successor.

    The old key signs the new one, which takes its place.

    Running coordinators use it within a second, and devices follow by themselves. Make a new backup afterwards. With
    --out nothing changes yet: keep that file offline, for the day on which the key leaks or is lost.

    The lineage key has no successor. With --lost a new one, or the one in the file, replaces a lost one. Tasks whose
    releases name the lost one are paused until it is back.
    """
    from coordinator.keys import rotate as put_successor, start_anew
    from coordinator.store.database import Database as Store

    if lost and out is not None:
        raise typer.BadParameter("a lost key signs no successor", param_hint="--out")
    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        path = settings.keys_file
        keys = start_anew(path, database) if lost else put_successor(path, database, out)
        _show_key(keys, path, json)


def _show_key(keys: Keys, path: Path, json: bool) -> None:
    from coordinator.keys import lineage_file, lineage_key
    from fedcore.signing import key_text

    key = keys.server
    text = key_text(key.public)
    succeeded = [old.hex() for old in key.succession.keys[:-1]]
    facts = {
        "file": str(path),
        "key": key.public.hex(),
        "text": text,
        "lineage": lineage_key(path).signer if lineage_file(path).exists() else None,
        "succeeds": succeeded,
    }
    answer(facts if json else facts | {"succeeds": ", ".join(succeeded) or "no other"}, json)


devices_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, revoke and allow devices.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
DeviceId = Annotated[
    str, typer.Argument(metavar="DEVICE", help="The device's id, from this list or from `muster device log` there.")
]


@devices_app.command("list")
@with_store
def list_devices(
    *,
    revoked: Annotated[bool, typer.Option("--revoked", help="Only revoked ones, the last revoked first.")] = False,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of devices, newest first.")] = 100,
    store: TaskStore,
    json: Json = False,
) -> None:
    """List devices, the last enrolled first."""
    devices = store.devices(last, revoked=revoked)
    if json:
        emit([asdict(device) for device in devices])
    else:
        rows = [(device.id, device.attestation, at_utc(device.enrolled_at), _state(device)) for device in devices]
        show_table(("device", "attestation", "enrolled", "state"), rows)


@devices_app.command()
@with_store
def revoke(*, device: DeviceId, store: TaskStore, json: Json = False) -> None:
    """Refuse a device from now on, at every coordinator on the database.

    Its sessions end within seconds; its earlier reports stay counted.
    """
    _show_device(store.revoke_device(device), json)


@devices_app.command()
@with_store
def allow(*, device: DeviceId, store: TaskStore, json: Json = False) -> None:
    """Take a revoked device back."""
    _show_device(store.allow_device(device), json)


def _show_device(device: Device, json: bool) -> None:
    answer(asdict(device) if json else {"device": device.id, "state": _state(device)}, json)


def _state(device: Device) -> str:
    return "good" if device.revoked_at is None else "revoked"


def alerts(
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of alerts, open ones first.")] = 100,
    test: Annotated[
        bool, typer.Option("--test", help="Send the webhook one signed test event, and list nothing.")
    ] = False,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """List alerts: open ones, then cleared ones, the newest first.

    A coordinator raises and clears them; the first line says so if none looks. Texts are of when they were raised:
    `muster task list` says how tasks are now.

    --test sends from the coordinator with --coordinator, and else from here, by the settings of this shell. The exit
    code is 1 when the webhook does not take it.
    """
    if test:
        _test(db, coordinator)
        answer({"delivered": True}, json)
        return
    with open_store(db, blobs, coordinator) as store:
        listed = store.alerts(last)
    if json:
        emit([asdict(alert) for alert in listed])
    else:
        show_table(("alert", "task", "raised", "cleared", "what", "what to do"), [_row(alert) for alert in listed])


def _test(db: str | None, coordinator: str | None) -> None:
    from coordinator.driver.watch import Webhook, send_trial
    from muster.remote import RemoteStore

    if coordinator is None:
        settings = located(db)
        send_trial(Webhook.of(settings.alert_webhook, settings.alert_webhook_secret_file))
        return
    with RemoteStore(coordinator, os.environ.get("MUSTER_TOKEN")) as remote:
        remote.test_alerts()


def _row(alert: Alert) -> tuple[str, ...]:
    cleared = "" if alert.cleared_at is None else at_utc(alert.cleared_at)
    return alert.kind, alert.task or "", at_utc(alert.raised_at), cleared, alert.text, alert.remedy


audit_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and verify the audit log.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
_PAGE = 1000


@audit_app.command("show")
@with_store
def show_log(
    *,
    last: Annotated[int, typer.Option(min=1, max=_PAGE, help="How many entries, from the end.")] = 100,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Show the last entries, oldest first."""
    log = store.audit(limit=last)
    if json:
        emit([asdict(entry) for entry in log])
    else:
        rows = [
            (entry.number, at_utc(entry.at), entry.actor, entry.action, entry.subject, entry.detail) for entry in log
        ]
        show_table(("entry", "when", "who", "did", "to", "more"), rows)


@audit_app.command()
@with_store
def verify(*, head_file: HeadFile = None, store: TaskStore, json: Json = False) -> None:
    """Check every entry, and name the first that is not as written.

    Each entry is chained to the one before. Only --head-file shows that a log was cut off at its end, or made anew as a
    whole. Keep that file out of reach of everyone who can write to the database. The exit code is 1 for a broken log.
    """
    from coordinator.rules.alerts import Head, verify as check, whole_log

    saved = Head.parse(head_file.read_text()) if head_file is not None and head_file.exists() else None
    head = check(whole_log(store.audit), saved)
    if head_file is not None:
        head_file.write_text(f"{head}\n")
    answer({"entries": head.number, "head": str(head)}, json)
