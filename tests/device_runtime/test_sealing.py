"""What a device keeps is sealed, under the platform's key where an application has one."""

from dataclasses import replace

import numpy as np
import pytest

from device_runtime.errors import ExamplesError, KeyUnavailable, SealBroken
from device_runtime.examples import Collection, ExampleStore
from device_runtime.permission.policy import Policy
from device_runtime.protocol.transport import Transport
from device_runtime.session import run_session
from device_runtime.state.folder import OVERHEAD_BYTES, KeyFile, Sealer
from fedcore.plan import ExampleSpec, Field
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.test_secure import TRUSTING, secure  # noqa: F401 - a fixture

SECRET = b"what nobody else may read"
FIELDS = (Field("x", "float32", (64,)),)


class Platform:
    """A keystore that is locked until the device is; `asked` counts."""

    def __init__(self, key=bytes(32)):
        self.held, self.locked = key, False

    def key(self):
        if self.locked:
            raise KeyUnavailable("the keystore is locked")
        return self.held


def test_sealed_bytes_open_only_as_what_they_are_and_unchanged():
    sealer, other = Sealer(Platform()), Sealer(Platform(bytes([1]) * 32))
    sealed = sealer.seal("report", SECRET)
    assert SECRET not in sealed
    assert len(sealed) == len(SECRET) + OVERHEAD_BYTES
    assert sealed != sealer.seal("report", SECRET)
    assert sealer.open("report", sealed) == SECRET
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for opener, what, data in (
        (sealer, "key", sealed),
        (other, "report", sealed),
        (sealer, "report", changed),
        (sealer, "report", sealed[:5]),
    ):
        with pytest.raises(SealBroken):
            opener.open(what, data)


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "folder" / "key"
    made = KeyFile(path).key()
    assert KeyFile(path).key() == made
    assert len(made) == 32
    assert path.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"short")
    with pytest.raises(KeyUnavailable, match="5 bytes"):
        Sealer(KeyFile(path)).seal("report", SECRET)
    assert path.read_bytes() == b"short"


def test_nothing_secret_lies_in_the_clear_in_a_state_folder(coordinator, config):
    coordinator.faults["report"] = [refusal("unavailable")] * 9
    run_session(replace(config, keystore=Platform()))
    (kept,) = config.state.glob("*.report")
    sealer = Sealer(Platform())
    report = sealer.open("report of assignment a-1", kept.read_bytes())
    keys = [sealer.open(name, (config.state / name).read_bytes()) for name in ("device-key", "secagg-key")]
    lying = b"".join(path.read_bytes() for path in config.state.rglob("*") if path.is_file())
    for secret in (report[-16:], *keys, *(key.hex().encode() for key in keys)):
        assert secret not in lying
    assert not (config.state / "sealing-key").exists()
    coordinator.faults.clear()
    assert run_session(replace(config, keystore=Platform())).outcome == "reported"


def test_a_locked_keystore_ends_a_session_and_loses_nothing(coordinator, config):
    platform = Platform()
    assert run_session(replace(config, keystore=platform)).outcome == "reported"
    platform.locked = True
    before = (config.state / "device-key").read_bytes()
    outcome = run_session(replace(config, keystore=platform))
    assert (outcome.outcome, outcome.reason) == ("failed", "key-unavailable")
    assert (config.state / "device-key").read_bytes() == before
    platform.locked = False
    assert run_session(replace(config, keystore=platform)).outcome == "reported"
    assert len(coordinator.enrolments) == 1


def test_examples_are_sealed_under_the_key_of_the_application(tmp_path):
    store = ExampleStore.open(tmp_path, keystore=Platform())
    value = np.arange(64, dtype=np.float32)
    store.extend(Collection("typed", FIELDS), [{"x": value}])
    assert value.tobytes()[:32] not in store.path.read_bytes()
    spec = ExampleSpec(FIELDS, "typed")
    np.testing.assert_array_equal(store.load(spec)["x"], [value])
    with pytest.raises(ExamplesError, match="sealed under another key"):
        ExampleStore.open(tmp_path, keystore=Platform(bytes([1]) * 32)).load(spec)
    assert not list(tmp_path.glob("*.key"))


@pytest.mark.security("require_https holds for that address as for the coordinator's")
@pytest.mark.parametrize("stored", [False, True])
def test_a_device_that_insists_on_https_sends_no_byte_over_http(coordinator, config, stored):
    if stored:
        coordinator.faults["report"] = [refusal("unavailable")] * 9
        run_session(config)
        coordinator.calls.clear()
    outcome = run_session(replace(config, policy=Policy(require_https=True)))
    assert (outcome.outcome, outcome.reason) == ("not-now", "policy")
    assert "require_https" in outcome.detail
    assert coordinator.calls == []


@pytest.mark.security("require_https holds for that address as for the coordinator's")
def test_a_device_that_insists_on_https_asks_no_authority_over_http(secure, config):  # noqa: F811
    """Its coordinator is at https, and names an authority that is not."""
    policy = Policy(signers=TRUSTING.signers, require_https=True)
    reached = []

    def connect(url):
        reached.append(url)
        return Transport.to(secure.url)

    outcome = run_session(replace(config, coordinator="https://a.example", policy=policy, connect=connect))
    assert (outcome.reason, outcome.steps, secure.issued, secure.said) == ("policy", 0, [], [])
    assert f"against require_https of this device's policy: the authority is at {secure.url}" in outcome.detail
    assert reached == ["https://a.example"]
