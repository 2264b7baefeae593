"""Exports and forecasts from Python: by name or with objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from export.build import Progress, export_bundle, source_of
from export.errors import ExportError
from export.inference.making import SUFFIXES, InferenceModel, check_form, inference_model
from export.inference.trained import Trained
from export.model import Model, ModelSpec
from export.models import load
from export.normalising import normalised
from fedcore.algorithms import create, module_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.batching import HoldOut
from fedcore.bundle import Bundle
from fedcore.compression import Compression
from fedcore.questions.answer import Answer
from fedcore.validation import build, own_name
from muster.python.arguments import check_trained, of_kind, progress_line, speaking_python, with_settings_of
from simulator.configuration import to_config
from simulator.forecast import twin
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import CommittedRound
from simulator.forecast.twin import costs_of


@speaking_python
def export(  # noqa: PLR0913  # what is exported, how, and where it goes
    model: str | ModelSpec,
    algorithm: str | Algorithm = "fedavg",
    out: Path | str = "plan",
    *,
    settings: Mapping[str, Any] | None = None,
    formats: Sequence[str] = ("onnx",),
    seed: int = 0,
    compress: str = "",
    hold_out_examples: float = 0.0,
    on_held_out_examples: bool = False,
    local: str = "",
    normalise: Answer | Path | str | Sequence[Answer | Path | str] = (),
    force: bool = False,
    progress: Progress = lambda form, doing: None,
) -> Bundle:
    """Make the training graphs of a model and an algorithm, prove them against torch, and write them as a plan bundle.

    model, algorithm: names, as `muster export` takes them, or objects. settings: of an algorithm that is named.
    formats: onnx, executorch. seed: of the initial weights. compress: how reports become smaller, such as
    "rotation,subsample=0.25" (docs/compression.md). hold_out_examples: the share of each device's examples that is held
    out. on_held_out_examples: run on exactly these instead. local: the parameters that stay on clients, such as "2.*"
    (docs/models.md). normalise: the answer to `muster.ask("normaliser", …)`, or a file of its JSON, for an input; or
    several. force: replace a plan that is in the folder. progress: told which format is worked on, and what is done.

    The bundle has the plan (`bundle.plan`) and the proof (`bundle.certificate`). Raises ExportError, AlgorithmError,
    CompressionError, PlanError for a share that cannot be, and TypeError for an argument of a wrong type.
    """
    check_trained(model, algorithm, settings)
    of_kind("formats", formats, (list, tuple), 'several names, such as ["onnx"]')
    of_kind("hold_out_examples", hold_out_examples, (int, float), "a share, such as 0.2")
    folder, compression = Path(out), Compression.parse(compress)
    hold_out = HoldOut.asked(hold_out_examples, on_held_out=on_held_out_examples)
    if (folder / "manifest.json").exists() and not force:
        raise ExportError(
            f"{folder} holds a plan already; name another folder with out=, or replace it with force=True"
        )
    if isinstance(algorithm, str):
        algorithm = create(algorithm, dict(settings or {}), [module_of(algorithm)])
    spec, source = (load(model), own_name(model)) if isinstance(model, str) else (model, None)
    answers = [normalise] if isinstance(normalise, Answer | Path | str) else normalise
    made = Model(normalised(spec.with_local(local), answers), seed), algorithm, folder, source, tuple(formats), progress
    return export_bundle(*made, compression=compression, hold_out=hold_out)


@speaking_python
def export_model(  # noqa: PLR0913  # which model, in which form, and where it goes
    bundle: Bundle,
    checkpoint: Mapping[str, NDArray[np.float32]] | Path | str,
    out: Path | str | None = None,
    *,
    to: str = "onnx",
    int8: bool = False,
    examples: Mapping[str, NDArray[Any]] | None = None,
    model: str | ModelSpec | None = None,
    force: bool = False,
) -> InferenceModel:
    """Write a trained model as a file that apps load without Muster, with the weights inside.

    checkpoint: its tensors, as `Task.tensors` and `Run.tensors` give them, or a file of their `save`. out: the file; by
    default model.onnx, model.pte or model.pt2. to: onnx, executorch, or torch, for torch.export.load. int8: have ONNX
    Runtime quantise the weights; `.cost` of the result is what that costs on `examples`, with a label or without, by
    default on random ones. model: for executorch and torch the model's own source, unless it is built in. force:
    replace the file that is there.

    Raises ExportError; PlanError where the bundle has no predict graph; SchemaError for a checkpoint of another model.
    """
    of_kind("bundle", bundle, (Bundle,), "a Bundle, as muster.export gives it; Bundle(folder) reads one")
    of_kind("checkpoint", checkpoint, (Mapping, Path, str), "tensors by name, or a file of them")
    check_form(to, int8=int8)
    file = Path(f"model{SUFFIXES[to]}" if out is None else out)
    if file.exists() and not force:
        raise ExportError(f"{file} exists; name another file with out=, or replace it with force=True")
    tensors = checkpoint if isinstance(checkpoint, Mapping) else safetensors.numpy.load_file(checkpoint)
    trained = Trained.of_bundle(bundle, tensors)
    if to != "onnx" and not isinstance(model, ModelSpec):
        model = source_of(bundle, model)
    made = inference_model(trained, to, source=model, int8=int8, examples=examples)
    file.write_bytes(made.data)
    return made


@speaking_python
@with_settings_of(ForecastConfig)
def forecast(
    *,
    plan: Bundle | None = None,
    train: Mapping[str, Any] | None = None,
    beside: Sequence[Mapping[str, Any]] = (),
    on_hour: Callable[[int], None] = lambda hour: None,
    **settings: Any,
) -> twin.Forecast:
    """Tell how a task would go on a modelled population: the coordinator's rules in virtual time, without training.

    plan: a bundle whose certificate gives `example_s`, `bytes_down` and `bytes_up`, unless given. train: options of
    `simulate` by name, with `model`, to train the cohorts that were drawn: `accuracy` then has its hours. beside:
    further tasks of the same population, each by its own settings. on_hour: called with the virtual hours that are
    over. Raises ForecastError or InvalidTask, naming what is wrong, also for a population that can fill no round. The
    other keywords are the settings of a forecast:
    """
    of_kind("plan", plan, (Bundle, type(None)), "a Bundle, as `muster.export` gives it")
    of_kind("train", train, (Mapping, type(None)), 'a mapping such as {"model": "mlp", "rounds": 50}')
    of_kind("on_hour", on_hour, (Callable,), "a function of the virtual hours that are over")
    of_kind("beside", beside, (Sequence,), 'a list of settings such as [{"goal": 50}]')
    config = build(ForecastConfig, {**({} if plan is None else costs_of(plan)), **settings})
    others = [config.beside(one) for one in beside]
    with progress_line() as tell:

        def heard(hour: int) -> None:
            tell(f"{config.devices:,} devices: {hour} of {24 * config.days} virtual hours")
            on_hour(hour)

        return twin.forecast(config, heard, _trainer(train, tell), others)


def _trainer(
    options: Mapping[str, Any] | None, tell: Callable[[str], None]
) -> Callable[[Sequence[CommittedRound]], list[tuple[float, float]]]:
    if options is None:
        return lambda rounds: []
    from simulator.forecast.training import accuracy_over_time  # loads torch

    config = to_config(options)
    return lambda rounds: accuracy_over_time(config, rounds, lambda number, _: tell(f"training: round {number}"))
