"""The package of the device runtime in TypeScript, made by `npm run package`, runs without the sources."""

import json
import re
import shutil
import subprocess
import tarfile

import pytest

from tests.device_runtime.node import FOLDER, device_words, node


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with the package, packed and unpacked, and the packages that it depends on."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    node()
    folder = tmp_path_factory.mktemp("packed")
    subprocess.run(
        [npm, "run", "--silent", "package", "--", "--pack-destination", folder],
        cwd=FOLDER,
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    package = folder / "node_modules" / "@muster-fl" / "device"
    package.parent.mkdir(parents=True)
    (folder / "package").rename(package)
    for other in (FOLDER / "node_modules").iterdir():
        (folder / "node_modules" / other.name).symlink_to(other)
    return folder


def test_the_package_names_its_sources_and_all_packages_that_they_import():
    package = json.loads((FOLDER / "package.json").read_text())
    entries = [*package["exports"].values(), *package["bin"].values()]
    sources = [FOLDER / entry.replace("dist/", "src/").replace(".js", ".ts") for entry in entries]
    assert [source for source in sources if not source.is_file()] == []
    text = "".join(source.read_text() for source in (FOLDER / "src").rglob("*.ts"))
    imported = set(re.findall(r' from "((?:@[^/"]+/)?[^./":]+)[^":]*";', text))
    assert imported <= {*package["dependencies"], *package["peerDependencies"]}


@pytest.mark.long
def test_the_package_holds_javascript_with_types_readme_and_licence(packed):
    package = packed / "node_modules" / "@muster-fl" / "device"
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert found >= {"README.md", "LICENSE", "package.json", "dist/node/main.js", "dist/core/index.d.ts"}
    assert {name.partition(".")[2] for name in found if name.startswith("dist/")} == {"js", "d.ts"}


@pytest.mark.long
def test_the_reference_is_made_and_no_exported_name_lacks_a_comment():
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    subprocess.run([npm, "run", "--silent", "docs"], cwd=FOLDER, check=True)
    assert (FOLDER / "dist" / "reference" / "classes" / "web.BrowserDevice.html").is_file()


@pytest.mark.long
def test_hermes_gives_the_answers_of_python():
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    node()
    ran = subprocess.run([npm, "run", "--silent", "hermes"], cwd=FOLDER, check=True, capture_output=True, text=True)
    assert len(re.findall(r"^.+: [1-9]\d* equal, \d+ ms$", ran.stdout, re.MULTILINE)) == 10


@pytest.mark.long
def test_a_device_of_the_package_takes_part_without_the_sources(packed, coordinator, examples):
    assert coordinator.reports == []
    program = packed / "node_modules" / "@muster-fl" / "device" / "dist" / "node" / "main.js"
    words = device_words(packed / "device", coordinator.url, "phones", examples)
    ended = subprocess.run([node(), program, *words], cwd=packed, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["outcome"] == "reported"
    (packed / "node_modules" / "onnxruntime-node").unlink()
    lacking = subprocess.run([node(), program, *words], cwd=packed, capture_output=True, text=True, check=False)
    assert (lacking.returncode, "npm install onnxruntime-node" in lacking.stderr) == (2, True)
