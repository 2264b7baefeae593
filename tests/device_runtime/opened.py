"""A device with one open model, in Python, TypeScript and Kotlin, under the same orders."""

import atexit
import functools
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.backends import open_backend
from device_runtime.device import Device
from device_runtime.errors import DeviceError
from device_runtime.permission.policy import Policy
from device_runtime.state.folder import only_session
from device_runtime.state.records import read_journal
from device_runtime.trainer import InProcess
from fedcore.validation import build
from tests.device_runtime.kotlin import kotlin_command
from tests.device_runtime.node import command
from tests.device_runtime.released import KEY, NAME, ROWS

X = {"x": ROWS}


class Opened:
    """What all runtimes answer. Each answer has the model's version and the journal after the order."""

    def __enter__(self):
        return self

    def ask(self, order, **about):
        """The answer to an order; where the device raised an error, its name and words."""
        raise NotImplementedError

    def refresh(self):
        """Whether a version was swapped, or the name of the error; and the version."""
        answer = self.ask("refresh")
        return answer.get("swapped", answer.get("error")), answer["version"]

    def answers(self, columns=X):
        """The output for each row, in one list."""
        return self.ask("predict", columns=columns)["outputs"]["output"]


class InPython(Opened):
    """Python's, in this process."""

    runtime = "python"

    def __init__(self, folder, url, stated=None, **policy):
        self.state = folder / self.runtime
        policy = build(Policy, {"signers": [KEY.signer], **policy})
        more = {"policy": policy, "labels": stated, "wait_s": 5.0}
        self._device = Device(url, "phones", folder / "examples.npz", self.state, **more)
        # In a sandbox each training takes a quarter of a second.
        self._device._config = replace(self._device._config, trainer=lambda name: InProcess(open_backend(name)))
        self._model, self._pool = self._device.model(NAME), ThreadPoolExecutor(4)

    def __exit__(self, *_):
        self._pool.shutdown()
        self._model.close()

    def ask(self, order, **about):
        try:
            answer = getattr(self, f"_{order}")(**about)
        except DeviceError as error:
            answer = {"error": type(error).__name__.lstrip("_"), "detail": str(error), "public": error.detail}
        journal = [structs.asdict(entry) for entry in read_journal(self.state)] if self.state.exists() else []
        return {**answer, "version": self._model.version, "personal": self._model.personal, "journal": journal}

    def _refresh(self):
        return {"swapped": self._model.refresh()}

    def _predict(self, columns):
        found = self._model.predict(columns)
        return {"outputs": {name: values.ravel().tolist() for name, values in found.items()}}

    def _session(self):
        return {"outcome": structs.asdict(self._device.run_once())}

    def _both(self):
        """A refresh while a session is under way."""
        with only_session(self.state):
            return self._refresh()

    def _personalise(self):
        outcome = asdict(self._model.personalise())
        return {**outcome, "leftOut": outcome["left_out"]}

    def _forget(self):
        return {"forgot": self._model.forget()}

    def _close(self):
        return self._model.close() or {}

    def _storm(self, columns, calls):
        self._calls = [self._pool.submit(self._model.predict, columns) for _ in range(calls)]
        return {}

    def _calm(self):
        """The first value of each answer of the storm. Whole answers that differ begin with different values."""
        found = [tuple(call.result()["output"].tolist()) for call in self._calls]
        assert len(set(found)) == len({first for first, *_ in found})
        return {"first": [first for first, *_ in found]}

    def _swaps(self, columns, calls):
        self._storm(columns, calls)
        swaps = 0
        while swaps < 3 or not all(call.done() for call in self._calls):  # a busy machine may answer before it swaps
            self._model.forget()
            swaps += self._model.personalise().kept
        return {"answers": list(set(self._calm()["first"])), "calls": len(self._calls), "swaps": swaps}


def process(runtime, *more):
    """A process of Node, or of Java, that opens devices, one after the other."""
    words = command("tests/models.ts", *more) if runtime == "node" else kotlin_command("ModelsKt", *more)
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@functools.cache
def shared(runtime):
    """The process that tests take in turn: to start one for each device takes a third of a second of CPU."""
    running = process(runtime)
    atexit.register(running.communicate)
    return running


class InNode(Opened):
    """TypeScript's, in Node. more: "web", or the writes of its state before it is killed."""

    runtime = "node"

    def __init__(self, folder, url, *more, stated=None, **policy):
        self.state, self._is_alone = folder / self.runtime, bool(more)
        if not more and shared.cache_info().currsize and shared(self.runtime).poll() is not None:
            shared.cache_clear()
        self.process = process(self.runtime, *more) if more else shared(self.runtime)
        self.ask(
            "open", state=str(self.state), url=url, policy={"signers": [KEY.signer], **policy}, labels=stated or {}
        )

    def __exit__(self, *_):
        if self._is_alone:
            self.process.kill()
            self.process.communicate()
        else:
            self.ask("leave")

    def ask(self, order, **about):
        """As above; None when the process ended instead."""
        if columns := about.get("columns"):
            about["columns"] = {name: _typed(values) for name, values in columns.items()}
        self.process.stdin.write(json.dumps({"do": order, **about}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else None


class InKotlin(InNode):
    """Kotlin's, on a desktop's Java. more: the writes of its state before it is killed."""

    runtime = "jvm"


def _typed(values):
    """Values as an order has them: their type, and all of them in one list."""
    return (values.dtype.name, values.ravel().tolist()) if isinstance(values, np.ndarray) else ("text", values)


ELSEWHERE = [InNode, pytest.param(InKotlin, marks=pytest.mark.long)]
RUNTIMES = [InPython, *ELSEWHERE]


def remarks(answer):
    """What the journal says of refusals."""
    return [entry["detail"] for entry in answer["journal"] if entry["outcome"] == "model-refused"]


def plain(words):
    """Words without the quotes that only Python's have."""
    return words.replace("'", "")
