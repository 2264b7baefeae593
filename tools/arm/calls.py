"""Calls of this machine's programs; errors quote their output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from simulator.errors import SysrootError


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program and return its output. Raises SysrootError with the reason if it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"} if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SysrootError(f"cannot run {command[0]} on this machine: {error.strerror}") from error
    if done.returncode:
        raise SysrootError(f"`{' '.join(command)}` failed: {_reason(done.stderr or done.stdout, done.returncode)}")
    return done.stdout


def _reason(words: str, code: int) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()] or [f"exit code {code}"]
    telling = [line for line in lines if line.lower().startswith(("e:", "error"))] or lines
    return telling[-1]
