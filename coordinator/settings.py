"""Settings of the service: arguments, then MUSTER_… in the environment, then the TOML file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import pydantic_settings
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from coordinator.errors import InvalidSettings, UnusableStore
from coordinator.rules.progress import NO_DEVICES_AFTER_H
from coordinator.store.database import printable, sqlite_path
from coordinator.store.garbage_collection import Retention
from fedcore.errors import InvalidKey, in_our_words
from fedcore.signing import public_key
from fedcore.wire.messages import RetryWindow
from ingress.limits import Network, networks
from ingress.server import origins as origins_in

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LEAST_SECRET_BYTES = 16


def place_of(url: str) -> str:
    """An address without its user, path and query, any of which may hold a secret."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def check_webhook(url: str) -> None:
    """Raises ValueError for an address that alerts are not sent to, without the parts of it that may be secret."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        shown = f"{url.partition('://')[0]}://…" if "://" in url else "it"
        raise ValueError(f"{shown} is no address for alerts; give one such as https://alerts.example/muster")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ValueError(f"{place_of(url)} is not this machine, and http protects nothing on the way; give https")


def read_secret(path: Path) -> bytes:
    """The secret of a file, without white space around it. Raises ValueError for one that is no secret."""
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"the webhook's secret {path} cannot be read: {error.strerror}") from error
    if mode & 0o007:
        raise ValueError(f"everybody on this machine may read or change the webhook's secret: chmod 600 {path}")
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ValueError(f"{path} holds {len(secret)} bytes; a webhook's secret has at least {_LEAST_SECRET_BYTES}")
    return secret


PREFIX = "MUSTER_"
CONFIG = f"{PREFIX}CONFIG"
_OWN_BYTES, _CONNECTION_BYTES = 1 << 29, 50_000
"""The memory of a process without requests, with signatures that it remembers and a delta in the making, and of one
connection."""
_FILES = ("tls_cert", "tls_key", "enrolment_secret_file", "android_file", "apple_file", "alert_webhook_secret_file")


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Accepts only text that `read` can read."""

    def check(value: str) -> str:
        try:
            read(value)
        except InvalidKey as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(check)


