"""Names of tasks: what a task may be called by people. Pure."""

from __future__ import annotations

from coordinator.errors import demand

LONGEST_NAME = 100


def check_name(name: str) -> str:
    """The name, if a task may have it. Several tasks may have one. Raises InvalidTask."""
    fits = 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()
    wording = f"1 to {LONGEST_NAME} printable characters, no space first or last"
    demand(fits, "the name of a task", wording, name)
    return name
