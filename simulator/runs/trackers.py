"""Trackers: tools of others that show runs, and tasks. They are told of every round, and need optional packages."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import RunError

if TYPE_CHECKING:
    from simulator.training import Point


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
    """Logs parameters and every figure to MLflow, where the variable MLFLOW_TRACKING_URI says.

    The file `mlflow-run-id` of the run's folder has MLflow's own id, under which a resumed run goes on: a figure that
    MLflow has of a round is not logged again. again: how the user goes on, in words. Raises RunError when the package
    is not installed, and at a call when MLflow does not take what it is told.
    """

    def __init__(self, run: Path, parameters: Mapping[str, object], again: str) -> None:
        self._run, self._parameters, self._again = run, parameters, again
        self._mlflow = _installed("mlflow", "mlflow")
        self._id: str | None = None
        self._resumed = False
        self._logged: dict[str, set[int]] = {}

    def __call__(self, number: int, point: Point) -> None:
        """Log the figures of a round."""
        with self._reached():
            if self._id is None:
                self._id = self._begin()
            new = {name: value for name, value in _figures(point).items() if number not in self._rounds_with(name)}
            self._mlflow.log_metrics(new, step=number)

    def close(self) -> None:
        """End the run in MLflow."""
        if self._id is not None:
            with self._reached():
                self._mlflow.end_run()

    def _rounds_with(self, name: str) -> set[int]:
        """The rounds of which a run that is resumed had a figure before."""
        if self._resumed and name not in self._logged:
            history = self._mlflow.MlflowClient().get_metric_history(self._id, name)
            self._logged[name] = {metric.step for metric in history}
        return self._logged.get(name, set())

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """A block in which MLflow is told something. Raises RunError when it does not take it."""
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise RunError(
                f"MLflow at {self._mlflow.get_tracking_uri()} does not take the run in {self._run}: {error}; mend "
                f"that, or set MLFLOW_TRACKING_URI to another place, and {self._again}"
            ) from error

    def _begin(self) -> str:
        kept = self._run / "mlflow-run-id"
        if kept.exists():
            self._resumed = True
            self._mlflow.start_run(run_id=kept.read_text())
            return kept.read_text()
        id_: str = self._mlflow.start_run(run_name=self._run.name).info.run_id
        kept.write_text(id_)
        self._mlflow.log_params(dict(self._parameters))
        return id_


def trackers(
    run: Path, parameters: Mapping[str, object], again: str, *, tensorboard: bool, mlflow: bool
) -> list[TensorBoard | MLflow]:
    """Those that were asked for, of a run in a folder. parameters, again: as of `MLflow`."""
    asked = (tensorboard, lambda: TensorBoard(run)), (mlflow, lambda: MLflow(run, parameters, again))
    return [make() for wanted, make in asked if wanted]


def _figures(point: Point) -> dict[str, int | float]:
    return {name: value for name, value in point.items() if name != "round"}


def _installed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RunError(f"{module} is not installed: pip install 'muster-fl[{extra}]'") from error
