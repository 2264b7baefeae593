"""The process that trains or makes tokens for a device: it receives one order over a socket, answers, and ends.

    python -m device_runtime.sandbox.child DESCRIPTOR DEVICE

DEVICE is the id of the device's process; this process ends with it. Before it reads a graph or a tokenizer, it
permanently gives up all rights that this does not need (channel.py), and limits its memory and time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.random  # otherwise loaded with the first batch, when no file can be opened any more

from device_runtime.backends import open_backend
from device_runtime.errors import DeviceError
from device_runtime.sandbox import channel as channels, kernel
from device_runtime.sandbox.channel import confine
from device_runtime.texts import TextColumn, library_of
from device_runtime.trainer import InProcess, Job
from fedcore.plan import Plan

# Seconds between two messages that the work continues.
TELL_EVERY_S = 0.05


def end_with(device: int) -> None:
    """On Linux, have the kernel kill this process when the device's process ends."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != device:  # it ended before that
        sys.exit(1)


def work(channel: channels.Channel) -> None:
    """Carry out the order from the channel, and answer. Raises as a Trainer does, ConfigError, or Broken."""
    order = channel.receive(channels.ORDER)
    if isinstance(order, channels.TextOrder):
        _tokenize(order, channel)
    else:
        _train(order, channel)


def _train(order: channels.Order, channel: channels.Channel) -> None:
    backend = open_backend(order.backend, alone=True)
    result = InProcess(backend, confine).train(_job(order, channel), order.limits, _teller(channel))
    channel.send(channels.Done(result.steps))
    for vector in (result.values, *result.kept.values()):
        channel.send_bytes(vector)


def _tokenize(order: channels.TextOrder, channel: channels.Channel) -> None:
    library_of(order.field)  # now: later no file can be opened
    file = channel.receive_bytes(order.size)
    sizes = channel.receive_array(channels.ArrayKind("sizes", "int64", (order.texts,)))
    texts = np.empty(order.texts, object)
    texts[:] = [channel.receive_bytes(size) for size in sizes.tolist()]
    column = TextColumn(order.field, file, order.padding, texts)
    confine(order.limits)
    tokens = column.tokens(_teller(channel))
    channel.send(channels.Tokenized(tokens.cut))
    channel.send_bytes(tokens.ids)


def _teller(channel: channels.Channel) -> Callable[[], bool]:
    """What is called in the work: it tells the device, now and then, that the work continues."""
    told = 0.0

    def tell() -> bool:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_EVERY_S:
            channel.send(channels.Working(time.process_time()))
            told = now
        return True

    return tell


def _job(order: channels.Order, channel: channels.Channel) -> Job:
    return Job(
        plan=Plan.decode(bytes(order.plan)),
        graphs={name: channel.receive_bytes(size) for name, size in order.graphs.items()},
        broadcast={kind.name: channel.receive_array(kind) for kind in order.broadcast},
        frozen=order.frozen,
        kept=None if order.kept is None else {kind.name: channel.receive_array(kind) for kind in order.kept},
        examples={kind.name: channel.receive_array(kind) for kind in order.examples},
        left_out={kind.name: channel.receive_array(kind) for kind in order.left_out},
        key=order.key,
    )


def main() -> None:
    """Serve the socket that the command line names. If the device is gone, end silently."""
    descriptor, device = map(int, sys.argv[1:])
    end_with(device)
    kernel.hide_memory()
    channel = channels.Channel(socket.socket(fileno=descriptor))
    try:
        work(channel)
    except channels.Broken:
        sys.exit(1)
    except DeviceError as error:
        channel.send(channels.Failed(type(error).__name__, error.detail, error.private))
    except Exception as error:
        channel.send(channels.Failed("RuntimeFailed", "the device's own code failed", type(error).__name__))


if __name__ == "__main__":
    main()
