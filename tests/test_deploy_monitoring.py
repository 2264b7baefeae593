"""Alerts and dashboard of examples/deploy: Prometheus takes them, and they ask for what coordinators export."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from coordinator.api.devices import routes
from coordinator.metrics import Metrics
from coordinator.rules.progress import Reason
from coordinator.rules.states import AssignmentState, RoundState
from fedcore.wire.problems import PROBLEMS
from tests.tree import ROOT

PROMETHEUS = ROOT / "examples/deploy/prometheus"
SELECTOR = re.compile(r'(muster_\w+)(?:\{((?:[^}"]|"[^"]*")*)\})?')
FROM_PROMETHEUS = {"job", "instance", "le"}
VALUES = {
    ("muster_tasks_stalled", "reason"): {reason.value for reason in Reason if reason.stalled},
    ("muster_problems_total", "problem"): set(PROBLEMS),
    ("muster_rounds_total", "state"): {RoundState.COMMITTED, RoundState.ABANDONED},
    ("muster_unreported_total", "state"): set(AssignmentState),
    ("muster_check_ins_total", "outcome"): {"accepted", "rejected"},
}


@pytest.fixture(scope="module")
def exported():
    """The labels of every series of a coordinator, by its name."""
    found = {}
    for metric in vars(Metrics()).values():
        if hasattr(metric, "_labelnames"):
            endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[metric._type]
            found |= {metric._name + ending: set(metric._labelnames) | FROM_PROMETHEUS for ending in endings}
    return found


def rules():
    groups = yaml.safe_load((PROMETHEUS / "muster.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    dashboard = json.loads((ROOT / "examples/deploy/grafana/muster.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions():
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_metric_label_and_value_that_is_asked_for_is_exported(exported):
    asked = set()
    for expression in expressions():
        grouped = {name for names in re.findall(r"by \(([^)]+)\)", expression) for name in names.split(", ")}
        labels = set()
        for name, matchers in SELECTOR.findall(expression):
            assert name in exported, name
            asked.add(name)
            labels |= exported[name]
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
                assert label in exported[name], (name, label)
                known = VALUES.get((name, label))
                assert known is None or set(value.split("|")) <= known, (operator, value)
        if "ALERTS" not in expression:
            assert grouped <= labels, expression
    assert len(asked) > 15


def test_the_route_of_check_ins_is_one_of_a_coordinator():
    (route,) = {one for expression in expressions() for one in re.findall(r'route="([^"]*)"', expression)}
    assert f'"POST", "{route}"' in (ROOT / routes.__file__).read_text()


def test_every_reason_for_a_stall_but_a_pause_by_hand_has_an_alert():
    matched = [re.findall(r'muster_tasks_stalled\{reason=~?"([^"]*)"', rule["expr"]) for rule in rules()]
    reasons = [reason for texts in matched for text in texts for reason in text.split("|")]
    assert sorted([*reasons, Reason.PAUSED]) == sorted(reason for reason in Reason if reason.stalled)


def test_every_alert_says_how_urgent_it_is_and_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_alert_fires_in_a_test_of_its_own():
    text = (PROMETHEUS / "muster.rules.test.yml").read_text()
    fired = set(re.findall(r'alertname="(\w+)"', text))
    for one in yaml.safe_load(text)["tests"]:
        fired |= {test["alertname"] for test in one.get("alert_rule_test", []) if test["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules()}


def test_panels_say_what_they_show_and_do_not_overlap():
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["title"] and panel["description"] for panel in panels())


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool is installed (apt install prometheus)")
def test_prometheus_takes_its_files_and_alerts_fire_when_they_should():
    for words in (
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "muster.rules.yml"],
        ["test", "rules", "muster.rules.test.yml"],
    ):
        done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
