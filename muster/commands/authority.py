"""`muster authority`: the enrolment authority, a process apart from the coordinator."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli import EXIT_TERMINATED
from muster.output import Json, emit, say_next

if TYPE_CHECKING:
    from ingress.addresses import Network

authority_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run the enrolment authority, which says who is a device."
)


@authority_app.command("new-key")
def new_key(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. Keep a copy of it apart: devices trust no other key. The coordinator must never
    have it; the settings of the coordinator and the policies of devices name the public key.
    """
    from fedcore.signing import key_text
    from fedcore.succession import SucceedingKey

    key = SucceedingKey.new("authority")
    key.save(out)
    text = key_text(key.public)
    if json:
        emit({"file": str(out), "authority": text})
    else:
        typer.echo(text)


@authority_app.command()
def rotate(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the private key; the new key replaces it.")],
    json: Json = False,
) -> None:
    """Give the authority's key a successor, and print its public key.

    The old key signs the new one, which takes its place.

    Then restart the authority, and the coordinator with the new public key. Devices follow by themselves.
    """
    from fedcore.signing import key_text
    from fedcore.succession import SucceedingKey

    successor = SucceedingKey.load("authority", key).successor()
    successor.save(key, replace=True)
    text = key_text(successor.public)
    if json:
        emit({"file": str(key), "authority": text})
    else:
        typer.echo(text)


@authority_app.command()
def serve(
    key: Annotated[Path, typer.Option(metavar="FILE", help="The private key, from `muster authority new-key`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8082,
    accept_unattested: Annotated[
        bool, typer.Option("--accept-unattested", help="Vouch for devices without evidence; only for development.")
    ] = False,
    enrolment_secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret that devices prove to know; the coordinator has another.")
    ] = None,
    android_file: Annotated[
        Path | None, typer.Option(help="File that says which Android phones are taken, and for which app.")
    ] = None,
    credential_days: Annotated[
        float, typer.Option(min=0.01, max=366.0, help="Days for which a credential is good; devices renew in time.")
    ] = 30.0,
    server_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Draw beacons for the coordinator with this key; may be repeated."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain, PEM; with it the port speaks HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    connection_limit: Annotated[
        int, typer.Option(min=1, help="Connections that may wait for a request, and bodies on their way.")
    ] = 400,
    address_connection_limit: Annotated[
        int, typer.Option(min=0, help="Those of one address that may wait for a request; 0 is no limit.")
    ] = 100,
    trusted_proxies: Annotated[
        str, typer.Option(help="Addresses or networks of proxies, by commas: their connections are not limited.")
    ] = "",
    ready_file: Annotated[Path | None, typer.Option(help="Write the URL here when ready.")] = None,
) -> None:
    """Vouch for devices, and draw beacons, until SIGTERM or Ctrl-C.

    A secure round in groups of more than 64 devices needs a beacon: name the key that `muster coordinator keys show`
    prints with --server-key.

    Run it where whoever runs the coordinator cannot reach its key: secure rounds protect from a coordinator that makes
    devices up as far as the two are apart.
    """
    from authority.server import AuthorityConfig
    from authority.server import serve as run
    from coordinator.logs import configure_logs
    from fedcore.signing import key_text
    from fedcore.succession import SucceedingKey

    if (tls_cert is None) is not (tls_key is None):
        raise typer.BadParameter("goes together with --tls-key", param_hint="--tls-cert")
    config = AuthorityConfig(
        key=key,
        host=host,
        port=port,
        accept_unattested=accept_unattested,
        enrolment_secret_file=enrolment_secret_file,
        android_file=android_file,
        credential_days=credential_days,
        server_keys=tuple(server_key or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        connection_limit=connection_limit,
        address_connection_limit=address_connection_limit,
        proxies=_proxies(trusted_proxies),
    )
    for_people = configure_logs("info", "auto")
    ready = False

    def on_ready(url: str) -> None:
        nonlocal ready
        ready = True
        typer.echo(f"authority ready at {url}", err=True)
        public = key_text(SucceedingKey.load("authority", key).public)
        if for_people:
            command = ["muster", "coordinator", "serve", "--authority", public, "--authority-url", url]
            say_next("start a coordinator that goes by it", command)
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.write_text(url)
            partial.replace(ready_file)

    def terminate(*_: object) -> None:
        # Once it runs, the server handles SIGTERM itself and raises it again when it has stopped: a good end.
        if not ready:
            sys.exit(EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    with suppress(KeyboardInterrupt):
        run(config, on_ready)


def _proxies(text: str) -> tuple[Network, ...]:
    from ingress.addresses import networks

    try:
        return networks(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--trusted-proxies") from error
