"""`muster doctor`: the examination of an installation."""

from __future__ import annotations

import typer

from muster.output import Json, emit, show_fields, show_table


def doctor(json: Json = False) -> None:
    """Say what this installation can do and what it lacks.

    The exit code is 0 when everything that `muster demo` needs is there, 1 otherwise. The rest is for more than that:
    other runtimes, emulated ARM devices, a GPU.
    """
    from muster.doctor import examine

    report = examine()
    if json:
        emit(report)
    else:
        show_table(("what", "found", "for"), [(one.name, one.found, one.purpose) for one in report.findings])
        lacking = {one.name: one.get for one in report.findings if not one.found}
        if lacking:
            typer.echo("\nHow to get what was not found:")
            show_fields(lacking)
        typer.echo()
        missing = [one.name for one in report.findings if one.needed and not one.found]
        typer.echo(f"muster demo lacks {', '.join(missing)}" if missing else "muster demo has what it needs")
    raise typer.Exit(0 if report.core_works else 1)
