"""Services as commands: `muster authority`, the enrolment authority, and `muster coordinator`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from authority.configuration import AuthorityConfig
from fedcore.private_files import exit_on_sigterm
from fedcore.validation import build
from muster.commands.administration import alerts, devices_app, keys_app
from muster.commands.stores import Blobs, Database, given_again, located
from muster.commands.task import FIRST_TASK
from muster.options import with_settings
from muster.output import Json, answer, at_utc, emit, say, say_next, show_table
from muster.plain import EXIT_TERMINATED, remark

if TYPE_CHECKING:
    from coordinator.server import Addresses
    from coordinator.settings import Settings
    from fedcore.signing import SucceedingKey


# Services as commands: their first lines, and `muster authority`, the enrolment authority.


ReadyFile = Annotated[Path | None, typer.Option(help="Write the URLs here, a line each, when ready.")]
Urls = TypeVar("Urls", bound=tuple[str, ...])


def serve_until_terminated(
    name: str,
    serve: Callable[[Callable[[Urls], None]], None],
    say_next: Callable[[Urls], None],
    ready_file: Path | None,
) -> None:
    """Run a service until SIGTERM or Ctrl-C, which is a good end once it is ready.

    serve: serves, and calls its argument with the URLs once requests are answered. say_next: is called with them then;
    the first of them is said, and all are written to `ready_file`.
    """
    ready = False

    def on_ready(urls: Urls) -> None:
        """Say that requests are answered at these URLs from now on."""
        nonlocal ready
        ready = True
        remark(f"{name} ready at {urls[0]}")
        say_next(urls)
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.write_text("\n".join(urls))
            partial.replace(ready_file)

    # Once it is ready, the server handles SIGTERM itself and raises it again when it has stopped: a good end.
    exit_on_sigterm(EXIT_TERMINATED, unless=lambda: ready)
    with suppress(KeyboardInterrupt):
        serve(on_ready)


authority_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run the enrolment authority, which vouches for devices."
)


@authority_app.command("new-key")
def new_key(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. Keep a copy elsewhere: devices trust no other key. The coordinator must never have
    it; its settings and the devices' policies name the public key.
    """
    from fedcore.signing import SucceedingKey

    key = SucceedingKey.new("authority")
    key.save(out)
    _tell(out, key, json)


@authority_app.command()
def rotate(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the private key; the new key replaces it.")],
    json: Json = False,
) -> None:
    """Give the authority's key a successor, and print its public key.

    The old key signs the new one, which replaces it.

    Then restart the authority, and restart the coordinator with the new public key. Devices follow by themselves.
    """
    from fedcore.signing import SucceedingKey

    successor = SucceedingKey.load("authority", key).successor()
    successor.save(key, replace=True)
    _tell(key, successor, json)


@authority_app.command("serve")
@with_settings(AuthorityConfig)
def serve_authority(*, settings: Mapping[str, Any], ready_file: ReadyFile = None) -> None:
    """Vouch for devices, and draw beacons, until SIGTERM or Ctrl-C.

    A secure round in groups of more than 64 devices needs a beacon: name the key that `muster coordinator keys show`
    prints with --server-key.

    Run it where the coordinator's operator cannot reach its key: as another user, better on another machine, ideally in
    another organisation. Its protection from a coordinator that invents devices is only as good as that separation.
    """
    from authority.service import serve as run
    from coordinator.monitoring import configure_logs
    from fedcore.signing import SucceedingKey, key_text

    config = build(AuthorityConfig, settings, text=True)
    for_people = configure_logs("info", "auto")

    def guide(urls: tuple[str]) -> None:
        """Suggest the next command to a person."""
        if for_people:
            public = key_text(SucceedingKey.load("authority", config.key).public)
            command = ["muster", "coordinator", "serve", "--authority", public, "--authority-url", urls[0]]
            say_next("start a coordinator that goes by it", command)

    serve_until_terminated("authority", lambda on_ready: run(config, lambda url: on_ready((url,))), guide, ready_file)


def _tell(file: Path, key: SucceedingKey, json: bool) -> None:
    from fedcore.signing import key_text

    text = key_text(key.public)
    if json:
        emit({"file": str(file), "authority": text})
    else:
        say(text)


# `muster coordinator`: the service.


