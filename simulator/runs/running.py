"""Running simulations in folders: configuration, metrics, checkpoints, and going on from the last one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import IO

import msgspec
import safetensors.numpy

from fedcore.private_files import sync_folder, write_private
from simulator.configuration import SimulationConfig
from simulator.errors import ProcessDied, RunError, RunNotKept
from simulator.runs import reading
from simulator.simulation import OnRound, Overrides, SimulationResult, advance, completed, training_of
from simulator.training import Point, Tensors, Training, Vectors

# The folder of a run: its configuration, the metrics of every round, checkpoints, and the result.
#
#     config.toml                     the configuration, with every setting
#     engine.json                     the engine that trains, and why that one
#     metrics.jsonl                   a line for each round: its point of the course, and its wall time in `seconds`
#     checkpoint-00000010.safetensors all that rounds 1 to 10 moved; the last two are kept
#     model.safetensors               the model at the end, as named tensors
#     result.json                     the result, once the run has ended
#     lock                            held by the process that runs
#
# Files are written whole and durably, and metrics before the checkpoint that follows them. So a checkpoint is good, and
# the rounds up to it have their lines, whenever the process or the machine ended.

KEPT = 2


class RunFolder:
    """A run's folder, which this process alone writes to until `close`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self._lock = path, lock
        self._metrics = (path / reading.METRICS).open("ab", buffering=0)

    @classmethod
    def create(cls, path: Path, config: SimulationConfig, engine: reading.KeptEngine) -> RunFolder:
        """A new folder, which is there whole or not at all. Raises RunError where there is something already."""
        check_free(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with writing(path):
            with ExitStack() as undo:
                undo.callback(shutil.rmtree, partial, ignore_errors=True)
                partial.mkdir(parents=True)
                lock = undo.enter_context(locked(partial))
                write_private(partial / reading.CONFIG, reading.to_toml(config).encode())
                write_private(partial / reading.ENGINE, msgspec.json.encode(engine))
                partial.rename(path)
                undo.pop_all()
            sync_folder(path.parent)
            return cls(path, lock)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that began. Raises RunError when it holds no run, or a process that lives uses it."""
        reading.read_config(path)
        with writing(path):
            lock = locked(path)
            for partial in path.glob("*.partial"):  # of a process that was killed
                partial.unlink()
            return cls(path, lock)

    def close(self) -> None:
        """Let other processes use the folder."""
        self._metrics.close()
        self._lock.close()

    def add(self, point: Point) -> None:
        """Add a round's line to the metrics; durable with the next checkpoint. Raises RunNotKept."""
        with writing(self.path):
            line = memoryview(msgspec.json.encode(point) + b"\n")
            while line:
                line = line[self._metrics.write(line) :]

    def save(self, number: int, vectors: Vectors) -> None:
        """Keep all that the rounds up to `number` moved, and drop older checkpoints. Raises RunNotKept."""
        with writing(self.path):
            os.fsync(self._metrics.fileno())
            data = safetensors.numpy.save(dict(vectors))
            write_private(self.path / reading.CHECKPOINT.replace("*", f"{number:08d}"), data, replace=True)
            for old in reading.checkpoints(self.path)[KEPT:]:
                old.unlink()

    def finish(self, result: SimulationResult, tensors: Tensors) -> None:
        """Keep the model, if there is one, and the result. Raises RunNotKept."""
        with writing(self.path):
            if tensors:
                write_private(self.path / reading.MODEL, safetensors.numpy.save(tensors), replace=True)
            write_private(self.path / reading.RESULT, msgspec.json.encode(result), replace=True)

    def rewind(self) -> tuple[list[Point], Vectors | None]:
        """Go back to the last whole checkpoint: the course up to it, and what it holds; None before the first.

        The lines of later rounds are removed. Raises RunNotKept.
        """
        lines = reading.whole_lines(self.path)
        rounds, vectors = self._last_whole(len(lines))
        with writing(self.path):
            os.truncate(self._metrics.fileno(), sum(len(line) + 1 for line in lines[:rounds]))
        return reading.course_of(lines[:rounds]), vectors

    def _last_whole(self, most: int) -> tuple[int, Vectors | None]:
        """The last whole checkpoint of no more rounds than `most`: its round, and what it holds."""
        for path in reading.checkpoints(self.path):
            number = reading.round_of(path)
            vectors = reading.read_vectors(path) if number <= most else None
            if vectors is not None:
                return number, vectors
        return 0, None


def check_free(path: Path) -> None:
    """Raise RunError when a new run cannot have the folder, as there is something already."""
    if path.exists() or path.is_symlink():
        is_run = (path / reading.CONFIG).is_file()
        remedy = f"go on with it by --resume={path}, or take" if is_run else "take"
        raise RunError(f"{path} exists already; {remedy} another folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes to the run in a folder. Raises RunNotKept."""
    try:
        yield
    except OSError as error:
        began = (path / reading.CONFIG).is_file()
        remedy = f"; once that is mended, go on with --resume={path}" if began else ""
        why = f"{error.strerror}: {error.filename or path}"
        raise RunNotKept(f"the run in {path} cannot be kept: {why}{remedy}") from error


def locked(path: Path) -> IO[str]:
    """The lock of a folder, held until it is closed. Raises RunError when another process holds it, and OSError."""
    with ExitStack() as undo:
        lock = undo.enter_context((path / reading.LOCK).open("a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read() or "of another machine"
            raise RunError(f"{path} is in use by process {holder}; wait for its end, or end it") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        undo.pop_all()
        return lock


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
    engine = reading.KeptEngine(training.facts.engine, training.facts.engine_reason)
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
    kept = reading.read_config(path)
    config = completed(config or kept)
    different = reading.differences(kept, config)
    if different:
        raise RunError(
            f"{path} holds a run of another configuration; it and this one differ in {', '.join(different)}. Resume it "
            f"with its own, by --resume={path} alone, or take another folder"
        )
    with contextlib.closing(RunFolder.open(path)) as folder:
        done = reading.read_result(path)
        if done is not None:
            return done
        engine = reading.read_engine(path)
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
    with contextlib.closing(RunFolder.create(path, config, reading.KeptEngine(None, result.engine_reason))) as folder:
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

    def finish(self, config: SimulationConfig, course: list[Point], engine: reading.KeptEngine) -> SimulationResult:
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
        self._folder.add(point | {reading.SECONDS: now - self._round_at})
        try:
            self._on_round(number, point)  # before the checkpoint, after which nobody is told of the round again
        except KeyboardInterrupt:
            self._folder.save(number, self._training.vectors())
            raise
        if now - self._saved_at >= self._checkpoint_after_s:
            self._folder.save(number, self._training.vectors())
            self._saved_at = now
        self._round_at = now
