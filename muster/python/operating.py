"""Coordinators from Python: their tasks as objects, questions to devices, and the demo on this machine."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from coordinator.rules.budget import BudgetReport
from coordinator.rules.entities import Evaluates, Measured, Regularly, RoundRecord, Task as Facts
from coordinator.rules.selection import Matching
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import TaskSettings
from fedcore.algorithms import create, module_of
from fedcore.bundle import Bundle
from fedcore.private_files import write_whole
from fedcore.questions.answer import Answer
from fedcore.release import Signed
from fedcore.signing import SigningKey
from muster import asking
from muster.creating import FIRST_COUNTER, Creation, Evaluated, Signs, matching, released_for
from muster.local.server import memory_folder, starting_coordinator
from muster.python.arguments import of_kind, speaking_python, with_settings_of
from muster.releasing_models import trained_in
from muster.remote import RemoteStore
from secagg.parameters import LEAST_COHORT
from simulator.population import Population

if TYPE_CHECKING:
    import torch

    from export.model import ModelSpec
    from muster.local.demo_tasks import DemoResult, OnProgress


class Task:
    """A task of a coordinator. Methods raise what the coordinator refuses with, and RemoteError when it is away."""

    def __init__(self, store: RemoteStore, task_id: str) -> None:
        self._store = store
        self.id = task_id

    def __repr__(self) -> str:
        return f"Task({self.id!r})"

    @property
    def name(self) -> str:
        """What people call it; others may have the same."""
        return self.facts.name

    @property
    def facts(self) -> Facts:
        """Its settings, algorithm and state, as they are now."""
        return self._store.task(self.id)

    @property
    def state(self) -> TaskState:
        """Its state now: active, paused, completed or cancelled."""
        return self.facts.state

    @property
    def why(self) -> str:
        """Why it is where it is, in a sentence."""
        return self._store.progress_of(self.id).sentence

    def metrics(self) -> list[RoundRecord]:
        """Every attempt at every round, in order: who reported, how long it took, the mean metrics of training."""
        return self._store.rounds(self.id)

    @property
    def points(self) -> list[dict[str, float]]:
        """The figures of every committed round, as those of a run, which `muster.plot` draws."""
        committed = [record for record in self.metrics() if record.state is RoundState.COMMITTED]
        return [{"round": record.number, **record.metrics} for record in committed]

    def evaluations(self) -> list[Measured]:
        """The evaluations of its models, by round, with their figures."""
        return self._store.evaluations(self.id)

    def watch(self, *, every_s: float = 1.0) -> Iterator[RoundRecord]:
        """Every round that is committed, from the first, until the task is over. every_s: seconds between looks."""
        seen = 0
        while True:
            over = self.state.ended  # looked at before the rounds: none follows
            committed = [record for record in self.metrics() if record.state is RoundState.COMMITTED]
            yield from committed[seen:]
            seen = len(committed)
            if over:
                return
            time.sleep(every_s)

    def tensors(self, number: int | None = None) -> dict[str, NDArray[np.float32]]:
        """The model as named tensors, after a round or, by default, the last one."""
        return safetensors.numpy.load(self._store.model(self.id, number))

    @speaking_python
    def model(self, source: str | ModelSpec, number: int | None = None) -> torch.nn.Module:
        """The model as a torch module in eval mode, after a round or, by default, the last one.

        source: its ModelSpec, or its name, as a plan's word for what code to import is not to be trusted. Raises
        SchemaError when it is another model.
        """
        from export.inference.torch_model import module_of  # needs torch, which a coordinator has not

        return module_of(trained_in(self._store, self.id, number), source).module

    def save(self, path: Path | str, number: int | None = None) -> None:
        """Write the tensors in safetensors' format, as `muster task checkpoint` does. Raises NotWritten."""
        write_whole(Path(path), self._store.model(self.id, number))

    def answer(self) -> Answer:
        """The answer so far to the question that it asks, as a table.

        Raises WrongKind where it asks none, and Unanswered before the first round.
        """
        return asking.as_answer(asking.read_answer(self._store, self.id))

    def pause(self) -> None:
        """Open no new round; the running one finishes."""
        self._store.pause(self.id)

    def resume(self) -> None:
        """Undo `pause`."""
        self._store.resume(self.id)

    def cancel(self) -> None:
        """End the task and abandon its running round; what was committed stays."""
        self._store.cancel(self.id)

    def roll_back(self, number: int) -> None:
        """Let a paused task go on from the model after an earlier round; 0 is the start."""
        self._store.roll_back(self.id, number)


