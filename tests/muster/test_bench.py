"""The runner of benchmarks, and two of them in small: a report, and a device without its installation by pip."""

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import adapters, curves, language_model, load
from benchmarks.device_footprint import LOADS, LOADS_SANDBOX, import_cpu_s, run_python, size_mb, train_rss_mb
from benchmarks.report import run
from benchmarks.runner import (
    BENCHMARKS,
    AdaptersOptions,
    CurvesOptions,
    LanguageModelOptions,
    ReportOptions,
    command_of,
)
from benchmarks.usage import Usage, main_thread_s
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.local_training import PartlyLocal
from fedcore.algorithms.question import QUESTION
from muster.commands.fleet import add_checkout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Help of the command."""

    count: Annotated[int, typer.Option(min=1)] = 3
    hidden: int = 4


class Row(msgspec.Struct):
    name: str
    values: list[list[int]]
    ms: float


class Figures(msgspec.Struct):
    count: int
    sound: bool
    many: list[int]
    nested: dict[str, dict[str, int]]
    rows: list[Row]
    targets: dict[str, object]


@pytest.fixture
def bench(monkeypatch):
    """Runs the command of a benchmark that is sound with an even count."""

    def run(options, say):
        say("half of it")
        rows = [Row("a", [[1]], 1.5), Row("b", [[2]], 2.5)]
        nested = {"fast": {"done": 1}, "slow": {"done": 2}}
        even = options.count % 2 == 0
        targets = {"count": 9.0, "nested": {"fast": 2}}
        return Figures(options.count + options.hidden, even, list(range(99)), nested, rows, targets)

    monkeypatch.setitem(sys.modules, "benchmarks.small", SimpleNamespace(run=run))
    app = typer.Typer()
    app.command()(command_of("small", Options))
    return lambda *options: CliRunner().invoke(app, options)


@pytest.mark.parametrize("line", ["bench engine --rounds 3", "study list"])
def test_an_installed_package_says_where_benchmarks_and_studies_are(tmp_path, line):
    app = typer.Typer()
    add_checkout(app, checkout=tmp_path)
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2
    assert "are part of the source checkout: `git clone`" in " ".join(done.output.replace("│", "").split())


def test_json_of_a_benchmark_is_the_header_and_then_its_figures(bench):
    done = bench("--count", "2", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert list(found)[:5] == ["benchmark", "date", "machine", "cores", "versions"]
    assert list(found)[5:] == list(Figures.__struct_fields__)
    assert (found["benchmark"], found["count"], len(found["many"])) == ("small", 6, 99)
    assert found["versions"].keys() >= {"python", "muster-fl", "numpy"}


def test_table_of_a_benchmark_has_single_figures_targets_and_records(bench):
    done = bench("--count", "2")
    assert "half of it" in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["figure", "value", "target"] in lines
    assert ["count", "6", "9"] in lines
    assert ["nested.slow", "done=2", "–"] in lines
    assert ["name", "ms"] in lines
    assert ["b", "2.5"] in lines
    assert "many" not in done.stdout
    assert "targets" not in done.stdout


def test_command_of_a_benchmark_fails_when_its_result_is_not_sound(bench):
    assert bench("--count", "3").exit_code == 1


def test_only_fields_with_an_option_are_options_of_the_command(bench):
    assert bench("--count", "0").exit_code == 2
    assert bench("--hidden", "1").exit_code == 2
    assert "Help of the command." in bench("--help").stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_its_own_options(name):
    assert get_type_hints(import_module(f"benchmarks.{name}").run)["options"] is BENCHMARKS[name]


HERE = os.pathsep.join([str(Path(__file__).parents[2]), sysconfig.get_path("purelib")])


LIBRARIES = (
    "import http.client, sqlite3, ssl, msgspec, numpy; from cryptography.hazmat.primitives.asymmetric import ed25519"
)
ENGINE = "import numpy, onnxruntime"
"""The least that a device and its sandbox load: what their modules import from elsewhere."""
CPU_S = """
import time
started = time.process_time()
{imports}
print(time.process_time() - started)
"""
PEAKS = """
import subprocess, sys
for imports in sys.argv[1:]:
    peak = "from device_runtime.capabilities import peak_rss_mb; print(peak_rss_mb())"
    subprocess.run([sys.executable, "-S", "-P", "-c", f"{imports}; {peak}"], check=True)
