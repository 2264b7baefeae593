"""The configuration of an authority, whose fields describe themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from authority.errors import InvalidSettings
from fedcore.validation import check, checked, setting

Limit = Annotated[int, msgspec.Meta(ge=0)]
_SHARED = "File with the secret that devices must know; the coordinator has another."


@checked(InvalidSettings)
@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityConfig:
    """How an authority runs. The limits fit into the 1024 open files that a process may usually have.

    Raises InvalidSettings, naming the setting.
    """

    key: Annotated[Path, setting("File of the private key, from `muster authority new-key`.")]
    host: Annotated[str, setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 8082
    accept_unattested: Annotated[bool, setting("Vouch for devices without evidence; only for development.")] = False
    enrolment_secret_file: Annotated[Path, setting(_SHARED)] | None = None
    android_file: Annotated[Path, setting("File of the Android phones that may enrol, and their app.")] | None = None
    apple_file: Annotated[Path, setting("File of the app whose iOS devices may enrol, by App Attest.")] | None = None
    credential_days: Annotated[
        float, setting("Days that a credential is valid; devices renew it in time.", unit="days", ge=0.01, le=366)
    ] = 30.0
    server_keys: Annotated[
        tuple[str, ...], setting("Public key of a coordinator for which to draw beacons; may be repeated.")
    ] = ()
    tls_cert: Annotated[Path, setting("Certificate chain, PEM; with it the port speaks HTTPS.")] | None = None
    tls_key: Annotated[Path, setting("Its private key, PEM.")] | None = None
    connection_limit: Annotated[int, setting("Most idle connections, and most uploads in progress.", ge=1)] = 400
    address_connection_limit: Annotated[Limit, setting("Most idle connections of one address; 0 is no limit.")] = 100
    address_limit_per_minute: Annotated[
        Limit, setting("Most credentials, and most beacons, that one address asks for; 0 is no limit.")
    ] = 600
    trusted_proxies: Annotated[
        tuple[str, ...], setting("Addresses or networks of proxies, by commas, whose connections are not limited.")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], setting("Origins, by commas, whose web pages may be devices, such as https://app.example.")
    ] = ()

    def __post_init__(self) -> None:
        check(self)
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise InvalidSettings("tls_cert and tls_key go together")
