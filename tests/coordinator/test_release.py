from __future__ import annotations

import math
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from coordinator.errors import InvalidTask
from coordinator.rules.private_sums import report_bytes
from coordinator.rules.release import check_release
from coordinator.store.tasks import FootprintBudget, Secagg, TaskSettings
from fedcore.bundle import Certificate, Parity
from tests.coordinator.bundles import EVIDENCE, FOOTPRINT, make_plan


def check(evidence, budget=None, formats=("onnx",)):
    """Hold a plan with the formats of `evidence` against a task."""
    settings = TaskSettings(population="p", goal=1, rounds=1, formats=formats, budget=budget or FootprintBudget())
    check_release(make_plan(formats=tuple(evidence)), Certificate("hand", evidence), settings)


def test_plan_that_costs_exactly_what_is_allowed_passes():
    exact = FootprintBudget(peak_rss_mb=50.0, step_cpu_ms=2.0, graph_bytes=3000)
    check({"onnx": EVIDENCE, "executorch": EVIDENCE}, exact, ("executorch", "onnx"))


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (
            {"peak_rss_mb": 49.5},
            "memory at the peak of format 'executorch' is 50 MB, the budget 49.5 MB (peak_rss_mb): "
            "export a smaller model or a smaller batch_size, or raise the budget",
        ),
        ({"step_cpu_ms": 1}, "CPU time of a step of format 'executorch' is 2 ms, the budget 1 ms (step_cpu_ms): "),
        (
            {"graph_bytes": 2999},
            "size of all graphs of format 'executorch' is 3,000 bytes, the budget 2,999 bytes (graph_bytes): "
            "export a smaller model, or raise the budget",
        ),
    ],
)
def test_format_beyond_the_budget_is_named_with_figure_budget_and_remedy(budget, says):
    small = replace(EVIDENCE, footprint=replace(FOOTPRINT, peak_rss_mb=1.0, step_cpu_ms=0.1, graph_bytes=1))
    with pytest.raises(InvalidTask) as refused:
        check({"onnx": small, "executorch": EVIDENCE}, FootprintBudget(**budget))
    assert says in str(refused.value)


def test_a_report_longer_than_the_budget_is_refused_masked_ones_too():
    plan, certificate = make_plan(), Certificate("hand", {"onnx": EVIDENCE})
    for secagg in (None, Secagg()):
        settings = TaskSettings(population="p", goal=10, rounds=1, secagg=secagg)
        sent = report_bytes(plan.report, settings).sent
        check_release(plan, certificate, replaced(settings, budget=FootprintBudget(report_bytes=sent)))
        with pytest.raises(InvalidTask, match=rf"a report has {sent} bytes, the budget {sent - 1} bytes .*--compress"):
            check_release(plan, certificate, replaced(settings, budget=FootprintBudget(report_bytes=sent - 1)))


def test_format_that_the_plan_lacks_is_named_with_those_it_has():
    with pytest.raises(
        InvalidTask, match=r"format 'executorch', the plan has coreml, onnx: export it for 'executorch'"
    ):
        check({"onnx": EVIDENCE, "coreml": EVIDENCE}, formats=("onnx", "executorch"))


@pytest.mark.parametrize("found", [{}, {"onnx": replace(EVIDENCE, parity=())}])
def test_format_without_evidence_is_refused_even_when_not_named(found):
    settings = TaskSettings(population="p", goal=1, rounds=1, formats=("executorch",))
    certificate = Certificate("hand", {"executorch": EVIDENCE, **found})
    with pytest.raises(InvalidTask, match="no evidence for format 'onnx'"):
        check_release(make_plan(formats=("onnx", "executorch")), certificate, settings)


@pytest.mark.parametrize(
    ("l2", "tolerance"), [(2e-5, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5), (math.inf, math.inf), (1e-6, math.nan)]
)
def test_parity_beyond_its_tolerance_is_refused_by_graph_and_format(l2, tolerance):
    parity = (Parity("report", 3, l2, 1e-7), *EVIDENCE.parity)
    with pytest.raises(InvalidTask, match="graph 'report' in format 'onnx' is "):
        check({"onnx": replace(EVIDENCE, parity=parity, tolerance=tolerance)})


def test_measurement_that_is_no_number_is_not_within_a_budget():
    evidence = replace(EVIDENCE, footprint=replace(FOOTPRINT, peak_rss_mb=math.nan))
    check({"onnx": evidence})
    with pytest.raises(InvalidTask, match="peak_rss_mb"):
        check({"onnx": evidence}, FootprintBudget(peak_rss_mb=100))
