"""Trackers: tools of others that show runs. They are told of every round, and need packages that are optional."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.configuration import SimulationConfig
from simulator.course import Point
from simulator.errors import RunError
from simulator.runs.config_file import flat_of


class TensorBoard:
    """Writes every figure as a scalar for TensorBoard, under the names `train/loss`, `test/accuracy` and so on.

    Event files lie in the folder `tensorboard` of the run. Every round is there at once, also when the process is
    killed next. Where a resumed run goes back, its new rounds replace those that were written before. Raises RunError
    when the package is not installed.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._make = _installed("tensorboardX", "tensorboard").SummaryWriter
        self._writer: Any = None

    def __call__(self, number: int, point: Point) -> None:
        """Write the figures of a round."""
        if self._writer is None:
            # The suffix keeps apart two starts in one second, which alone would share a file.
            self._writer = self._make(str(self._folder), purge_step=number, filename_suffix=f".from-{number}")
        for name, value in _figures(point).items():
            self._writer.add_scalar(name.replace(".", "/"), value, number)
        self._writer.flush()  # a checkpoint may follow, after which nobody tells of this round again

    def close(self) -> None:
        """Write what is not yet on the disk."""
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """Logs the configuration and every figure to MLflow, where the variable MLFLOW_TRACKING_URI says.

    The file `mlflow-run-id` of the run's folder has MLflow's own id, under which a resumed run goes on. Raises RunError
    when the package is not installed, and at a call when MLflow does not take what it is told.
    """

    def __init__(self, run: Path, config: SimulationConfig) -> None:
        self._run, self._config = run, config
        self._mlflow = _installed("mlflow", "mlflow")
        self._begun = False

    def __call__(self, number: int, point: Point) -> None:
        """Log the figures of a round."""
        with self._reached():
            if not self._begun:
                self._begin()
            self._mlflow.log_metrics(_figures(point), step=number)

    def close(self) -> None:
        """End the run in MLflow."""
        if self._begun:
            with self._reached():
                self._mlflow.end_run()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """A block in which MLflow is told something. Raises RunError when it does not take it."""
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise RunError(
                f"MLflow at {self._mlflow.get_tracking_uri()} does not take the run in {self._run}: {error}; mend "
                f"that, or set MLFLOW_TRACKING_URI to another place, and go on with --resume={self._run}"
            ) from error

    def _begin(self) -> None:
        self._begun, kept = True, self._run / "mlflow-run-id"
        if kept.exists():
            self._mlflow.start_run(run_id=kept.read_text())
            return
        kept.write_text(self._mlflow.start_run(run_name=self._run.name).info.run_id)
        self._mlflow.log_params(flat_of(self._config))


def _figures(point: Point) -> dict[str, int | float]:
    return {name: value for name, value in point.items() if name != "round"}


def _installed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RunError(f"{module} is not installed: pip install 'muster-fl[{extra}]'") from error