class Settings(pydantic_settings.BaseSettings):
    """How the coordinator runs. Seconds and bytes are in the names."""

    model_config = pydantic_settings.SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )

    database: str = Field(
        default="sqlite:///muster.db", description="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"
    )
    keys: Path | None = Field(
        default=None,
        description="file of the server's key, the same at all replicas; beside the SQLite file if not given",
    )
    blobs: Annotated[str, BeforeValidator(str)] = Field(
        default="muster-blobs",
        description="folder of plans, graphs, checkpoints and server states, or s3://…, gs://…, az://…",
    )
    role: Literal["all", "api", "driver"] = Field(
        default="all", description="all; api: drive nothing, pass requests on; driver: answer only other replicas"
    )
    replica_url: str | None = Field(
        default=None,
        description="where the other replicas reach this one; the address on which it listens if not given",
    )
    lease_s: float = Field(
        default=15.0, gt=0, description="after so long without a sign of life the others take a replica's populations"
    )
    host: str = Field(default="127.0.0.1", description="address on which devices are served")
    port: int = Field(default=8080, ge=0, le=65535, description="port for devices; 0 takes a free one")
    accept_unattested: bool = Field(default=False, description="enrol devices without evidence; only for development")
    enrolment_secret_file: Path | None = Field(
        default=None, description="file with the secret that devices prove to know when they enrol"
    )
    android_file: Path | None = Field(
        default=None, description="file that says which Android phones are enrolled, and for which app"
    )
    apple_file: Path | None = Field(
        default=None, description="file that says for which app iOS devices are enrolled, by App Attest"
    )
    authority: Annotated[str, _readable(public_key)] | None = Field(
        default=None, description="public key of the enrolment authority, which secure rounds need, as ed25519:…"
    )
    authority_url: str | None = Field(default=None, description="where devices reach the enrolment authority")
    questions_need_noise: bool = Field(default=False, description="refuse questions that ask for no noise")
    admin_host: str = Field(default="127.0.0.1", description="address of the admin API and the dashboard")
    admin_port: int = Field(default=8081, ge=0, le=65535, description="their port; 0 takes a free one")
    loopback_viewer: bool = Field(
        default=False, description="allow viewing at the admin port without a token; only on loopback"
    )
    alert_webhook: str | None = Field(
        default=None, description="URL that is told of each alert, raised or cleared: https, or http to this machine"
    )
    alert_webhook_secret_file: Path | None = Field(
        default=None, description="file with the secret that signs what it is told, 16 bytes at least"
    )
    tls_cert: Path | None = Field(default=None, description="certificate chain, PEM; with it both ports speak HTTPS")
    tls_key: Path | None = Field(default=None, description="its private key, PEM")
    trusted_proxies: Annotated[str, _readable(networks)] = Field(
        default="", description="addresses or networks, by commas, whose X-Forwarded-For and -Proto are believed"
    )
    allowed_origins: Annotated[str, _readable(origins_in)] = Field(
        default="", description="origins, by commas, whose web pages may be devices, such as https://app.example"
    )
    page: Path | None = Field(
        default=None, description="folder of the web page that make page builds; with it browsers take part at /page/"
    )
    page_url: str | None = Field(
        default=None,
        description="where browsers reach the page, such as https://fl.example/page/, for the dashboard's link and QR "
        "code; if not given, /page/ where the other replicas reach this one",
    )
    algorithms: str = Field(
        default="", description="modules, by commas, from which algorithms that are not built in may be imported"
    )
    retry_min_s: float = Field(default=5.0, ge=0, description="earliest return of a device, whatever its pace")
    retry_max_s: float = Field(default=86_400.0, ge=0, description="latest return of a device, whatever its pace")
    max_wait_s: float = Field(default=60.0, ge=0, description="longest time that a device may wait for an assignment")
    queue_limit: int = Field(
        default=4096, ge=1, description="requests that may wait for the driver; more are answered 503"
    )
    connection_limit: int = Field(
        default=10_000, ge=1, description="device requests in progress, waiting ones too; more are answered 503"
    )
    address_connection_limit: int = Field(
        default=1000,
        ge=0,
        description="connections of one address that wait for a request, and its requests in progress; 0 is no limit",
    )
    address_limit_per_minute: int = Field(
        default=6000, ge=0, description="requests from one address; more are answered 429; 0 is no limit"
    )
    device_limit_per_minute: int = Field(
        default=600, ge=0, description="requests of one device; more are answered 429; 0 is no limit"
    )
    message_limit_bytes: int = Field(default=65536, ge=1024, description="largest JSON message that is read")
    reports_bytes: int = Field(
        default=1 << 30, ge=1024, description="memory for reports on their way in, in all; more are answered 503"
    )
    answers_bytes: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="memory for answers that wait to be read, in all; more cut off the slowest readers",
    )
    upload_limit_bytes: int = Field(default=1 << 28, ge=1024, description="largest blob that an operator may upload")
    collect_every_h: float = Field(
        default=24.0, ge=0, description="hours from one garbage collection to the next; 0 is never"
    )
    no_devices_after_h: float = Field(
        default=NO_DEVICES_AFTER_H, ge=0, description="hours without an accepted check-in after which a task is stalled"
    )
    keep_models: int = Field(default=5, ge=1, description="rounds of each task whose models are kept by a collection")
    keep_assignments_days: float = Field(
        default=30.0, ge=1, description="days for which a collection keeps who took part"
    )
    drain_s: float = Field(default=30.0, ge=0, le=3600, description="how long a stop waits for requests in progress")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto", description="text for people, JSON for machines; auto is text on a terminal"
    )

    @field_validator("page_url")
    @classmethod
    def _is_a_page(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "https://fl.example/")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or not parts.path.endswith("/"):
            raise ValueError(
                f"{value!r} is not the address of a page, which ends in /, such as https://fl.example/page/"
            )
        return value

    @field_validator("alert_webhook")
    @classmethod
    def _may_be_told(cls, value: str | None) -> str | None:
        if value is not None:
            check_webhook(value)
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.alert_webhook is None) is not (self.alert_webhook_secret_file is None):
            raise ValueError("alert_webhook and alert_webhook_secret_file go together; give both or none")
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; give both or none")
        if (self.authority is None) is not (self.authority_url is None):
            raise ValueError("authority and authority_url go together; give both or none")
        for name in _FILES:
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name} names {str(path)!r}, which is not a file")
        if self.alert_webhook_secret_file is not None:
            read_secret(self.alert_webhook_secret_file)
        if self.page is not None and not (self.page / "index.html").is_file():
            raise ValueError(f"page names {str(self.page)!r}, where no page is built; `make page` builds one there")
        if self.loopback_viewer and self.admin_host not in LOOPBACK:
            raise ValueError(f"loopback_viewer needs an admin_host of {', '.join(LOOPBACK)}, not {self.admin_host}")
        return self

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The networks of `trusted_proxies`."""
        return networks(self.trusted_proxies)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `allowed_origins`."""
        return origins_in(self.allowed_origins)

    @property
    def algorithm_modules(self) -> tuple[str, ...]:
        """The modules of `algorithms`."""
        return tuple(filter(None, map(str.strip, self.algorithms.split(","))))

    @property
    def keys_file(self) -> Path:
        """Where the private keys are. Raises UnusableStore when nothing says so."""
        beside = sqlite_path(self.database)
        if self.keys is None and beside is None:
            raise UnusableStore("name the file of the private keys (MUSTER_KEYS), the same at all replicas")
        return self.keys or Path(f"{beside}.keys")

    @property
    def enrols(self) -> bool:
        """Whether anything is accepted of a new device, so that one can enrol."""
        named = self.enrolment_secret_file, self.android_file, self.apple_file, self.authority
        return self.accept_unattested or any(setting is not None for setting in named)

    @property
    def retry(self) -> RetryWindow:
        """The bounds of when a device comes back; within them pace steering says when."""
        return RetryWindow(self.retry_min_s, max(self.retry_min_s, self.retry_max_s))

    @property
    def deltas_bytes(self) -> int:
        """The part of `answers_bytes` that is for deltas between checkpoints."""
        return self.answers_bytes // 4

    @property
    def most_bytes(self) -> int:
        """The memory of a process whose limits are all used up, as docs/operations.md counts it."""
        answers = 2 * (self.answers_bytes - self.deltas_bytes) + self.deltas_bytes  # on two ports
        return (
            _OWN_BYTES
            + self.reports_bytes
            + answers
            + self.connection_limit * (self.message_limit_bytes + _CONNECTION_BYTES)
        )

    @property
    def soon(self) -> RetryWindow:
        """When a device comes back after a problem that passes: half a minute at the latest, if bounds allow it."""
        return RetryWindow(self.retry_min_s, min(max(30.0, self.retry_min_s), self.retry.max_s))

    @property
    def retention(self) -> Retention:
        """The retention of garbage collection."""
        return Retention(models=self.keep_models, assignments_s=86_400 * self.keep_assignments_days)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        env_settings: pydantic_settings.PydanticBaseSettingsSource,
        dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
        file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, which wins over the TOML file; no other source is read."""
        return init_settings, env_settings, pydantic_settings.TomlConfigSettingsSource(settings_cls, _config_file())


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting as it is in force: `value` without secrets, and where it came from."""

    name: str
    value: Any
    source: str


