"""The work of one assignment: fetch plan, graphs and checkpoint, train. Nothing of it is told to the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from device_runtime.backends.backend import Backend
from device_runtime.errors import PlanRefused
from device_runtime.examples import ExampleSource
from device_runtime.runner import Result, execute
from device_runtime.state.cache import BlobCache
from fedcore import checkpoint
from fedcore.batching import Place
from fedcore.errors import FedcoreError
from fedcore.plan import Plan
from fedcore.wire.messages import Assignment


@dataclass(frozen=True, slots=True)
class Worker:
    """What runs graphs, over which examples, and where blobs come from.

    keep_going: asked before every batch: whether there is time left. It raises what ends the work otherwise.
    """

    backend: Backend
    examples: ExampleSource
    cache: BlobCache
    keep_going: Callable[[], bool]

    def plan(self, given: Assignment) -> Plan:
        """The plan of an assignment. Raises PlanRefused, StateError or TransportError."""
        return plan_of(given, self.cache)

    def train(self, given: Assignment, plan: Plan) -> Result:
        """The report. Raises AssignmentError, StateError or TransportError."""
        refs = plan.graphs.get(self.backend.format)
        if refs is None:
            raise PlanRefused(
                f"plan {plan.name!r} has graphs in {sorted(plan.graphs)}, this device runs {self.backend.format!r}"
            )
        try:
            columns = self.examples.load(plan.examples)
            graphs = {name: self.backend.load(self.cache.get(ref), name) for name, ref in refs.items()}
            broadcast = checkpoint.decode(self.cache.once(given.checkpoint), plan.broadcast)
        except FedcoreError as error:
            raise PlanRefused(str(error)) from error
        place = Place(given.seed, given.round, given.slot)
        return execute(plan, graphs, broadcast, columns, place, keep_going=self.keep_going)

    def to_move(self, given: Assignment, plan: Plan) -> int:
        """Bytes still to come and go: graphs that are not kept here, the checkpoint, the report."""
        graphs = set(plan.graphs.get(self.backend.format, {}).values())
        missing = sum(ref.size for ref in graphs if not self.cache.holds(ref))
        return missing + given.checkpoint.size + 4 * plan.report.size


def plan_of(given: Assignment, cache: BlobCache) -> Plan:
    """The plan of an assignment. Raises PlanRefused, StateError or TransportError."""
    try:
        return Plan.decode(cache.get(given.plan))
    except FedcoreError as error:
        raise PlanRefused(str(error)) from error
