"""An orderly end on SIGTERM: `with` blocks and `finally` clauses release what they hold."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from types import FrameType

_AGAIN_S = 0.01


def exit_on_sigterm(code: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Have SIGTERM end this process with `code`, as `sys.exit` does. Call this in the main thread.

    unless: called when the signal comes; if it returns true, nothing happens.

    Python drops an exception that is raised within a destructor or a callback of a weak reference, and every import has
    such callbacks. So a signal that comes during one is handled after it.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        if unless():
            return
        if _in_destructor(frame):
            come_again()
            return
        sys.unraisablehook = functools.partial(dropped, sys.unraisablehook)
        sys.exit(code)

    def dropped(tell: Callable[[sys.UnraisableHookArgs], object], what: sys.UnraisableHookArgs) -> None:
        if isinstance(what.exc_value, SystemExit):
            come_again()
        else:
            tell(what)

    def come_again() -> None:
        signal.signal(signal.SIGALRM, terminate)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    signal.signal(signal.SIGTERM, terminate)


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether a destructor is running. It is not cut short: it would not release what it holds."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
