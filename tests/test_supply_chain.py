"""The lock files hold what pyproject.toml asks for, each file by its digest."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tree import ROOT

OWN = "muster-fl"
BY_VERSION = {"torch"}  # requirements/lock.py says why


def asked_for(extra):
    """Every requirement of an extra, those of the extras that it takes in included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    open_ = [extra]
    while open_:
        for one in map(Requirement, project["optional-dependencies"][open_.pop()]):
            if canonicalize_name(one.name) == OWN:
                open_ += one.extras
            else:
                wanted.append(one)
    return wanted


def locked(extra):
    """The blocks of a lock file: the versions of a package, and how many digests each has."""
    blocks = re.split(r"\n(?=\w)", (ROOT / "requirements" / f"{extra}.lock").read_text())[1:]
    found = {}
    for block in blocks:
        name, version = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)", block).groups()
        found.setdefault(canonicalize_name(name), {})[version] = block.count("--hash=sha256:")
    return found


@pytest.mark.parametrize("extra", ["coordinator", "sim", "dev"])
def test_lock_file_has_every_package_that_is_asked_for(extra):
    have = locked(extra)
    for wanted in asked_for(extra):
        if wanted.name not in BY_VERSION:
            versions = have.get(canonicalize_name(wanted.name), {})
            assert any(version in wanted.specifier for version in versions), f"{wanted}: run `make lock`"


def test_every_extra_that_brings_torch_names_its_limit_itself():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {extra: {str(one) for one in asked_for(extra) if one.name == "torch"} for extra in extras}
    bringing = {extra for extra, limits in brought.items() if limits}
    assert bringing == {"dev", "executorch", "export", "sim"}
    (limit,) = set.union(*brought.values())
    assert all(limit in extras[extra] for extra in bringing)


@pytest.mark.security("pip refuses a file whose SHA-256 is not there")
@pytest.mark.security("torch is installed by version only")
@pytest.mark.parametrize("extra", ["coordinator", "sim", "dev"])
def test_every_file_of_a_lock_file_has_a_digest(extra):
    assert all(digests for versions in locked(extra).values() for digests in versions.values())
    assert not BY_VERSION & set(locked(extra))


@pytest.mark.security("pip refuses a file whose SHA-256 is not there")
@pytest.mark.parametrize(("target", "extra"), [("demo", "sim"), ("test", "dev")])
def test_make_installs_the_versions_of_a_lock_file_by_their_digests_first(target, extra):
    shown = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first, rest = [line for line in shown.splitlines() if "pip install" in line and "-m venv" not in line]
    assert first.endswith(f" --no-deps --require-hashes --requirement requirements/{extra}.lock")
    assert rest.endswith(f" -e '.[{extra}]'")


@pytest.mark.security("make sbom lists what an installation has, in CycloneDX")
@pytest.mark.long
def test_the_bill_of_materials_lists_what_is_installed(tmp_path):
    shown = subprocess.run(["make", "-n", "sbom"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    *command, _ = shown.splitlines()[-1].split()
    command[0] = f"{sys.prefix}/bin/cyclonedx-py"
    subprocess.run([*command, tmp_path / "sbom.json"], cwd=ROOT, check=True)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(canonicalize_name(one["name"]), one["version"]) for one in bill["components"]}
    own = {(canonicalize_name(one.name), one.version) for one in distributions() if canonicalize_name(one.name) != OWN}
    assert own <= listed
