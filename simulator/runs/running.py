"""Running simulations in folders: from the start, and on from the last checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from simulator.configuration import SimulationConfig
from simulator.course import Point
from simulator.errors import ProcessDied, RunError
from simulator.runs.config_file import differences
from simulator.runs.folder import RunFolder, check_free
from simulator.runs.reading import SECONDS, KeptEngine, read_config, read_engine, read_result
from simulator.simulation import OnRound, Overrides, SimulationResult, advance, completed, training_of
from simulator.training import Tensors, Training, Vectors

# Rounds may take milliseconds or minutes, so checkpoints follow the clock. After a kill so much work is done again.
CHECKPOINT_AFTER_S = 30.0


def start_run(
    path: Path | str,
    config: SimulationConfig,
    on_round: OnRound = lambda number, point: None,
    *,
    checkpoint_after_s: float = CHECKPOINT_AFTER_S,
    given: Overrides = Overrides(),
) -> SimulationResult:
    """Run a simulation in a new folder.

    on_round: a KeyboardInterrupt that it raises leaves a checkpoint of that round. checkpoint_after_s: seconds between
    checkpoints. given: objects, with which the run cannot be resumed. Raises RunError when the folder exists,
    RunNotKept when it cannot be written to, and what `simulate` raises. What is raised before the first round leaves no
    folder.
    """
    path = Path(path)
    check_free(path)
    config = completed(config, given)
    training = training_of(config, given=given)
    engine = KeptEngine(training.facts.engine, training.facts.engine_reason)
    with contextlib.closing(RunFolder.create(path, config, engine)) as folder:
        run = _Run(folder, training, on_round, checkpoint_after_s)
        return run.finish(config, [], engine)


def resume_run(
    path: Path | str,
    config: SimulationConfig | None = None,
    on_round: OnRound = lambda number, point: None,
    *,
    on_start: Callable[[int], None] = lambda rounds: None,
    checkpoint_after_s: float = CHECKPOINT_AFTER_S,
) -> SimulationResult:
    """Go on with the run in a folder from its last whole checkpoint, to the bits of a run that never ended before.

    A run that is done gives its result. config: must be that of the folder, but for `processes` and `ray`. on_start: is
    told how many rounds the checkpoint holds, before the next one. Raises RunError when it is not, when there is no
    run, or when a process that lives is at it; and as `start_run`.
    """
    path = Path(path)
    kept = read_config(path)
    config = completed(config or kept)
    different = differences(kept, config)
    if different:
        raise RunError(
            f"{path} holds a run of another configuration; it and this one differ in {', '.join(different)}. Resume it "
            f"with its own, by --resume={path} alone, or take another folder"
        )
    with contextlib.closing(RunFolder.open(path)) as folder:
        done = read_result(path)
        if done is not None:
            return done
        engine = read_engine(path)
        training = training_of(config, engine.engine)
        course, vectors = folder.rewind()
        if vectors is not None:
            training.restore(vectors)
        on_start(len(course))
        run = _Run(folder, training, on_round, checkpoint_after_s)
        return run.finish(config, course, engine)


def keep_run(
    path: Path,
    config: SimulationConfig,
    points: Sequence[Point],
    vectors: Vectors,
    tensors: Tensors,
    result: SimulationResult,
) -> None:
    """Keep a training that others than the engine did, such as a fleet, in a new folder as `start_run` has it.

    points: with the wall time of each round in `seconds`. Raises RunError and RunNotKept.
    """
    with contextlib.closing(RunFolder.create(path, config, KeptEngine(None, result.engine_reason))) as folder:
        for point in points:
            folder.add(point)
        folder.save(len(points), vectors)
        folder.finish(result, tensors)


class _Run:
    """A training in the folder of its run."""

    def __init__(self, folder: RunFolder, training: Training, on_round: OnRound, checkpoint_after_s: float) -> None:
        self._folder, self._training, self._on_round = folder, training, on_round
        self._checkpoint_after_s = checkpoint_after_s
        self._round_at = self._saved_at = monotonic()

    def finish(self, config: SimulationConfig, course: list[Point], engine: KeptEngine) -> SimulationResult:
        """Run the rounds after `course` and keep them, a checkpoint from time to time and at the end, and the result.

        engine: that of the first rounds.
        """
        try:
            advanced = advance(config, self._training, course, self._keep)
        except ProcessDied as died:
            raise ProcessDied(f"{died}; go on with --resume={self._folder.path}") from died
        result = replace(advanced, engine_reason=engine.reason)
        self._folder.save(len(course), self._training.vectors())
        self._folder.finish(result, self._training.tensors())
        return result

    def _keep(self, number: int, point: Point) -> None:
        now = monotonic()
        self._folder.add(point | {SECONDS: now - self._round_at})
        try:
            self._on_round(number, point)  # before the checkpoint, after which nobody is told of the round again
        except KeyboardInterrupt:
            self._folder.save(number, self._training.vectors())
            raise
        if now - self._saved_at >= self._checkpoint_after_s:
            self._folder.save(number, self._training.vectors())
            self._saved_at = now
        self._round_at = now