coordinator_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run the coordinator.")
coordinator_app.add_typer(devices_app, name="devices")
coordinator_app.add_typer(keys_app, name="keys")
coordinator_app.command()(alerts)
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings; flags and environment win.")]
Db = Annotated[str | None, typer.Option(help="sqlite:///PATH or postgresql://….  [default: sqlite:///muster.db]")]
BlobStore = Annotated[
    str | None, typer.Option(help="Folder of plans and models, or s3://…, gs://….  [default: muster-blobs]")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one.  [default: 8080]")]
AdminPort = Annotated[int | None, typer.Option(help="Port for operators; 0 takes a free one.  [default: 8081]")]
ReplicaRole = Annotated[
    str | None,
    typer.Option(help="all; api: drive no rounds, pass requests on; driver: answer only other replicas.  [all]"),
]
AcceptUnattested = Annotated[
    bool, typer.Option("--accept-unattested", help="Enrol devices without evidence; only for development.")
]
SecretFile = Annotated[
    Path | None, typer.Option(help="File with the secret that devices prove to know when they enrol.")
]
Authority = Annotated[str | None, typer.Option(help="Public key of the enrolment authority, which secure rounds need.")]
AuthorityUrl = Annotated[str | None, typer.Option(help="Where devices reach the enrolment authority.")]
Trial = Annotated[
    bool, typer.Option("--trial", help="Run an authority beside it, to try secure rounds on one machine.")
]


@coordinator_app.command()
def serve(
    config: Config = None,
    db: Db = None,
    blobs: BlobStore = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    role: ReplicaRole = None,
    accept_unattested: AcceptUnattested = False,
    enrolment_secret_file: SecretFile = None,
    authority: Authority = None,
    authority_url: AuthorityUrl = None,
    trial: Trial = False,
    ready_file: ReadyFile = None,
) -> None:
    """Serve devices until SIGTERM or Ctrl-C.

    After a restart every task goes on from its last committed round. Several coordinators may run on one database, and
    a device may reach any of them.

    --trial also starts an enrolment authority, which vouches for any device, and makes the key that releases tasks:
    secure rounds in four commands, for learning and not for protection.

    Operators are served on a port of their own. Without --accept-unattested, --enrolment-secret-file or the setting
    android_file only devices with a credential of the --authority can enrol. Every setting may also come from the
    environment, as MUSTER_DATABASE, MUSTER_ADMIN_PORT and so on: `muster coordinator config` lists them all.
    """
    from coordinator.monitoring import configure_logs
    from coordinator.server import serve as run
    from coordinator.settings import load_settings

    who = {"enrolment_secret_file": enrolment_secret_file, "accept_unattested": accept_unattested or None}
    authorities = {"authority": authority, "authority_url": authority_url}
    ports = {"host": host, "port": port, "admin_port": admin_port}
    settings = load_settings(_flags(config, database=db, blobs=blobs, role=role, **ports, **who, **authorities))
    if trial and settings.authority:
        raise typer.BadParameter("this coordinator has an authority; leave one of the two out", param_hint="--trial")
    for_people = configure_logs(settings.log_level, settings.log_format)

    def guide(addresses: Addresses) -> None:
        """Suggest the next commands to a person."""
        if for_people:
            _say_next(addresses, db, blobs, trial=trial)

    def serve_on(on_ready: Callable[[Addresses], None]) -> None:
        with _trial_of(settings) if trial else nullcontext(settings) as chosen:
            run(chosen, on_ready)

    serve_until_terminated("coordinator", serve_on, guide, ready_file)


@coordinator_app.command()
def migrate(
    db: Database = None,
    to: Annotated[
        str | None, typer.Option(help="Revision to go to, up or down; base drops all.  [default: this version's]")
    ] = None,
    json: Json = False,
) -> None:
    """Bring a database to the tables of this version.

    Stop every coordinator on it and make a backup first. Going down loses what is in the tables and columns
    that it removes.
    """
    from coordinator.store.database import HEAD, migrate

    changes = asdict(migrate(located(db).database, to or HEAD))
    answer(changes, json)


@coordinator_app.command()
def collect(
    db: Database = None,
    blobs: Blobs = None,
    keep_models: Annotated[
        int | None, typer.Option(help="Rounds of each task whose models are kept.  [default: 5]")
    ] = None,
    keep_assignments_days: Annotated[
        float | None, typer.Option(help="Days for which assignments are kept.  [default: 30]")
    ] = None,
    grace_h: Annotated[float, typer.Option(min=0.0, help="Hours for which bytes without a row are kept.")] = 24.0,
    json: Json = False,
) -> None:
    """Collect garbage now.

    It removes models that newer rounds superseded, assignments of rounds that ended long ago, and stored bytes that no
    row points at. A coordinator does so by itself once a day, as its settings say; this command works whether one runs
    or not. The grace is for bundles that are being uploaded.
    """
    from coordinator.store.garbage_collection import collect as run
    from coordinator.store.tasks import open_coordinator_store

    settings = located(db, blobs, keep_models=keep_models, keep_assignments_days=keep_assignments_days)
    with open_coordinator_store(settings.database, settings.blobs, create=False) as store:
        removed = asdict(run(store, replace(settings.retention, grace_s=grace_h * 3600)))
    answer(removed, json)


@coordinator_app.command("config")
def show_config(config: Config = None, json: Json = False) -> None:
    """Show every setting as `serve` would have it.

    Also where each comes from; --json also says what it means. Passwords are left out.

    The exit code is 2 for an unknown setting or a wrong value, which is named.
    """
    from coordinator.settings import Settings, effective, load_settings

    flags = _flags(config)
    settings = effective(load_settings(flags), flags)
    if json:
        means = {name: field.description for name, field in Settings.model_fields.items()}
        emit({one.name: {"value": one.value, "source": one.source, "meaning": means[one.name]} for one in settings})
    else:
        rows = [(setting.name, setting.value, setting.source) for setting in settings]
        show_table(("setting", "value", "source"), rows)


@coordinator_app.command()
def token(
    name: Annotated[str, typer.Option(help="The holder's name; the history of a task shows it.")],
    role: Annotated[
        str, typer.Option(help="metrics is for Prometheus; viewer reads; operator also changes tasks.")
    ] = "viewer",
    population: Annotated[
        list[str] | None, typer.Option(help="Limit it to this population; repeatable.  [default: every one]")
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="It is for a proxy, which names a person in every request.")
    ] = False,
    days: Annotated[float, typer.Option(help="Days after which it expires; 3650 at most.")] = 90,
    db: Database = None,
    json: Json = False,
) -> None:
    """Make a token for the admin API and the dashboard.

    It is printed only now, since the database keeps only its hash.

    Run this where the database can be reached. `muster task --coordinator URL` takes the token from MUSTER_TOKEN.
    """
    from coordinator.api.authentication import issue
    from coordinator.rules.entities import Role
    from coordinator.store.database import Database as Store

    if role not in set(Role):
        raise typer.BadParameter(f"{role!r} is none of {', '.join(Role)}", param_hint="--role")
    with closing(Store(located(db).database, create=False)) as database:
        with database.reading() as records:
            unknown = sorted({*(population or ())} - records.populations())
        issued, text = issue(database, name, Role(role), days, populations=population or (), proxy=proxy)
    if unknown:
        remark(f"note: there is no population {', '.join(unknown)} yet; its first task makes it")
    if json:
        facts = {"id": issued.id, "name": issued.name, "role": issued.role, "expires_at": issued.expires_at}
        emit(facts | {"populations": issued.populations, "proxy": proxy, "token": text})
    else:
        say(text)


