"""Creation of tasks for the command line and the Python API: from a bundle, like another task, or both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TaskSettings
from fedcore.names import offered
from fedcore.validation import build, settings_of
from muster.evaluating import Evaluated, starting_from

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Evaluates, Regularly, Task
    from fedcore.bundle import Bundle
    from fedcore.release import Signed

Signs: TypeAlias = "Callable[[Bundle, TaskSettings, Evaluates | Regularly | None], Signed]"


class Creation(NamedTuple):
    """What a task is made of: a bundle, or that of the task which it is like; of that one also what is not given.

    unset: settings of that task which are as by default again. name: for people. release: signed already; or `sign`
    makes it, of the bundle as the task begins with it, the settings, and the evaluation.
    """

    bundle: Bundle | None
    like: str | None = None
    unset: Collection[str] = ()
    evaluated: Evaluated = Evaluated(None, None)
    name: str | None = None
    release: Signed | None = None
    sign: Signs | None = None

    def register(self, store: TaskStore, given: Mapping[str, Any], *, text: bool = False) -> Task:
        """The new task, with the settings that are given. text: they may be text. Raises as `register_task`."""
        from coordinator.store.starting import trained_round

        given = self.evaluated.settings(given)
        if self.like is None:
            if self.bundle is None:
                raise InvalidTask("a task needs a bundle (--plan), or another task to be like (--like)")
            if self.unset:
                raise InvalidTask("--unset goes with --like, and leaves settings of that task out")
            settings = build(TaskSettings, given, text=text)
        else:
            original = store.task(self.like)
            settings = build(TaskSettings, settings_like(original, given, self.unset), text=text)
            if self.bundle is None:
                return self._begun_anew(store, original, settings)
        if self.sign is not None and settings.starts_from is not None:
            # The release is of this round's model, and the store takes no later one.
            task, number = trained_round(store, settings.starts_from)
            settings = replace(settings, starts_from=f"{task}@{number}")
        with starting_from(store, self.bundle, self.evaluated) as (bundle, evaluation):
            release = self.release if self.sign is None else self.sign(bundle, settings, evaluation)
            return store.register_task(bundle, settings, release, name=self.name, evaluation=evaluation)

    def _begun_anew(self, store: TaskStore, original: Task, settings: TaskSettings) -> Task:
        """A task on the bundle of another, as the coordinator has it."""
        if self.evaluated.model is not None or self.sign is not None:
            raise InvalidTask("a model to evaluate, and a key to sign with, need the bundle here: name it with --plan")
        evaluation = self.evaluated.regularly or original.evaluates or original.evaluation
        release = self.release or (original.release if settings.secagg else None)
        name = self.name or original.name
        return store.register_task(store.manifest(original.id), settings, release, name=name, evaluation=evaluation)


def settings_like(task: Task, given: Mapping[str, Any], unset: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a task as they were asked for, with those that are given in their place; of a part, some of it.

    unset: settings that are as by default again. Raises InvalidTask.
    """
    from coordinator.rules.private_sums import as_asked

    known = {one.name: one for one in settings_of(TaskSettings)}
    for name in unset:
        if name not in known:
            raise InvalidTask(f"there is no {name!r} to unset; {offered(name, known)}")
        if known[name].required:
            raise InvalidTask(f"{name} has no default and cannot be unset: give another value")
    kept: dict[str, Any] = msgspec.to_builtins(as_asked(task.settings))
    whole = {name: value for name, value in kept.items() if name not in unset}
    for name, value in given.items():
        before = whole.get(name)
        whole[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return whole
