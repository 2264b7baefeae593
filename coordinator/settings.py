"""Settings of the service: defaults, over which a TOML file, over which MUSTER_… environment variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from fedcore.wire.messages import RetryWindow


class Settings(BaseSettings):
    """How the coordinator runs. Seconds and bytes are in the names."""

    model_config = SettingsConfigDict(env_prefix="MUSTER_", frozen=True, extra="forbid")

    database: str = Field("sqlite:///muster.db", description="SQLite file, as sqlite:///PATH")
    blobs: Path = Field(Path("muster-blobs"), description="folder of plans, graphs, checkpoints and server states")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    retry_min_s: float = Field(5.0, ge=0, description="earliest return of a device that got no work")
    retry_max_s: float = Field(30.0, ge=0, description="latest return of a device that got no work")
    max_wait_s: float = Field(60.0, ge=0, description="longest time that a device may wait for an assignment")
    queue_limit: int = Field(4096, ge=1, description="requests that may wait for the driver; more are answered 503")
    message_limit_bytes: int = Field(65536, ge=1024, description="largest JSON message that is read")

    @property
    def retry(self) -> RetryWindow:
        """When a device that got no work should come back."""
        return RetryWindow(self.retry_min_s, max(self.retry_min_s, self.retry_max_s))

    @classmethod
    def load(cls, toml: Path | None = None, **given: object) -> Settings:
        """Settings from a TOML file, if any, the environment, and `given`, which wins.

        Raises pydantic.ValidationError naming the setting.
        """

        class FromFile(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], **sources: PydanticBaseSettingsSource
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                file = TomlConfigSettingsSource(settings_cls, toml)
                return sources["init_settings"], sources["env_settings"], file

        return cls.model_validate(FromFile(**given).model_dump()) if toml else cls(**given)  # type: ignore[arg-type]
