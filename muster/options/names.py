"""The two names of a setting: its keyword in Python and in files, and its option in a command. Errors name options."""

from __future__ import annotations

import re

_OPTIONS = {"settings": "--set", "server_keys": "--server-key"}
"""Options that have another name than their setting."""
_KEYWORDS = {option: name for name, option in _OPTIONS.items()} | {
    "--dataset": "users",
    "--format": "formats",
    "--set": "settings",
}
# A command between backquotes stays one. A value ends before the punctuation after it.
_PART = re.compile(r"`[^`]*`|(?<![\w-])(--[a-z][a-z-]*)(?:=('[^']*'|[^\s,;()]*[^\s,;:().]))?")


def option_of(name: str) -> str:
    """The option of a setting."""
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def in_python(message: str) -> str:
    """A message with keywords for the options in it: `--at-once=1` is `at_once=1`, and `--resume` a call."""
    return _PART.sub(_keyword, message)


def _keyword(part: re.Match[str]) -> str:
    option, value = part.groups()
    if option is None:
        return part[0]
    if value is not None and not re.fullmatch(r"'.*'|[A-Z]+|[\d.]+", value):
        value = repr(value)
    if option == "--resume":
        return f"simulator.resume_run({value or ''})"
    return f"{_KEYWORDS.get(option) or option[2:].replace('-', '_')}={value or ''}"
