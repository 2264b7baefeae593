"""The guard: it checks the owner's policy before anything runs, and chooses among offered tasks.

The coordinator receives only the name of a broken rule. The value and the limit stay in the outcome.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np

from device_runtime.errors import PlanRefused, PolicyForbids
from device_runtime.examples import ExampleSource
from device_runtime.permission.policy import Policy, Releases
from device_runtime.state.assignment import StoredAssignment
from device_runtime.state.records import Spent
from device_runtime.trainer import Limits
from fedcore.conditions import Conditions
from fedcore.errors import BadSignature, InvalidKey
from fedcore.params import FLOAT_BYTES
from fedcore.plan import MOST_PLAN_BYTES, Field, Plan, PredictPlan
from fedcore.signing import ModelRelease, verify
from fedcore.wire.messages import Assignment, Offer


def acceptable_tasks(
    offers: Sequence[Offer], examples: ExampleSource, now: Conditions, shows: Callable[[str], bool]
) -> tuple[str, ...]:
    """The tasks whose rules all hold, in the order of the offers. Raises ExamplesError.

    shows: whether the owner lets a coordinator know of a collection. Any other is treated as missing.
    """
    return tuple(offer.task for offer in offers if not offer.unmet(now) and _enough(offer, examples, shows))


def _enough(offer: Offer, examples: ExampleSource, shows: Callable[[str], bool]) -> bool:
    if not shows(offer.collection):
        return not (offer.min_examples or offer.min_recent_examples)
    count, age_s = examples.count(offer.collection), offer.max_example_age_s
    recent = count if age_s is None else examples.count_recent(offer.collection, age_s)
    return count >= offer.min_examples and recent >= offer.min_recent_examples


class Usage(Protocol):
    """The resources that earlier sessions used."""

    def spent(self) -> Spent:
        """The use over the last day."""


class Guard:
    """The checks of one session, in the order of their use.

    releases: checks the release of a secure round. timer: seconds of work, from any start; CPU time, as in the journal.
    """

    def __init__(
        self, policy: Policy, usage: Usage, releases: Releases, *, timer: Callable[[], float] = time.process_time
    ) -> None:
        self._policy = policy
        self._releases = releases
        self._spent = usage.spent()
        self._timer = timer
        self._started: float | None = None

    def check_address(self, coordinator: str) -> None:
        """Check the coordinator's URL before the first byte is sent. Raises PolicyForbids."""
        if self._policy.require_https and not coordinator.lower().startswith("https://"):
            _forbid("require_https", f"the coordinator is {coordinator}")

    def check_in(self, population: str, form: str) -> None:
        """Check the population, the day's budget and the format of graphs before the first request.

        Raises PolicyForbids.
        """
        self.check_model(population, form)
        limits, spent = self._policy.per_day, self._spent
        for rule, used, most in (
            ("compute_seconds", spent.seconds, limits.compute_seconds),
            ("bytes", spent.bytes, limits.bytes),
            ("sessions", spent.sessions, limits.sessions),
        ):
            if most is not None and used >= most:
                _forbid(f"per_day.{rule}", f"{used:.10g} of {most:.10g} are used up in the last 24 hours")

    def check_model(self, population: str, form: str) -> None:
        """Check the population and the format of graphs before asking for a model. Raises PolicyForbids."""
        self._check_population(population)
        if form == "executorch" and not (self._policy.signers or self._policy.unsigned_programs):
            _forbid("unsigned_programs", "ExecuTorch programs cannot be checked, and the policy names no signers")

    def check_released(self, release: ModelRelease, moved: int) -> None:
        """Check sizes before fetching the plan of a model release. `moved`: as for assignments. Raises PlanRefused."""
        self._check_sizes(release.plan.size, release.parameters.size, moved)

    def check_predict(
        self, release: ModelRelease, plan: Plan, predict: PredictPlan, form: str, *, to_move: int
    ) -> None:
        """Check the limits of a plan before fetching what predicts. `to_move`: as for a plan. Raises PlanRefused."""
        limits = self._policy.plan
        _at_most("plan.parameters", plan.schema.size, limits.parameters)
        kept_bytes = predict.graphs[form].size + sum(ref.size for ref in plan.model_refs)
        _at_most("plan.graph_bytes", kept_bytes, limits.graph_bytes)
        batch_bytes = predict.batch_size * sum(_bytes(item) for item in (*plan.examples.fields, *predict.outputs))
        memory_bytes = release.plan.size + release.parameters.size + kept_bytes + batch_bytes
        _at_most("plan.memory_bytes", memory_bytes, limits.memory_bytes)
        self._check_bytes(to_move)

    def visible(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The counts of examples in collections that a coordinator may know."""
        return {name: count for name, count in counts.items() if self.shows(name)}

    def told(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that a coordinator may know."""
        return {name: value for name, value in labels.items() if name in self._policy.labels}

    def shows(self, collection: str) -> bool:
        """Whether a plan may train on a collection, and a coordinator may know its number of examples."""
        return self._policy.collections is None or collection in self._policy.collections

    def check_stored(self, population: str, stored: StoredAssignment, size: int, answers: int) -> None:
        """Check an earlier session's work before finishing it: the policy may have changed. `size`: of its report, or
        0. answers: of the last week, with this one if it is one.

        A finished report is checked against all rules but the plan's limits, unfinished work only against the
        population. Raises PolicyForbids or PlanRefused.
        """
        self._check_population(population)
        if stored.phase != "assigned":
            self._check_round(stored.given, again=True)
            self._check_collection(stored.collection)
            self._check_bytes(size)
            self.check_question(stored.question, answers - 1)

    def check_assignment(self, assignment: Assignment, moved: int) -> None:
        """Check cohort, signature or release, and size before fetching the plan. `moved`: bytes of this session so far.

        The signature covers the plan's digest, which is checked when the plan is fetched. Raises PlanRefused.
        """
        self._check_round(assignment)
        self._check_sizes(assignment.plan.size, assignment.checkpoint.size, moved)

    def check_question(self, question: str | None, answers: int) -> None:
        """Check what a plan asks, before anything else of it. answers: of the last week. Raises PlanRefused."""
        rules = self._policy.questions
        if question is None:
            return
        if not rules.allowed:
            _refuse("questions.allowed", "the plan asks a question")
        if rules.per_week is not None and answers >= rules.per_week:
            _refuse("questions.per_week", f"{answers} of {rules.per_week} are answered within a week")

    def check_cache(self, needed: int) -> None:
        """Check that the cache can hold the bytes that a plan needs between rounds. Raises PlanRefused."""
        # What does not stay would be fetched in every round. With 0 that is what the owner wants.
        _at_most("cache_bytes", needed, self._policy.cache_bytes or None)

    def check_plan(
        self,
        plan: Plan,
        form: str,
        count: Callable[[str], int],
        *,
        received_bytes: int,
        to_move: int,
        kept_bytes: int = 0,
    ) -> None:
        """Check schema, limits and collection before reading examples and fetching graphs. This starts the timer.

        form: the format that this device runs. count: gives the number of examples in a collection; called only if the
        collection is allowed. received_bytes: of the plan, and of the model to start from. to_move: bytes of this
        session, including those still to come. kept_bytes: those that are kept for other tasks. Raises PlanRefused.
        """
        _check_schema(plan)
        limits = self._policy.plan
        _at_most("plan.parameters", _longest(plan), limits.parameters)
        graph_bytes = sum(ref.size for ref in plan.kept_refs(form))
        _at_most("plan.graph_bytes", graph_bytes, limits.graph_bytes)
        between_bytes = 2 * FLOAT_BYTES * sum(vector.size for vector in plan.kept)
        if plan.kept:
            _at_most("state_bytes", kept_bytes + between_bytes, self._policy.state_bytes)
        memory_bytes = received_bytes + graph_bytes + between_bytes + FLOAT_BYTES * plan.report.size
        _at_most("plan.memory_bytes", memory_bytes, limits.memory_bytes)
        self._check_bytes(to_move)
        self._check_collection(plan.examples.collection)
        if limits.batch_examples is not None:
            visited = _visited(plan, count(plan.examples.collection))
            _at_most("plan.batch_examples", visited, limits.batch_examples)
        self._started = self._timer()

    def limits(self) -> Limits:
        """The most that the training may use: the lesser of the plan's limits and the rest of the day's budget."""
        plan, day = self._policy.plan, self._policy.per_day.compute_seconds
        left_s = plan.compute_seconds if day is None else min(plan.compute_seconds, day - self._spent.seconds)
        return Limits(plan.memory_bytes, left_s)

    @property
    def min_cohort(self) -> int:
        """The fewest reports of a valid round."""
        return self._policy.min_cohort

    @property
    def seconds(self) -> float:
        """Seconds of work in this session."""
        return 0.0 if self._started is None else self._timer() - self._started

    def may_go_on(self) -> bool:
        """Return true, while training. Raises PlanRefused when the compute seconds of plan or day are used up."""
        seconds = self.seconds
        _at_most("plan.compute_seconds", seconds, self._policy.plan.compute_seconds)
        _at_most("per_day.compute_seconds", self._spent.seconds + seconds, self._policy.per_day.compute_seconds)
        return True

    def _check_population(self, population: str) -> None:
        allowed = self._policy.populations
        if allowed is not None and population not in allowed:
            _forbid("populations", f"it does not name {population!r}")

    def _check_collection(self, collection: str) -> None:
        if not self.shows(collection):
            _refuse("collections", f"the plan wants {collection!r}")

    def _check_round(self, assignment: Assignment, *, again: bool = False) -> None:
        if self._policy.require_secure_aggregation and assignment.secagg is None:
            _refuse("require_secure_aggregation", "the round asks for the report in the clear")
        if self._policy.min_cohort > (assignment.minimum or 1):
            minimum = (
                "says no minimum" if assignment.minimum is None else f"may count with {assignment.minimum} reports"
            )
            _refuse("min_cohort", f"the round {minimum}, the least allowed is {self._policy.min_cohort}")
        if self._policy.min_noise_multiplier and assignment.secagg is None:
            _refuse("min_noise_multiplier", "the round asks for the report in the clear, without noise")
        if assignment.secagg is None:
            self._check_signature(assignment)
        else:
            self._releases.check(assignment, again=again)

    def _check_sizes(self, plan: int, checkpoint: int, moved: int) -> None:
        if plan > MOST_PLAN_BYTES:
            raise PlanRefused(f"the plan has {plan:,} bytes, a device reads at most {MOST_PLAN_BYTES:,}")
        self._check_bytes(moved + plan + checkpoint)
        _at_most("plan.memory_bytes", plan + checkpoint, self._policy.plan.memory_bytes)

    def _check_signature(self, assignment: Assignment) -> None:
        signature = assignment.plan_signature
        if not self._policy.signers:
            return
        if signature is None:
            _refuse("signers", "the plan is not signed")
        if signature.signer not in self._policy.signers:
            _refuse("signers", f"the plan is signed by {signature.signer}, which the policy does not name")
        try:
            verify(assignment.plan, signature)
        except (BadSignature, InvalidKey) as error:
            _refuse("signers", str(error))

    def _check_bytes(self, session: int) -> None:
        _at_most("per_day.bytes", self._spent.bytes + session, self._policy.per_day.bytes)


def _check_schema(plan: Plan) -> None:
    """Refuse a plan whose schema differs in size from the vector that devices receive: it would evade the limits."""
    received = {vector.name: vector.size for vector in plan.broadcast}.get("params")
    if received != plan.schema.size:
        raise PlanRefused(f"the plan's schema has {plan.schema.size} parameters, its broadcast {received}")


def _longest(plan: Plan) -> int:
    """The length of the longest vector that a device needs for the plan."""
    carries = (vector.size for pass_plan in plan.passes for vector in pass_plan.carry)
    segments = (segment.size for segment in plan.report.segments)
    return max([plan.schema.size, *(vector.size for vector in (*plan.broadcast, *plan.kept)), *carries, *segments])


def _bytes(item: Field) -> int:
    """Bytes of one row of a field."""
    return math.prod(item.shape) * np.dtype(item.dtype).itemsize


def _visited(plan: Plan, examples: int) -> int:
    return sum(pass_plan.loop.batch_size * pass_plan.loop.step_count(examples) for pass_plan in plan.passes)


def _at_most(rule: str, value: float, allowed: float | None) -> None:
    if allowed is not None and value > allowed:
        _refuse(rule, f"{value:.10g} found, {allowed:.10g} allowed")


def _refuse(rule: str, why: str) -> NoReturn:
    raise PlanRefused(f"against {rule} of this device's policy", why)


def _forbid(rule: str, why: str) -> NoReturn:
    raise PolicyForbids(f"against {rule} of this device's policy", why)
