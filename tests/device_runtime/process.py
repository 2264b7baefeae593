"""A real device process against a real coordinator, with a road between them on which a test can stand."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

from typer.testing import CliRunner

from muster.app import app
from tests.device_runtime.proxy import Hold
from tests.forked import DEVICE, forked


def muster(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class World:
    """A coordinator with one task for one device, the road to it, and the device's folder."""

    def __init__(self, folder, plans, road, where):
        self.folder, self.plans, self.road, self.where = folder, plans, road, where
        self.state = folder / "state"
        self.task = ""

    def create(self, plan="short", *more, deadline_s=600.0):
        options = ["--population", "p", "--goal", 1, "--rounds", 1, "--over-selection", 1]
        options += ["--selection-timeout-s", 1]  # so long a device that failed waits for others in the next attempt
        options += ["--reporting-deadline-s", deadline_s, *more]
        self.task = muster("task", "create", "--plan", self.plans / plan, *options, *self.where)["task"]

    def rounds(self, task=None):
        """The rounds of a task, once no report waits for its commit: a device has its receipt before that."""
        read = lambda: muster("task", "metrics", task or self.task, *self.where)["rounds"]  # noqa: E731
        until(lambda: "aggregating" not in {one["state"] for one in read()})
        return read()

    def start(self, *options, **how):
        command = [sys.executable, "-m", "muster", "device", "run", "--coordinator", self.road.url, "--json"]
        command += ["--population", "p", "--examples", str(self.folder / "mine.npz"), "--state", str(self.state)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return forked(DEVICE).start([*command, *options], **pipes, **how)

    def once(self, *options, code=None, **how):
        """The outcome of one session; `code` is what the process must end with."""
        with self.start("--once", *options, **how) as device:
            out, err = device.communicate(timeout=60)
        assert out, err
        assert "Traceback" not in err
        assert code in {None, device.returncode}
        return json.loads(out)

    def stored(self):
        """What the state database says of the assignment, read from outside."""
        if not (self.state / "state.db").exists():
            return None
        with closing(sqlite3.connect(f"file:{self.state / 'state.db'}?mode=ro", uri=True)) as database:
            try:
                row = database.execute("SELECT stored FROM assignment").fetchone()
            except sqlite3.OperationalError:
                return None
        return json.loads(row[0]) if row else None


def until(condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def changed(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def kill(device):
    device.kill()
    device.communicate()
    assert device.returncode == -signal.SIGKILL


def held_at(world, call, *, answered=False, skip=0):
    """A device process that has come to a call, or to its answer, and goes no further."""
    hold = Hold()
    moments = world.road.after if answered else world.road.before
    moments[call] += [lambda: None] * skip + [hold]
    device = world.start("--once")
    until(hold.reached.is_set)
    return device, hold
