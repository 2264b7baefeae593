"""Lock files: the packages that an image, `make demo` and `make test` install, each in one version, with digests.

    python -m pip install uv && python requirements/lock.py

torch is not in them. Its CPU build is not on PyPI, and pip prefers PyPI's, whose digest the index tells: with it
come gigabytes of NVIDIA's libraries. So torch is installed by version, and so are those, where they are needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXTRAS = ("coordinator", "sim", "dev")
_BY_VERSION = re.compile(r"^(?:nvidia|cuda)-|^(?:torch|triton)$")


def lock(extra: str) -> None:
    """Write `<extra>.lock`. Raises CalledProcessError when uv finds no versions that fit."""
    common = ["compile", "--universal", "--generate-hashes", "--quiet", "--no-header", "--no-annotate"]
    wanted = ["--extra", extra, "--python-version", "3.11", str(HERE.parent / "pyproject.toml"), str(HERE / "build.in")]
    done = subprocess.run([sys.executable, "-m", "uv", "pip", *common, *wanted], check=True, capture_output=True)
    blocks = re.split(r"\n(?=\S)", done.stdout.decode().strip())
    kept = [block for block in blocks if not _BY_VERSION.search(re.split("[= ]", block, maxsplit=1)[0])]
    head = f"# What the extra {extra!r} installs. Made by requirements/lock.py; do not edit."
    (HERE / f"{extra}.lock").write_text("\n".join([head, *kept, ""]), "utf-8")


if __name__ == "__main__":
    for one in EXTRAS:
        lock(one)
