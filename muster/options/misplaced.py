"""Settings of algorithms that were typed as options, or options as settings: an error says how to give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand


class CommandWithSet(TyperCommand):
    """A command with the options --set and --algorithm."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InvalidSetting for an option, or a bare KEY=VALUE, that is a setting, or for the reverse."""
        from fedcore.algorithms import setting_meant
        from fedcore.errors import InvalidSetting

        algorithm = _value_of("--algorithm", args) or "fedavg"
        for given in _values_of("--set", args):
            name, _, value = given.partition("=")
            option = f"--{name.replace('_', '-')}"
            if any(option in param.opts for param in self.params) and setting_meant(name, algorithm) is None:
                raise InvalidSetting(f"{name} is no setting of {algorithm} but an option: {option} {value}".rstrip())
        for word, value in self._strange(args):
            found = setting_meant(word.lstrip("-").replace("-", "_"), algorithm)
            if found is not None:
                given = f"{found[0]}={value or 'VALUE'}"
                raise InvalidSetting(f"no option {word}: {found[0]} is a setting of {found[1]}: --set {given}")
        return super().parse_args(ctx, args)

    def _strange(self, args: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Words that are no option here, nor the value of one: each with the value that seems to be meant."""
        known = {name: param for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for before, word, after in zip(["", *args], args, [*args[1:], ""], strict=False):
            taken = before in known and not getattr(known[before], "is_flag", False)
            name, equals, value = word.partition("=")
            if name in known or taken or not (equals or name.startswith("--")):
                continue
            yield name, value if equals else "" if after.startswith("--") else after


def _value_of(option: str, args: Sequence[str]) -> str:
    """What an option is given first; empty without it."""
    return next(iter(_values_of(option, args)), "")


def _values_of(option: str, args: Sequence[str]) -> list[str]:
    """What an option is given, each time that it is there."""
    joined = [word.partition("=")[2] for word in args if word.startswith(f"{option}=")]
    return joined + [value for name, value in pairwise(args) if name == option]
