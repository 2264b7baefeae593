"""What keeps a training from a Ray cluster is said before any work."""

import socket
import sys
import threading

import pytest

from simulator.configuration import SimulationConfig
from simulator.engines.workers.ray_cluster import connect
from simulator.errors import EngineError
from simulator.simulation import training_of


@pytest.mark.parametrize("address", ["6379", "ray://head:10001", "head:port", "LOCAL"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(EngineError, match=r"a Ray cluster is auto, local or HOST:PORT, .*, not "):
        connect(address, None)


def test_an_address_where_nothing_or_no_cluster_answers_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer():
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(EngineError, match=f"something else than a Ray cluster answers at {address}"):
            connect(address, None)
        answering.join()
    with pytest.raises(EngineError, match=rf"no Ray cluster answers at {address}: .*refused; `ray start --head`"):
        connect(address, None)


def test_without_ray_the_way_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"ray is not installed: pip install 'muster-fl\[ray\]'"):
        connect("local", None)


def test_ray_is_refused_where_it_does_nothing():
    with pytest.raises(EngineError, match="ray is for federated training, not for the baseline local"):
        SimulationConfig(model="logreg", ray="auto", baseline="local")
    with pytest.raises(EngineError, match=r"'cuda:1' is one GPU, which several processes do not share"):
        training_of(SimulationConfig(model="logreg", ray="auto", device="cuda:1"))
