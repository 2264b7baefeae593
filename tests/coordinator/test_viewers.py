"""Viewers: however many pages they have drawn at once, devices and operators go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from coordinator.dashboard import views
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import check_in

VIEWERS = 60
"""More than there are threads."""


@pytest.fixture
def slow_pages(monkeypatch):
    """The page of a task is not drawn before the event is set, and holds its connection to the database until then."""
    draw, go_on = views.task_page, threading.Event()

    def wait(*args, **kwargs):
        go_on.wait(30)
        return draw(*args, **kwargs)

    monkeypatch.setattr(views, "task_page", wait)
    yield go_on
    go_on.set()


@pytest.mark.security("However much viewers look at, devices are served")
@pytest.mark.parametrize("page", ["", "/events"])
def test_viewers_of_slow_pages_keep_no_device_out(register, served, slow_pages, page):
    address = f"{served.admin}/tasks/{register()}{page}"

    def view(_):
        with httpx2.stream("GET", address, timeout=40) as answer:
            next(answer.iter_raw())
            return answer.status_code

    with ThreadPoolExecutor(VIEWERS) as pool, speaking_to(served.devices, timeout=5) as devices:
        viewing = [pool.submit(view, number) for number in range(VIEWERS)]
        time.sleep(1)
        try:
            assert not any(one.done() for one in viewing)
            for device in "abc":
                assert check_in(devices, device).json()["outcome"] == "accepted"
            assert devices.get("/readyz").status_code == 200
        finally:
            slow_pages.set()
        assert [one.result() for one in viewing] == [200] * VIEWERS
