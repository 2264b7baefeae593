"""The device runtime in Kotlin, as processes of Java."""

import pytest

from simulator.errors import FleetError
from simulator.fleet.fork_servers import JVM_PROGRAM, java_command

TESTS = JVM_PROGRAM.parent / "test-classes"


def kotlin_command(name, *words):
    """The words that run a program of the tests in Kotlin; a skip where `make android` has not built them."""
    try:
        program, *options = java_command()
    except FleetError as error:
        pytest.skip(str(error))
    if not TESTS.exists():
        pytest.skip(f"there is no {TESTS}: `make android` builds it")
    options = options[: options.index("-jar")]
    return [program, *options, "-cp", f"{JVM_PROGRAM}:{TESTS}", f"dev.muster.device.jvm.{name}", *map(str, words)]