"""


@pytest.mark.long
def test_a_device_costs_little_more_than_its_libraries():
    assert import_cpu_s(HERE, LOADS) < 4 * import_cpu_s(HERE, CPU_S.format(imports=LIBRARIES))
    assert import_cpu_s(HERE, LOADS_SANDBOX) < 4 * import_cpu_s(HERE, CPU_S.format(imports=ENGINE))
    empty_mb = sum(map(float, run_python(HERE, ["-c", PEAKS, LIBRARIES, ENGINE]).split()))
    assert empty_mb < train_rss_mb(HERE, "onnx") < 2.5 * empty_mb


def test_only_what_is_on_the_path_is_measured(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        import_cpu_s(str(tmp_path))


def test_sizes_are_those_of_files_in_all_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "module.pyc").write_bytes(bytes(2**19))
    (tmp_path / "module.py").write_bytes(bytes(2**20))
    assert (size_mb(tmp_path, "*"), size_mb(tmp_path, "*.pyc")) == (1.5, 0.5)


def test_a_report_is_measured_against_its_body_received_hashed_and_added(coordinators, monkeypatch):
    monkeypatch.setattr(load, "local_coordinator", coordinators.local)
    options = ReportOptions(size=[2000], devices=6, uploading=3, pairs=2)
    (cost,) = run(options, lambda *_: None)["costs"]
    assert [pair["coordinator_ms"] > pair["yardstick_ms"] > 0 for pair in cost["pairs"]] == [True, True]
    assert 0 < cost["ratio"] < 1
    assert cost["target"] is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
@pytest.mark.long
def test_the_engine_and_peft_train_the_same_adapters():
    pytest.importorskip("peft")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    found = adapters.run(AdaptersOptions(shape=shape | {"vocab_size": 200}, clients=3, rounds=1), lambda *_: None)
    assert found["values"] == 2 * 2 * 8 * 16 + 4 * 17
    assert min(*found["engine_s"], *found["peft_s"], found["to_peft"]) > 0


@pytest.mark.long
def test_a_language_model_is_measured_in_each_number_of_bits():
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 320}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    exact, *few = language_model.run(LanguageModelOptions(shape=sizes | heads), lambda *_: None)["bits"]
    assert [one["bits"] for one in few] == [8, 4]
    for one, most in zip(few, (0.3, 0.2), strict=True):
        assert one["blob_ratio"] == one["blob_mb"] / exact["blob_mb"] <= most
        assert one["parity_l2"] <= 1e-5
        assert one["loss"] != one["loss_exact"]
    assert min(exact["peak_mb"], exact["step_ms"], exact["report_kb"], exact["predict_ms"]) > 0


def test_a_sysroot_is_made_in_a_checkout_and_an_installed_package_says_so(typed, monkeypatch):
    monkeypatch.setattr("muster.commands.fleet.find_checkout", lambda *given: bool(given))
    status, _, words = typed("fleet", "sysroot")
    assert (status, "clone the repository and run `make install` there" in " ".join(words.split())) == (2, True), words


def test_every_algorithm_that_trains_has_a_grid_of_values_that_it_takes():
    # In the engine, whose rounds wait for every client, FedBuff is FedAvg. Held-out users have no personal part.
    trained = {name for name, one in ALGORITHMS.items() if one.family not in {EVALUATION, QUESTION, PartlyLocal.family}}
    assert trained - set(curves.GRIDS) <= {"fedbuff"}
    for name, grid in curves.GRIDS.items():
        assert [create(name, point) for point in curves.points(grid)]


def test_a_learning_curve_is_of_the_best_point_of_the_grid(monkeypatch):
    monkeypatch.setattr(curves, "GRIDS", {"fedsgd": {"server_lr": (1e-6, 1.0)}})
    found = curves.run(CurvesOptions(rounds=5), lambda *said: None)
    (curve,) = found.curves
    assert curve.settings == {"server_lr": 1.0}
    assert [one.settings["server_lr"] for one in curve.tried] == [1e-6, 1.0]
    assert [len(accuracies) for accuracies in curve.accuracies] == [1, 1, 1]
    assert len({tuple(accuracies) for accuracies in curve.accuracies}) > 1


def test_usage_of_a_process_is_that_of_the_system():
    used, spent = Usage.of(os.getpid()), sum(os.times()[:2])
    assert abs(used.cpu_s - spent) < 0.2
    assert 0 < used.rss_mb <= used.peak_rss_mb
    assert used.descriptors >= 3


def test_cpu_of_the_main_thread_leaves_out_that_of_others():
    began, mine = main_thread_s(os.getpid()), time.thread_time()
    other = threading.Thread(target=lambda: sum(range(10_000_000)))
    other.start()
    other.join()
    sum(range(1_000_000))
    used = main_thread_s(os.getpid()) - began
    assert used == pytest.approx(time.thread_time() - mine, abs=0.05)
