"""A sandbox's process in the hands of an attacker, who looks at what it has and starts a process of his own.

It has no privileges, also where the tests run as root.
"""

import json
import os
import socket
import sys
import time

from device_runtime.sandbox.channel import ORDER, Channel, Failed, confine

NOBODY = 65534


def descriptors():
    """What lies behind every open descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the folder itself
    return found


def started():
    """Whether a process could be started."""
    try:
        if not os.fork():
            time.sleep(600)
    except OSError:
        return False
    return True


def main():
    end = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(end)
    limits = channel.receive(ORDER).limits
    found = {"environment": sorted(os.environ), "session": os.getsid(0) == os.getpid()}
    found["descriptors"] = [path for number, path in descriptors().items() if number != end.fileno()]
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    confine(limits)
    channel.send(Failed("RuntimeFailed", json.dumps(found | {"started": started()})))
    time.sleep(600)


if __name__ == "__main__":
    main()
