"""Files of this repository."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = {"build", "dist", "out", "node_modules", "target"}


def files(*suffixes):
    """All with one of these suffixes or names, in the order of their paths; nothing made, and nothing hidden."""
    found = []
    for folder, inside, names in os.walk(ROOT):
        # Pruned here: an environment holds a hundred times as many files as the repository.
        inside[:] = [name for name in inside if name not in SKIPPED and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix in suffixes or path.name in suffixes]
    return sorted(found)
