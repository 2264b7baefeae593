"""nginx with the configuration of `examples/nginx`, on free ports, with a certificate of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.coordinator.test_operations import self_made_certificate

CONFIGURATION = Path(__file__).parents[2] / "examples/nginx/muster.conf"
MAIN = """
{user}
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 512; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/muster.conf;
}}
"""


def free_port():
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def nginx_before(port, folder):
    """nginx in front of what listens on a port; gives its own port, and the file of its certificate. Or skips."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx is installed (apt install nginx-light)")
    certificate, key = self_made_certificate(folder)
    text, own = CONFIGURATION.read_text(), free_port()
    for told, here in (
        (r"server 127\.0\.0\.1:8080;", f"server 127.0.0.1:{port};"),
        (r"listen 443 ssl;", f"listen 127.0.0.1:{own} ssl;"),
        (r"listen \[::\]:443 ssl;", ""),
        (r"server_name .*;", "server_name 127.0.0.1;"),
        (r"ssl_certificate .*;", f"ssl_certificate {certificate};"),
        (r"ssl_certificate_key .*;", f"ssl_certificate_key {key};"),
    ):
        text, times = re.subn(told, here, text)
        assert times == 1, told
    (folder / "muster.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    with subprocess.Popen([program, "-c", folder / "nginx.conf", "-p", folder]) as running:
        try:
            _wait_for(own, running)
            yield own, certificate
        finally:
            running.terminate()


def _wait_for(port, running):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert running.poll() is None, "nginx did not start"
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    pytest.fail("nginx does not listen")
