"""Two of the benchmarks, in small: a report, and a device but for its installation, which needs pip and PyPI."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from muster.bench.device_footprint import TARGETS, import_cpu_s, size_mb, train
from muster.bench.report import ReportConfig, run

HERE = os.pathsep.join([str(Path(__file__).parents[2]), sysconfig.get_path("purelib")])


def test_a_device_starts_and_trains_within_its_targets():
    assert 0.01 < import_cpu_s(HERE) <= TARGETS["import_cpu_s"]
    footprint = train(HERE, "onnx")
    assert 40 < footprint.peak_rss_mb <= TARGETS["train_rss_mb"]
    assert footprint.step_cpu_ms > 0


def test_only_what_is_on_the_path_is_measured(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        import_cpu_s(str(tmp_path))


def test_sizes_are_those_of_files_in_all_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "module.pyc").write_bytes(bytes(2**19))
    (tmp_path / "module.py").write_bytes(bytes(2**20))
    assert (size_mb(tmp_path, "*"), size_mb(tmp_path, "*.pyc")) == (1.5, 0.5)


def test_a_report_is_measured_against_its_body_received_hashed_and_added():
    config = ReportConfig(sizes=(2000,), devices=6, uploading=3, pairs=2)
    (cost,) = run(config, lambda _: None).costs
    assert [pair.coordinator_ms > pair.yardstick_ms > 0 for pair in cost.pairs] == [True, True]
    assert 0 < cost.ratio < 1
    assert cost.target is None
