"""`muster authority`: the enrolment authority, a process apart from the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from muster.commands.serving import ReadyFile, serve_until_terminated
from muster.output import Json, emit, say, say_next

if TYPE_CHECKING:
    from authority.server import AuthorityConfig
    from fedcore.succession import SucceedingKey

T = TypeVar("T")
authority_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run the enrolment authority, which vouches for devices."
)
Key = Annotated[Path, typer.Option(metavar="FILE", help="The private key, from `muster authority new-key`.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
AcceptUnattested = Annotated[
    bool, typer.Option("--accept-unattested", help="Vouch for devices without evidence; only for development.")
]
SecretFile = Annotated[
    Path | None, typer.Option(help="File with the secret that devices must know; the coordinator has another.")
]
AndroidFile = Annotated[
    Path | None, typer.Option(help="File that says which Android phones may enrol, and for which app.")
]
AppleFile = Annotated[
    Path | None, typer.Option(help="File that names the app whose iOS devices may enrol, by App Attest.")
]
CredentialDays = Annotated[
    float, typer.Option(min=0.01, max=366.0, help="Days that a credential is valid; devices renew it in time.")
]
ServerKeys = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="Draw beacons for the coordinator with this key; may be repeated."),
]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain, PEM; with it the port speaks HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key, PEM.")]
ConnectionLimit = Annotated[int, typer.Option(min=1, help="Idle connections and uploads in progress, at most.")]
AddressConnectionLimit = Annotated[
    int, typer.Option(min=0, help="Idle connections of one address, at most; 0 is no limit.")
]
AddressLimit = Annotated[
    int, typer.Option(min=0, help="Credentials and beacons that one address may ask for in a minute; 0 is no limit.")
]
Proxies = Annotated[
    str, typer.Option(help="Addresses or networks of proxies, by commas, whose connections are not limited.")
]

Origins = Annotated[
    str, typer.Option(help="Origins, by commas, whose web pages may be devices, such as https://app.example.")
]


@authority_app.command("new-key")
def new_key(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. Keep a copy elsewhere: devices trust no other key. The coordinator must never have
    it; its settings and the devices' policies name the public key.
    """
    from fedcore.succession import SucceedingKey

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
    from fedcore.succession import SucceedingKey

    successor = SucceedingKey.load("authority", key).successor()
    successor.save(key, replace=True)
    _tell(key, successor, json)


@authority_app.command()
def serve(
    key: Key,
    host: Host = "127.0.0.1",
    port: Port = 8082,
    accept_unattested: AcceptUnattested = False,
    enrolment_secret_file: SecretFile = None,
    android_file: AndroidFile = None,
    apple_file: AppleFile = None,
    credential_days: CredentialDays = 30.0,
    server_key: ServerKeys = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    connection_limit: ConnectionLimit = 400,
    address_connection_limit: AddressConnectionLimit = 100,
    address_limit_per_minute: AddressLimit = 600,
    trusted_proxies: Proxies = "",
    allowed_origins: Origins = "",
    ready_file: ReadyFile = None,
) -> None:
    """Vouch for devices, and draw beacons, until SIGTERM or Ctrl-C.

    A secure round in groups of more than 64 devices needs a beacon: name the key that `muster coordinator keys show`
    prints with --server-key.

    Run it where the coordinator's operator cannot reach its key: as another user, better on another machine, ideally in
    another organisation. Its protection from a coordinator that invents devices is only as good as that separation.
    """
    from authority.server import AuthorityConfig
    from ingress.addresses import networks
    from ingress.origins import origins

    if (tls_cert is None) is not (tls_key is None):
        raise typer.BadParameter("goes together with --tls-key", param_hint="--tls-cert")
    config = AuthorityConfig(
        key=key,
        host=host,
        port=port,
        accept_unattested=accept_unattested,
        enrolment_secret_file=enrolment_secret_file,
        android_file=android_file,
        apple_file=apple_file,
        credential_days=credential_days,
        server_keys=tuple(server_key or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        connection_limit=connection_limit,
        address_connection_limit=address_connection_limit,
        address_limit_per_minute=address_limit_per_minute,
        proxies=_parsed(networks, trusted_proxies, "--trusted-proxies"),
        origins=_parsed(origins, allowed_origins, "--allowed-origins"),
    )
    _run(config, ready_file)


def _tell(file: Path, key: SucceedingKey, json: bool) -> None:
    from fedcore.signing import key_text

    text = key_text(key.public)
    if json:
        emit({"file": str(file), "authority": text})
    else:
        say(text)


def _run(config: AuthorityConfig, ready_file: Path | None) -> None:
    from authority.server import serve as run
    from coordinator.logs import configure_logs
    from fedcore.signing import key_text
    from fedcore.succession import SucceedingKey

    for_people = configure_logs("info", "auto")

    def guide(urls: tuple[str]) -> None:
        """Suggest the next command to a person."""
        if for_people:
            public = key_text(SucceedingKey.load("authority", config.key).public)
            command = ["muster", "coordinator", "serve", "--authority", public, "--authority-url", urls[0]]
            say_next("start a coordinator that goes by it", command)

    serve_until_terminated("authority", lambda on_ready: run(config, lambda url: on_ready((url,))), guide, ready_file)


def _parsed(parse: Callable[[str], T], text: str, option: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
