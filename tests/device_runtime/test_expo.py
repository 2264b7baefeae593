"""Phones in React Native, without one: what a coordinator takes of their evidence, and what Expo links into the app."""

import base64
import datetime as dt
import hashlib
import json
import shutil
import subprocess
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.authority.android import Maker
from tests.authority.apple import Apple
from tests.device_runtime.node import command, node
from tests.tree import ROOT

EXAMPLE, ENGINE = ROOT / "examples" / "expo", "onnxruntime-react-native"


@contextmanager
def hardware(vouch):
    """The URL at which phones' hardware answers: in base64, what `vouch` gives for a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            said = [base64.b64encode(one).decode() for one in vouch(self.path[1:].encode())]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("system", ["android", "ios"])
def test_a_coordinator_enrols_phones_that_their_hardware_attests(tmp_path, coordinators, system):
    now = dt.datetime.now(dt.UTC)
    maker, apple = Maker(now), Apple(now)
    taken = {"android_file": maker.settings(tmp_path), "apple_file": apple.settings(tmp_path)}
    told = {
        "android": maker.chain,
        "ios": lambda text: [apple.statement(hashlib.sha256(text).digest())],  # as @expo/app-integrity does
    }

    def session(voucher):
        words = command("tests/attested.ts", local.url, system, voucher, tmp_path)
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    with coordinators.local(tmp_path, accept_unattested=False, **taken) as local:
        with hardware(lambda text: told[system](bytes(64))) as voucher:
            refused = session(voucher)
        assert (refused["reason"], local.store.devices()) == ("not-attested", [])
        assert refused["detail"] == "the challenge is not that of this key and this request"
        with hardware(told[system]) as voucher:
            assert session(voucher)["reason"] == "unknown-population"
        (device,) = local.store.devices()
        assert device.attestation == {"android": "android-key", "ios": "app-attest"}[system]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The example with what links its modules, in the versions that it pins; a skip without npm's registry."""
    folder, given = tmp_path_factory.mktemp("app"), json.loads((EXAMPLE / "package.json").read_text())
    pinned = given["dependencies"] | given["devDependencies"]
    names = (ENGINE, "expo-modules-autolinking")
    (folder / "package.json").write_text(json.dumps({"dependencies": {name: pinned[name] for name in names}}))
    shutil.copy(EXAMPLE / "react-native.config.js", folder)
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--legacy-peer-deps")
    node()
    for words in (("install", *quiet), ("pack", f"react-native@{pinned['react-native']}")):
        ran = subprocess.run(["npm", *words], cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            pytest.skip(f"npm cannot fetch the packages of the example: {ran.stderr[-300:]}")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("platform", "place", "end"),
    [("android", "packageInstance", "new OnnxruntimePackage()"), ("ios", "podspecPath", f"{ENGINE}.podspec")],
)
def test_expo_links_the_engine_into_the_example(app, platform, place, end):
    tool = app / "node_modules" / "expo-modules-autolinking" / "bin" / "expo-modules-autolinking.js"
    words = [node(), tool, "react-native-config", "--json", "--platform", platform]
    linked = json.loads(subprocess.run(words, cwd=app, capture_output=True, text=True, check=True).stdout)
    assert linked["dependencies"][ENGINE]["platforms"][platform][place].endswith(end)


@pytest.mark.long
def test_the_examples_react_native_has_what_the_engine_needs_on_ios(app):
    assert "RCTCxxBridge*" in (app / "node_modules" / ENGINE / "ios" / "OnnxruntimeModule.mm").read_text()
    (packed,) = app.glob("react-native-*.tgz")
    with tarfile.open(packed) as package:
        header = package.extractfile("package/React/Base/RCTBridge+Private.h").read().decode()
    assert "@interface RCTCxxBridge : RCTBridge" in header, "React Native 0.87 dropped it"
