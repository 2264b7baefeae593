"""`muster doctor`: what this installation can do."""

from __future__ import annotations

import typer

from muster.output import Json, emit, show_table


def doctor(json: Json = False) -> None:
    """Say what this installation can do, what it lacks, and how to get that.

    The exit code is 0 when everything that `muster demo` needs is there, 1 otherwise. The rest is for more than that:
    other runtimes, emulated ARM devices, a GPU.
    """
    from muster.doctor import examine

    report = examine()
    if json:
        emit(report)
    else:
        rows = [(one.name, one.found, one.purpose, "" if one.found else one.get) for one in report.findings]
        show_table(("what", "found", "for", "get it with"), rows)
        missing = [one.name for one in report.findings if one.needed and not one.found]
        typer.echo(f"muster demo lacks {', '.join(missing)}" if missing else "muster demo has what it needs")
    raise typer.Exit(0 if report.core_works else 1)
