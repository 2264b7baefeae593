"""Services as commands: they say when they are ready, and what comes next, and end well on SIGTERM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fedcore.termination import exit_on_sigterm
from muster.exit_codes import EXIT_TERMINATED
from muster.plain import remark

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
