"""Light devices that come, work, vanish and leave as those of a twin do, in real time."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from benchmarks.load import Call, LoadConfig, LoadDevice, LoadFleet, Refusal
from fedcore.wire.messages import Abort, Assignment, Rejected, encode
from simulator.forecast.devices import Devices


class WorkingFleet(LoadFleet):
    """A fleet whose devices are the rows of a modelled population.

    modelled: when each can come, and how long its work takes. drop_out: the chance that a device vanishes in an
    assignment. first_within_s: within which all come for the first time. `check_ins` counts visits.
    """

    def __init__(self, config: LoadConfig, modelled: Devices, drop_out: float, first_within_s: float) -> None:
        super().__init__(config)
        self._modelled, self._drop_out, self._first_within_s = modelled, drop_out, first_within_s
        self._rows: dict[int, np.ndarray] = {}
        self._began = 0.0
        self.check_ins = 0

    async def _run(self, device: LoadDevice) -> None:
        if not self._rows:
            self._began = time.monotonic()
        self._rows[id(device)] = np.array([len(self._rows)])
        await asyncio.sleep(self._random.uniform(0, self._first_within_s))
        await super()._run(device)

    async def _session(self, device: LoadDevice) -> tuple[str, float]:
        row, stretches = self._rows[id(device)], self._modelled.stretches
        if not stretches.can_until(row, self._now()).any():
            now = self._now()
            await asyncio.sleep(float(stretches.next_stretch(row, now)[0]) - now)
        self.check_ins += 1
        answer, retry = await self._drawn(device)
        if isinstance(answer, Rejected):
            return answer.reason, self._delay_s(answer)
        leaves_s = max(0.0, float(stretches.can_until(row, self._now())[0]) - self._now())
        ending = await self._assigned(device, answer, float(self._modelled.work_s[row[0]]), leaves_s)
        return ending, self._random.uniform(retry.min_s, retry.max_s)

    async def _assigned(self, device: LoadDevice, given: Assignment, works_s: float, leaves_s: float) -> str:
        """Work on an assignment until it is done, or this device vanishes or leaves, or is not needed."""
        vanishes = self._random.random() < self._drop_out
        ends_s = works_s * self._random.random() if vanishes else works_s
        hold = asyncio.create_task(self._hold(device, given))
        try:
            await asyncio.wait([hold], timeout=min(ends_s, leaves_s))
            if hold.done():
                return "not needed"
            if leaves_s < ends_s:
                call = Call("POST", f"/v1/assignments/{given.assignment}:abort", encode(Abort(reason="conditions")))
                await self._retrying(lambda: self._ask(device, call))
                return "left"
            if vanishes:
                return "vanished"
            ending, _ = await self._work(device, given)
        except Refusal:
            return "not needed"
        finally:
            hold.cancel()
        return ending

    def _now(self) -> float:
        return time.monotonic() - self._began
