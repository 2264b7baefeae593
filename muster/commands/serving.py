"""Services as commands: their first lines, and `muster authority`, the enrolment authority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from authority.configuration import AuthorityConfig
from fedcore.private_files import exit_on_sigterm
from fedcore.validation import build
from muster.options.settings import with_settings
from muster.output import Json, emit, say, say_next
from muster.plain import EXIT_TERMINATED, remark

if TYPE_CHECKING:
    from fedcore.signing import SucceedingKey


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


@authority_app.command()
@with_settings(AuthorityConfig)
def serve(*, settings: Mapping[str, Any], ready_file: ReadyFile = None) -> None:
    """Vouch for devices, and draw beacons, until SIGTERM or Ctrl-C.

    A secure round in groups of more than 64 devices needs a beacon: name the key that `muster coordinator keys show`
    prints with --server-key.

    Run it where the coordinator's operator cannot reach its key: as another user, better on another machine, ideally in
    another organisation. Its protection from a coordinator that invents devices is only as good as that separation.
    """
    from authority.server import serve as run
    from coordinator.logs import configure_logs
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
