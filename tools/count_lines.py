"""Product lines by package, at a commit: `python -m tools.count_lines [COMMIT]`, HEAD by itself, as JSON.

Every line of Python and TypeScript counts, with comments and blank lines, outside tests and generated files. Benchmarks
count as a package: they are no part of the wheel, but people read and keep them.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath

from tools.make_file_map import PACKAGES

COUNTED = (*PACKAGES, "benchmarks")


def git(*arguments):
    return subprocess.run(("git", *arguments), stdout=subprocess.PIPE, check=True, text=True).stdout


def package_of(path):
    """The package of a product file; None for a test and for what is in no package."""
    place = PurePosixPath(path)
    if place.suffix not in (".py", ".ts") or place.parts[0] not in COUNTED or "tests" in place.parts:
        return None
    return "device_runtime/js" if place.suffix == ".ts" else place.parts[0]


def lines(commit):
    """Lines by package, at a commit."""
    counted = Counter()
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if package := package_of(path):
            counted[package] += git("show", f"{commit}:{path}").count("\n")
    return {**dict(sorted(counted.items())), "total": counted.total()}


if __name__ == "__main__":
    print(json.dumps(lines(*sys.argv[1:] or ["HEAD"]), indent=1))
