"""Commands on the standard library's argparse, each a function whose docstring is its help."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any


class Group:
    """Commands under one name. Parsed arguments have the command's function as `act`.

    `usage` of parsed arguments says what is wrong with them, and ends the process with exit code 2.
    """

    def __init__(self, name: str, about: str, parser: argparse.ArgumentParser | None = None) -> None:
        self.parser = parser or argparse.ArgumentParser(prog=name, description=about, allow_abbrev=False)
        self._commands = self.parser.add_subparsers(metavar="COMMAND", required=True)

    def command(self, act: Callable[[argparse.Namespace], Any], name: str = "") -> argparse.ArgumentParser:
        """A command that runs `act`, with --json; its name is that of the function if not given."""
        about = inspect.cleandoc(act.__doc__ or "")
        parser = self._commands.add_parser(
            name or act.__name__.replace("_", "-"),
            help=about.partition("\n")[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object on standard output and nothing else there."
        )
        parser.set_defaults(act=act, usage=parser.error)
        return parser

    def group(self, name: str, about: str) -> Group:
        """A group inside this one."""
        return Group(name, about, self._commands.add_parser(name, help=about, description=about))

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parsed arguments. Raises SystemExit: with 2, after saying what is wrong with them; with 0 after help."""
        return self.parser.parse_args(arguments)


def at_least_one(text: str) -> int:
    """A whole number from 1 on. Raises argparse.ArgumentTypeError."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number
