import functools
import sys

import pytest
import resvg_py

from muster.cli import main
from muster.pictures import draws_words
from tests.muster.warm_commands import warm_commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """A folder for the PATH of a shell: `muster` and `python` that start at once."""
    with warm_commands(tmp_path_factory.mktemp("commands")) as folder:
        yield folder


@pytest.fixture
def font():
    """A font for PNG files; tests that draw them skip without one."""
    if not draws_words():
        pytest.skip("no font is installed (apt install fonts-dejavu-core)")


@pytest.fixture
def without_fonts(monkeypatch):
    """A machine on which no font is installed."""
    monkeypatch.setattr("resvg_py.svg_to_bytes", functools.partial(resvg_py.svg_to_bytes, skip_system_fonts=True))


@pytest.fixture
def typed(monkeypatch, capsys):
    """What a shell sees of a command, without a process of its own: exit code, output and error output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["muster", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run
