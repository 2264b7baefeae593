"""Settings of the service: arguments, then MUSTER_… in the environment, then the TOML file that MUSTER_CONFIG names."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from coordinator.errors import MissingStore
from coordinator.store.engines import sqlite_path
from fedcore.wire.messages import RetryWindow


class Settings(BaseSettings):
    """How the coordinator runs. Seconds and bytes are in the names."""

    model_config = SettingsConfigDict(env_prefix="MUSTER_", frozen=True, extra="forbid")

    database: str = Field(
        default="sqlite:///muster.db", description="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"
    )
    keys: Path | None = Field(
        default=None, description="file of the coordinator's own keys; by default beside an SQLite database"
    )
    blobs: Path = Field(
        default=Path("muster-blobs"), description="folder of plans, graphs, checkpoints and server states"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    retry_min_s: float = Field(
        default=5.0, ge=0, allow_inf_nan=False, description="earliest return of a device that got no work"
    )
    retry_max_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="latest return of a device that got no work"
    )
    max_wait_s: float = Field(default=60.0, ge=0, description="longest time that a device may wait for an assignment")
    queue_limit: int = Field(
        default=4096, ge=1, description="requests that may wait for the driver; more are answered 503"
    )
    message_limit_bytes: int = Field(default=65536, ge=1024, description="largest JSON message that is read")

    @property
    def keys_file(self) -> Path:
        """Where the coordinator's own keys lie. Raises MissingStore when nothing says so."""
        beside = sqlite_path(self.database)
        if self.keys is None and beside is None:
            raise MissingStore(
                "name the file of the coordinator's keys (MUSTER_KEYS): one for all that share a database"
            )
        return self.keys or Path(f"{beside}.keys")

    @property
    def retry(self) -> RetryWindow:
        """When a device that got no work should come back."""
        return RetryWindow(self.retry_min_s, max(self.retry_min_s, self.retry_max_s))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, which wins over the TOML file; no other source is read."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, _config_file())


def _config_file() -> Path | None:
    named = os.environ.get("MUSTER_CONFIG")
    if named and not Path(named).is_file():
        raise FileNotFoundError(f"MUSTER_CONFIG names {named!r}, which is not a file")
    return Path(named) if named else None
