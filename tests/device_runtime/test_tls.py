"""A device and a coordinator whose certificate a private authority made."""

import numpy as np

from device_runtime.session import DeviceConfig, run_session
from simulator import datasets
from tests.coordinator.test_operations import self_made_certificate
from tests.device_runtime.process import World


class Direct:
    """A road without a proxy."""

    def __init__(self, url):
        self.url = url


def test_a_private_authority_is_trusted_once_it_is_named(coordinators, tmp_path, plans, monkeypatch):
    np.savez(tmp_path / "mine.npz", **datasets.load("digits").shard(0))
    certificate, key = self_made_certificate(tmp_path)
    with coordinators.local(tmp_path, tls_cert=str(certificate), tls_key=str(key)) as local:
        where = ["--db", local.database, "--blobs", local.blobs]
        World(tmp_path, plans, Direct(local.url), where).create()
        config = DeviceConfig(
            coordinator=local.url, population="p", examples=tmp_path / "mine.npz", state=tmp_path / "state", wait_s=5.0
        )
        assert local.url.startswith("https://")
        stranger = run_session(config)
        assert stranger.outcome == "failed"
        assert "certificate" in stranger.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert run_session(config).outcome == "reported"