class Coordinator(AbstractContextManager["Coordinator"]):
    """The coordinator whose port for operators is at `url`. token: by default what MUSTER_TOKEN holds."""

    def __init__(self, url: str, token: str | None = None) -> None:
        of_kind("url", url, (str,), "the address of its port for operators, such as http://127.0.0.1:8081")
        self._store = RemoteStore(url, token or os.environ.get("MUSTER_TOKEN"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._store.__exit__(None, None, None)

    @property
    def store(self) -> RemoteStore:
        """What operators do with it."""
        return self._store

    def tasks(self) -> list[Task]:
        """Every task, oldest first."""
        return [Task(self._store, facts.id) for facts in self._store.tasks()]

    def task(self, task_id: str) -> Task:
        """One task. Raises UnknownTask when there is none."""
        return Task(self._store, self._store.task(task_id).id)

    def budget(self, population: str) -> BudgetReport:
        """The privacy budget of a population, and what its tasks have spent of it or still may, per device.

        None for an ε stands for no bound.
        """
        return self._store.budget(population)

    def set_budget(self, population: str, *, epsilon: float, delta: float, minimum_devices: int = 1) -> BudgetReport:
        """Set the privacy budget that all tasks of a population share, and the least devices of a group that its
        questions show.

        Tasks that would exceed it, or promise no privacy, are refused from now on, with BudgetExceeded. Raises
        InvalidBudget for values that cannot be, and for a budget below what the tasks may have spent.
        """
        return self._store.set_budget(population, epsilon, delta, minimum_devices)

    def remove_budget(self, population: str) -> BudgetReport:
        """Remove the privacy budget of a population; what its tasks have spent stays counted."""
        return self._store.remove_budget(population)

    @speaking_python
    @with_settings_of(TaskSettings)
    def create(  # noqa: PLR0913  # one keyword for each choice
        self,
        bundle: Bundle | None = None,
        *,
        like: str | None = None,
        name: str | None = None,
        evaluate: str | Path | None = None,
        against: str | Path | None = None,
        evaluate_every: int | None = None,
        evaluation: Bundle | None = None,
        release_key: SigningKey | None = None,
        counter: int = FIRST_COUNTER,
        **settings: Any,
    ) -> Task:
        """Start a task on a plan bundle, which is uploaded, or like the task with the id `like`.

        A task like another has what it has and is not given here: settings, name and release, and its bundle, which
        the coordinator has; with a bundle of its own, only the settings. None for a part leaves it out.

        name: for people, by default the bundle's. evaluate, against: the model that devices measure, and the one that
        it is compared with, each as "TASK", "TASK@ROUND" or a file of `save`; for a bundle of an
        algorithm that evaluates, whose task has one round by default. evaluate_every, evaluation: after every so many
        rounds of a training, evaluate its model on the held-out devices by a bundle that evaluates. release_key: signs
        the release that a task with `secagg` needs, with `counter` as its number. A part, such as `secagg`, is an
        object or a mapping.

        Raises InvalidTask, naming the setting and what it may be, or what keeps the model from being evaluated. The
        other keywords are the settings of a task:
        """
        of_kind("bundle", bundle, (Bundle, type(None)), "a Bundle, as muster.export gives it; Bundle(folder) reads one")
        of_kind("like", like, (str, type(None)), "the id of a task, such as task.id")
        of_kind("evaluation", evaluation, (Bundle, type(None)), "a Bundle that evaluates")
        of_kind("evaluate_every", evaluate_every, (int, type(None)), "a number of rounds")
        model, other = (None if source is None else str(source) for source in (evaluate, against))
        evaluated = Evaluated(model, other, evaluate_every, evaluation)
        sign = signing(self._store, release_key, counter)
        creation = Creation(bundle, like, (), evaluated, name, None, sign)
        made = creation.register(self._store, settings)
        _warn(self._store, made.settings)
        return Task(self._store, made.id)

    def matching(self, population: str, where: str = "") -> Matching:
        """How many of the devices that came within a day match a target, and the labels that they tell."""
        return self._store.matching(population, where)


def _warn(store: RemoteStore, settings: TaskSettings) -> None:
    """Warn of a target that too few devices match, or that names a label which none told."""
    for sentence in matching(store, settings)[1:]:
        warnings.warn(sentence, stacklevel=4)


def signing(store: RemoteStore, key: SigningKey | None, counter: int = FIRST_COUNTER) -> Signs | None:
    """What signs releases of a coordinator's tasks with a key, if there is one. counter: as of `released`."""
    return None if key is None else partial(_released, store, key, counter)


def _released(  # one argument for each part
    store: RemoteStore,
    key: SigningKey,
    counter: int,
    bundle: Bundle,
    chosen: TaskSettings,
    of: Evaluates | Regularly | None,
) -> Signed:
    bundles = [bundle, of.bundle] if isinstance(of, Regularly) else [bundle]
    modules = [module_of(one.manifest.algorithm.name) for one in bundles]
    return released_for(store, bundle, chosen, key, modules, evaluation=of, counter=counter)


# The demo from Python: a coordinator, an authority and emulated devices as processes of this machine.


ALGORITHMS, ROUNDS, DEVICES = ("mimelite", "fedadam"), 25, 20


def demo(  # noqa: PLR0913  # what is run, and what is kept of it
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    rounds: int = ROUNDS,
    devices: int = DEVICES,
    seed: int = 0,
    plain: bool = False,
    out: Path | str | None = None,
    on_progress: OnProgress = lambda name, number, note: None,
) -> DemoResult:
    """Train a digit recogniser on 60 emulated devices, which speak HTTP to a real coordinator, and read digits with it.

    The best model is evaluated on held-out devices, released to all, and used on one of them (`DemoResult.app`).

    algorithms: names, or one's own as package.module:Class. devices: per round, of 60; with 8 or more, reports are
    summed under secure aggregation, unless `plain`. out: a new folder that keeps the run of each algorithm as that of a
    simulation, with its plan. on_progress: called with an algorithm, its committed rounds, and a note. Takes about
    a minute. Raises DemoFailed, UnknownAlgorithm, TypeError, RunError when the folder is there, and RunNotKept
    when it cannot be made.
    """
    if isinstance(algorithms, str):
        raise TypeError(f"algorithms is a text; expected several names, such as [{algorithms!r}]")
    names = tuple(dict.fromkeys(algorithms))
    for name in names:
        create(name, None, [module_of(name)])
    secure, kept = devices >= LEAST_COHORT and not plain, None if out is None else Path(out)
    return trained(names, rounds, devices, seed, secure=secure, out=kept, begin=lambda: on_progress)


def trained(  # noqa: PLR0913  # a demo's settings, and who watches
    names: tuple[str, ...],
    rounds: int,
    devices: int,
    seed: int,
    *,
    secure: bool,
    out: Path | None,
    begin: Callable[[], OnProgress],
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    runtime: Literal["python", "jvm"] = "python",
) -> DemoResult:
    """Run all algorithms in a folder that is removed at the end, but for what `out` keeps.

    loading: around the import of large libraries. begin: called after it, to be told of progress.
    """
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(_folder(out))
        # Sixty phones do not wait for one disk, as sixty emulated devices would.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-demo-", dir=memory_folder())))
        with loading():
            # Coordinator and devices start meanwhile, on another core.
            from simulator.fleet.fork_servers import HERE, JVM, fork_servers

            modules = ",".join(filter(None, map(module_of, names)))
            started = stack.enter_context(starting_coordinator(folder, secure=secure, algorithms=modules))
            servers = stack.enter_context(
                fork_servers(dict.fromkeys((HERE, JVM) if runtime == JVM else (HERE,), ("onnxruntime",)))
            )
            from muster.local.demo_tasks import DemoConfig, run_demo
            from simulator.engines.memory import one_thread

        stack.enter_context(one_thread())
        config = DemoConfig(names, rounds, devices, folder, seed, secure, out, runtime)
        return run_demo(config, servers, started, begin())


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The new folder of what is kept, made before anything is trained; it goes again where nothing was kept."""
    from simulator.runs.running import check_free, writing  # others need not load it

    check_free(out)
    with writing(out):
        out.mkdir(parents=True)
    try:
        yield
    finally:
        with suppress(OSError):
            out.rmdir()


# Questions to devices from Python: of a coordinator's population, or of the clients of a data set.


DATASET = "the name of a data set, or a muster.Population"
COORDINATOR = "a muster.Coordinator"


@speaking_python
def ask(  # noqa: PLR0913  # one keyword for each choice
    question: str,
    *names: str,
    dataset: str | Population | None = None,
    coordinator: Coordinator | None = None,
    population: str | None = None,
    field: Sequence[str] = (),
    like: str | None = None,
    data: Path | str | None = None,
    minimum_devices: int = asking.MINIMUM_DEVICES,
    epsilon: float | None = None,
    delta: float | None = None,
    users: int | None = None,
    release_key: SigningKey | None = None,
    timeout: float = asking.TIMEOUT_S,
    **settings: Any,
) -> Answer:
    """Ask devices what they hold; the answer is a table, with `dataframe()` for pandas.

    question: SQL, such as "SELECT y, COUNT(*) FROM examples GROUP BY y", or the name of one, such as "labels", with
    `names` of fields. dataset: whose clients answer at once; data: the folder of those on disk. coordinator,
    population: whose devices do, as soon as they come, within `timeout` seconds. field, like: the fields of their
    examples, as "y:uint8:10", or those of a task; by default those of the population's last tasks. minimum_devices: of
    a group that is shown. epsilon, delta, users: answer with noise, for such a promise over so many devices.
    release_key: signs a question with `secagg`. settings: of its task, such as goal, rounds and secagg, as
    `Coordinator.create` has them.

    Raises QuestionError, with the place in the text; InvalidTask for settings that cannot be; Unanswered when no answer
    comes in time, with the id of its `task`, whose `answer()` may come later.
    """
    for name, value in (("question", question), *(("names", name) for name in names)):
        of_kind(name, value, (str,), "a text: SQL, or the name of a question and its fields")
    of_kind("dataset", dataset, (str, Population, type(None)), DATASET)
    of_kind("coordinator", coordinator, (Coordinator, type(None)), COORDINATOR)
    of_kind("release_key", release_key, (SigningKey, type(None)), "a SigningKey")
    words, terms = (
        (question, *names),
        asking.Terms(minimum_devices, epsilon is not None, settings.get("secagg") is not None),
    )
    if dataset is not None:
        if coordinator is not None or population is not None:
            raise TypeError("dataset answers at once: leave coordinator and population out")
        asking.check_at_once(settings)
        from simulator.planned import ask_population  # needs torch, as no other question here does

        fields, users_of = _clients(dataset, data)
        return ask_population(asking.compiled(words, fields, terms), users_of, epsilon=epsilon, delta=delta)
    if coordinator is None or population is None:
        raise TypeError(f"name who is asked: dataset, {DATASET}; or coordinator, {COORDINATOR}, and its population")
    store = coordinator.store
    fields = asking.fields_named(field) if field else asking.fields_of(store, population, like)
    asked = asking.compiled(words, fields, terms)
    privacy = None if epsilon is None else asking.promise_of(epsilon, delta, users)
    chosen = asking.settings_of_question(asked, {"population": population, **settings}, privacy)
    task = asking.begin(store, asked, chosen, lambda note: None, sign=signing(store, release_key))
    _warn(store, task.settings)
    asking.wait_for(store, task.id, timeout, lambda note: None)
    return asking.as_answer(asking.read_answer(store, task.id))


def _clients(dataset: str | Population, data: Path | str | None) -> tuple[asking.Fields, Population]:
    """The fields of a data set, and its users."""
    if isinstance(dataset, Population):
        return asking.fields_in(dataset, "the population"), dataset
    from simulator import datasets

    population = datasets.load(dataset, data)
    return asking.fields_in(population, f"data set {dataset}"), population
