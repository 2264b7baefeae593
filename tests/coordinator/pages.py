"""Forms of the dashboard as a browser sends them, and rounds to look at."""

import re

from tests.coordinator.bundles import report_body
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import abort, assign, put


def csrf(page):
    """The CSRF token of the forms on a page."""
    return re.search(r'name="csrf" value="([0-9a-f]{64})"', page.text)[1]


def log_in(client, token):
    return client.post("/login", data={"token": token, "csrf": csrf(client.get("/login"))})


def change(client, task, verb, **fields):
    """Send a form of the task's page, as a browser does."""
    return client.post(f"/tasks/{task}/{verb}", data={"csrf": csrf(client.get("/")), **fields})


def play(urls, losses, devices=2):
    """Let rounds of the one task run, each with its mean loss; in the first, one of several devices gives up."""
    with speaking_to(urls.devices, 70) as client:
        for number, loss in enumerate(losses):
            drawn = assign(client, *(f"{number}-{one}" for one in range(devices)))
            if number == 0 and devices > 1:
                abort(client, drawn.pop().assignment)
            for one in drawn:
                put(client, one.assignment, report_body([1, 0, 0, 0], 1, loss=loss))
