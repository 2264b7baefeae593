"""nginx with the configurations of the examples, on free ports, with a certificate of its own."""

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

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGURATION = EXAMPLES / "nginx/muster.conf"
DASHBOARD = EXAMPLES / "nginx/dashboard.conf"
MAIN = EXAMPLES / "deploy/nginx/nginx.conf"
FOLDERS = ("client_body_temp", "proxy_temp", "fastcgi_temp", "uwsgi_temp", "scgi_temp")


def free_port():
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def nginx_before(port, folder, configuration=CONFIGURATION, changes=(), **included):
    """nginx in front of what listens on a port; gives its own port, and the file of its certificate. Or skips.

    changes: patterns in the configuration that occur once, and what stands there instead. included: files for it.
    """
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx is installed (apt install nginx-light)")
    certificate, key = self_made_certificate(folder)
    text, own = configuration.read_text(), free_port()
    for told, instead in (
        (r"listen 443 ssl;", f"listen 127.0.0.1:{own} ssl;"),
        (r"listen \[::\]:443 ssl;", ""),
        (r"server_name .*;", "server_name 127.0.0.1;"),
        (r"ssl_certificate .*;", f"ssl_certificate {certificate};"),
        (r"ssl_certificate_key .*;", f"ssl_certificate_key {key};"),
        *changes,
    ):
        text, times = re.subn(told, instead, text)
        assert times == 1, told
    (folder / "muster.conf").write_text(text)
    for name, content in ({"muster_coordinators": f"server 127.0.0.1:{port};\n"} | included).items():
        (folder / name).write_text(content)
    folders = "".join(f"{name}_path {folder}/{name};" for name in FOLDERS)
    (folder / "nginx.conf").write_text(MAIN.read_text().replace("http {", "http {" + folders))
    here = f"daemon off; pid {folder}/nginx.pid; error_log stderr;" + " user root;" * (os.geteuid() == 0)
    with subprocess.Popen([program, "-c", folder / "nginx.conf", "-p", folder, "-g", here]) as running:
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