@coordinator_app.command("tokens")
def list_tokens(db: Database = None, json: Json = False) -> None:
    """List every token by its id, never its secret."""
    from coordinator.api.authentication import tokens
    from coordinator.store.database import Database as Store

    with closing(Store(located(db).database, create=False)) as database:
        issued, now = tokens(database), time.time()
    if json:
        emit([token.kept for token in issued])
    else:
        rows = [
            (token.id, token.name, token.role, token.of, token.state(now), at_utc(token.expires_at)) for token in issued
        ]
        show_table(("id", "name", "role", "populations", "state", "expires"), rows)


@coordinator_app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, from `muster coordinator tokens`.")],
    db: Database = None,
    json: Json = False,
) -> None:
    """Revoke a token, from now on."""
    from coordinator.api.authentication import revoke as end
    from coordinator.store.database import Database as Store

    with closing(Store(located(db).database, create=False)) as database:
        ended = end(database, token_id)
    shown = {"id": ended.id, "name": ended.name, "role": ended.role, "state": "revoked"}
    answer(ended.kept if json else shown, json)


def _trial_of(settings: Settings) -> AbstractContextManager[Settings]:
    from muster.local.server import trial

    return trial(settings)


def _say_next(addresses: Addresses, db: str | None, blobs: str | None, *, trial: bool) -> None:
    task = ["muster", "task", "create", "--plan", "plan", *FIRST_TASK, *given_again(db=db, blobs=blobs)]
    if trial:
        from muster.local.server import RELEASE_KEY

        task += ["--secagg", "--clip-norm", "1", "--release-key", str(RELEASE_KEY)]
    token = ["muster", "coordinator", "token", "--name", "you", *given_again(db=db)]
    say_next("create a task with what `muster export` wrote", task)
    say_next(f"make a token for the dashboard at {addresses.admin}", token)


def _flags(config: Path | None, **options: Any) -> dict[str, Any]:
    """The options that have a value. The settings read MUSTER_CONFIG, so a file of settings goes there."""
    if config is not None:
        os.environ["MUSTER_CONFIG"] = str(config)
    return {name: value for name, value in options.items() if value is not None}
