"""Promises of the specification, each with the scenario that shows it."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from muster.output import markdown
from tests.conformance.device import Device, started
from tests.device_runtime.coordinator import serving


@dataclass(frozen=True)
class Promise:
    """A behaviour that docs/spec/wire.md promises of a device. brief: in the sample that runs with every test run."""

    section: str
    what: str
    scenario: Callable[[object, Device], None]
    brief: bool

    @property
    def name(self):
        """The name of the scenario."""
        return self.scenario.__name__


PROMISES: list[Promise] = []
RUNTIMES = {"python": "Python", "node": "Node", "browser": "browser", "jvm": "Kotlin"}
"""The runtimes of this repository, by what `--device` calls them."""
OF_EACH = ("sends_a_kept_report", "sums_securely", "refuses_a_loop")
"""The scenarios that every run of the tests puts to runtimes whose start takes seconds of CPU time."""


def is_brief(one, runtime):
    """Whether every run of the tests puts a promise to a runtime; `make test-all` puts the others.

    Node has no other suite of what the specification promises.
    """
    return runtime == "node" or (one.brief and (runtime == "python" or one.name in OF_EACH))


def table():
    """The promises by runtime, in Markdown: which run of the tests puts each to it."""
    rows = [
        [
            f"[§{one.section}](spec/wire.md)",
            one.what,
            *("test" if is_brief(one, name) else "test-all" for name in RUNTIMES),
        ]
        for one in PROMISES
    ]
    return markdown(["wire", "a device keeps that", *RUNTIMES.values()], rows)


def promise(section, what, *, brief=False):
    """A decorator that makes a scenario, of a coordinator and a device, show a promise."""

    def made(scenario):
        PROMISES.append(Promise(section, what, scenario, brief))
        return scenario

    return made


@contextmanager
def stage(command_line, folder, run=started):
    """A coordinator that errs and lies where a scenario says so, and a device that it serves. It checks signatures."""
    with serving() as coordinator:
        coordinator.may_resend = True
        yield coordinator, Device(command_line, folder, coordinator.url, run)


def ended(outcome, *expected):
    """Assert an outcome and, where given, its reason."""
    found = (outcome["outcome"], outcome["reason"])[: len(expected)]
    assert found == expected, f"the session ended as {found}: {outcome.get('detail', '')}"