def load_settings(arguments: Mapping[str, Any]) -> Settings:
    """The settings in force, `arguments` before every other source.

    Raises InvalidSettings with one line that names every setting which is unknown or wrong, and where it came from.
    """
    _refuse_misspelt()
    try:
        return Settings(**arguments)
    except ValidationError as error:
        wrong = "; ".join(_wording(problem, arguments) for problem in error.errors())
        raise InvalidSettings(wrong) from error
    except (FileNotFoundError, tomllib.TOMLDecodeError) as error:
        raise InvalidSettings(f"{os.environ.get(CONFIG)}: {error}") from error


def effective(settings: Settings, arguments: Mapping[str, Any]) -> list[Effective]:
    """Every setting of `settings`, which `load_settings(arguments)` made, with its source; passwords are left out."""
    values = settings.model_dump(mode="json") | {"database": printable(settings.database)}
    if settings.alert_webhook is not None:
        values["alert_webhook"] = place_of(settings.alert_webhook)
    return [Effective(name, values[name], _source(name, arguments)) for name in Settings.model_fields]


def _source(name: str, arguments: Mapping[str, Any]) -> str:
    if name in arguments:
        return "argument"
    if name in pydantic_settings.EnvSettingsSource(Settings)():
        return f"{PREFIX}{name.upper()}"
    config = _config_file()
    return str(config) if name in pydantic_settings.TomlConfigSettingsSource(Settings, config)() else "default"


def _wording(problem: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    name = ".".join(map(str, problem["loc"]))
    message = in_our_words(str(problem["msg"])).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, Settings.model_fields, 1)
        message = f"there is no such setting{f'; did you mean {close[0]}?' if close else ''}"
    return f"{name} ({_source(name, arguments)}): {message}" if name else message


def _refuse_misspelt() -> None:
    """A variable that is nearly a setting is a typing error: silence would leave the default in force."""
    names = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    for variable in sorted(name for name in os.environ if name.startswith(PREFIX)):
        close = difflib.get_close_matches(variable, names, 1, cutoff=0.85)
        if close and variable not in names and variable != CONFIG:
            raise InvalidSettings(f"{variable} (environment): there is no such setting; did you mean {close[0]}?")


def _config_file() -> Path | None:
    named = os.environ.get(CONFIG)
    if named and not Path(named).is_file():
        raise FileNotFoundError(f"{CONFIG} names {named!r}, which is not a file")
    return Path(named) if named else None
