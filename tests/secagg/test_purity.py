import re
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "secagg").glob("*.py"))
# The standard library's and NumPy's generators can be predicted; `secrets` asks the system.
FORBIDDEN = re.compile(
    r"\brandom\b(?!ly|ness)|default_rng|RandomState|\bseed\(|^\s*(?:import|from) (?:time|logging|os)\b", re.M
)


def test_there_are_sources():
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_file_uses_a_predictable_generator_or_a_clock(path):
    assert not FORBIDDEN.findall(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_file_imports_another_of_our_packages(path):
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M))
    assert imported <= {
        "__future__", "bisect", "collections", "concurrent", "contextlib", "cryptography", "dataclasses", "enum",
        "functools", "hashlib", "math", "numpy", "secagg", "secrets", "struct", "typing",
    }  # fmt: skip
