"""Every promise put to one device, as a table: `python -m tests.conformance --device "…"`; see README.md."""

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from simulator.errors import FleetError
from tests.conformance import attested, plain, secure  # noqa: F401  # they make promises
from tests.conformance.device import known
from tests.conformance.promises import PROMISES, stage, table


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--device",
        metavar="COMMAND",
        help="python, node, browser, jvm, or a command line with places to fill in: README.md",
    )
    parser.add_argument("--only", default="", metavar="NAME", help="scenarios whose name holds this  [all]")
    parser.add_argument("--table", action="store_true", help="print the promises by runtime, and run nothing")
    given = parser.parse_args()
    if given.table:
        print(table())
        return 0
    if given.device is None:
        parser.error("name a device by --device")
    try:
        command_line, broken = known(given.device), 0
    except FleetError as error:
        parser.error(str(error))
    chosen = [one for one in PROMISES if given.only in one.name]
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix="muster-conformance-") as folder:
            why = failure(one, command_line, Path(folder))
        broken += why is not None
        print(f"{'ok    ' if why is None else 'BROKEN'}  §{one.section:<3} {one.name:<38} {one.what}", flush=True)
        if why is not None:
            print(f"        {why}", flush=True)
    print(f"{len(chosen) - broken} of {len(chosen)} promises are kept")
    return 1 if broken or not chosen else 0


def failure(one, command_line, folder):
    """Why a device breaks a promise, on one line; None when it keeps it."""
    try:
        with stage(command_line, folder) as (coordinator, device):
            one.scenario(coordinator, device)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return " ".join(f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}".split())[:400]
    return None


if __name__ == "__main__":
    sys.exit(main())
