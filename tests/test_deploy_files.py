"""Files for deployments, and their monitoring."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from coordinator.api.devices import routes
from coordinator.monitoring import Metrics
from coordinator.rules.progress import Reason
from coordinator.rules.states import AssignmentState, RoundState
from coordinator.settings import CONFIG, PREFIX, Settings, load_settings
from fedcore.signing import SucceedingKey, key_text
from fedcore.wire.messages import PROBLEMS
from tests.test_docs import assert_command, read, rows, section
from tests.tree import ROOT

DEPLOY = ROOT / "examples/deploy"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = ROOT / "examples/systemd"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
TEXTS = [*DEPLOY.rglob("*.y*ml"), DEPLOY / "Dockerfile", *SYSTEMD.iterdir(), *(ROOT / "examples/nginx").iterdir()]
OF_COMMANDS = {CONFIG, f"{PREFIX}TOKEN", f"{PREFIX}COORDINATOR"}
DEFAULTS = Settings.model_fields
GIB = 1 << 30


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def kinds():
    """Every object of the manifests, by its kind and name."""
    objects = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one.get("metadata", {}).get("name")): one for one in objects}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The settings that an environment makes, with the file of the Secret's template, and a key for the authority's."""

    def load(environment):
        template = yaml.safe_load((KUBERNETES / "secret.example.yaml").read_text())
        (tmp_path / "coordinator.toml").write_text(template["stringData"]["coordinator.toml"])
        here = {CONFIG: f"{tmp_path}/coordinator.toml", f"{PREFIX}AUTHORITY": key_text(SucceedingKey.new("a").public)}
        for name, value in (environment | here).items():
            monkeypatch.setenv(name, value)
        return load_settings({})

    return load


def words(text):
    return text if isinstance(text, list) else shlex.split(text)


def pods(kinds):
    return [one["spec"]["template"]["spec"] for one in kinds.values() if one["kind"] in ("Deployment", "Job")]


def test_every_command_in_the_files_exists_with_its_options(compose, kinds):
    (image,) = re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    lines = [json.loads(image)]
    lines += [
        one["command"]
        for one in compose["services"].values()
        if one["image"].startswith("muster:") and "command" in one
    ]
    lines += [one["args"] for pod in pods(kinds) for one in pod["containers"]]
    assert len(lines) == 5
    lines += [shlex.split(line) for path in TEXTS for line in re.findall(r"`muster (.*?)`", path.read_text())]
    lines += [
        shlex.split(line)
        for path in SYSTEMD.glob("*.service")
        for line in re.findall(r"^ExecStart=/opt/muster/bin/muster (.*)$", path.read_text(), re.MULTILINE)
    ]
    told = re.sub(r"\\\n\s*", "", read("docs/how-to/deploy.md"))
    ours = r"^ {4,}(?:docker|kubectl|sudo)\b.*\bmuster(?::\S+)? ((?:authority|coordinator|doctor|task) .*?)(?: >.*)?$"
    said = re.findall(ours, told, re.MULTILINE)
    assert len(said) > 6
    lines += [shlex.split(line) for line in said]
    assert len(lines) > 20
    for line in lines:
        assert_command(["muster", *line])


def test_every_variable_in_the_files_is_a_setting():
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | OF_COMMANDS
    found = {name for path in TEXTS for name in re.findall(r"\bMUSTER_[A-Z_]+\b", path.read_text())}
    assert len(found) > 10
    assert found <= known
    template = yaml.safe_load((KUBERNETES / "secret.example.yaml").read_text())
    assert tomllib.loads(template["stringData"]["coordinator.toml"]).keys() <= Settings.model_fields.keys()


def test_the_image_is_pinned_runs_as_nobody_and_asks_for_health():
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${PYTHON}"] * 2
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.search(rf"^HEALTHCHECK .*\n.*http://127\.0\.0\.1:{Settings().port}/healthz", text, re.MULTILINE)
    assert "--require-hashes --requirement requirements/coordinator.lock" in text
    assert "/healthz" in [row[0] for row in rows(section(read("docs/operations.md"), "Health"))]


def test_an_image_is_built_of_the_packages_and_nothing_else():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads(read("pyproject.toml"))
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert kept == packages | {"LICENSE", "README.md", "pyproject.toml", "requirements/coordinator.lock"}
    assert "\n*\n" in (ROOT / ".dockerignore").read_text()


def test_compose_names_only_what_it_has(compose):
    for name in ("secrets", "networks", "volumes"):
        used = set()
        for service in compose["services"].values():
            for one in service.get(name, []):
                source = one["source"] if isinstance(one, dict) else one.split(":")[0]
                if source.startswith("."):
                    assert (DEPLOY / source).is_file()
                else:
                    used.add(source)
        assert used == compose[name].keys()
    for service in compose["services"].values():
        assert service.get("depends_on", {}).keys() <= compose["services"].keys()
        assert re.search(r":v?\d+\.\d+", service["image"])


def test_compose_gives_nobody_more_than_it_needs(compose):
    services = compose["services"]
    for name, service in services.items():
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "postgres":
            assert service["cap_drop"] == ["ALL"]
            assert service["read_only"]
        # Only what devices ask is open to others; operators' ports are on this machine alone.
        outside = [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")]
        assert outside == {"nginx": ["443:443"], "authority": ["8443:8082"]}.get(name, [])
    apart = services["authority"]
    assert apart["networks"] == ["authority"]
    assert [name for name, one in services.items() if "authority" in one["networks"]] == ["authority"]
    shared = {name for name, one in services.items() if set(map(str, one["secrets"])) & set(apart["secrets"])}
    assert shared == {"authority"}
    assert compose["networks"]["data"] == {"internal": True}
    assert services["postgres"]["networks"] == ["data"]


def test_compose_starts_two_coordinators_once_the_tables_are_there(compose, settings):
    services = compose["services"]
    coordinators = [services["coordinator-1"], services["coordinator-2"]]
    urls, addresses = [], []
    for name, one in zip(("coordinator-1", "coordinator-2"), coordinators, strict=True):
        assert one["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
        loaded = settings(one["environment"] | {"MUSTER_AUTHORITY_URL": "https://authority.example.org:8443"})
        assert str(loaded.proxies[0]) == services["nginx"]["networks"]["edge"]["ipv4_address"] + "/32"
        assert loaded.replica_url == f"http://{name}:{loaded.port}"
        assert one["ulimits"]["nofile"] == 2 * loaded.connection_limit
        assert int(one["mem_limit"].removesuffix("g")) * GIB >= 1.5 * loaded.most_bytes
        assert int(one["stop_grace_period"].removesuffix("s")) > loaded.drain_s
        urls.append(loaded.replica_url)
        addresses.append(f"{one['networks']['edge']['ipv4_address']}:{loaded.port}")
    assert len(set(urls)) == 2
    assert coordinators[0]["volumes"] == coordinators[1]["volumes"]
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    behind = re.findall(r"^server (\S+);$", (DEPLOY / "nginx/muster_coordinators").read_text(), re.MULTILINE)
    assert behind == addresses


def test_kustomize_takes_every_manifest_but_the_template_of_secrets(kinds):
    listed = kinds["Kustomization", None]["resources"]
    assert sorted(["kustomization.yaml", "secret.example.yaml", *listed]) == [path.name for path in MANIFESTS]


def test_pods_are_confined(kinds):
    assert len(pods(kinds)) == 2
    for pod in pods(kinds):
        own = pod["securityContext"]
        assert (own["runAsNonRoot"], own["runAsUser"], own["seccompProfile"]) == (
            True,
            10001,
            {"type": "RuntimeDefault"},
        )
        assert not pod["automountServiceAccountToken"]
        # Else a service called muster would set MUSTER_PORT to tcp://….
        assert not pod["enableServiceLinks"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert mounted == {one["name"] for one in pod["volumes"]}
    assert kinds["Namespace", "muster"]["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_manifests_name_only_what_they_have(kinds):
    deployment = kinds["Deployment", "coordinator"]["spec"]
    labels, pod = deployment["template"]["metadata"]["labels"], deployment["template"]["spec"]
    (container,) = pod["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"devices": DEFAULTS["port"].default, "operators": DEFAULTS["admin_port"].default}
    assert deployment["selector"]["matchLabels"] == labels
    for name, port in ports.items():
        service = kinds["Service", name]["spec"]
        assert service["selector"] == labels
        assert service["ports"] == [{"name": name, "port": port, "targetPort": name}]
    (rule,) = kinds["Ingress", "devices"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "devices", "port": {"name": "devices"}}
    for one in pods(kinds):
        for volume in one["volumes"]:
            assert ("Secret", volume.get("secret", {"secretName": "coordinator"})["secretName"]) in kinds
            claim = volume.get("persistentVolumeClaim", {"claimName": "state"})["claimName"]
            assert ("PersistentVolumeClaim", claim) in kinds
    assert [one["configMapRef"]["name"] for one in container["envFrom"]] == ["coordinator"]
    assert ("ConfigMap", "coordinator") in kinds
    budget = kinds["PodDisruptionBudget", "coordinator"]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert 0 < budget["minAvailable"] < deployment["replicas"] == 2


def test_pods_have_settings_probes_and_time_to_stop(kinds, settings):
    pod = kinds["Deployment", "coordinator"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    own = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith(PREFIX)}
    loaded = settings(kinds["ConfigMap", "coordinator"]["data"] | own)
    assert loaded.replica_url == f"http://$(POD_IP):{loaded.port}"
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB >= 1.5 * loaded.most_bytes
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before + loaded.drain_s
    asked = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert asked == ["/healthz", "/healthz", "/readyz"]


def test_the_ingress_says_what_nginx_is_told(kinds):
    rules = (ROOT / "examples/nginx/muster.conf").read_text()
    said = kinds["Ingress", "devices"]["metadata"]["annotations"]
    for annotation, directive in (
        ("proxy-body-size", "client_max_body_size"),
        ("limit-connections", "limit_conn muster_connections"),
        ("proxy-connect-timeout", "proxy_connect_timeout"),
        ("proxy-read-timeout", "proxy_read_timeout"),
        ("proxy-send-timeout", "proxy_send_timeout"),
        ("proxy-buffering", "proxy_buffering"),
        ("proxy-request-buffering", "proxy_request_buffering"),
        ("proxy-next-upstream", "proxy_next_upstream"),
    ):
        (value,) = re.findall(rf"^ *{directive} (\w+?)s?;", rules, re.MULTILINE)
        assert said[f"nginx.ingress.kubernetes.io/{annotation}"] == value


def test_units_give_a_coordinator_what_its_settings_need():
    unit = (SYSTEMD / "muster-coordinator.service").read_text()
    given = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    assert int(given["LimitNOFILE"]) == 2 * Settings().connection_limit
    assert int(given["MemoryMax"].removesuffix("G")) * GIB >= 1.5 * Settings().most_bytes
    assert int(given["TimeoutStopSec"].removesuffix("s")) > Settings().drain_s


def test_commands_beside_a_unit_find_its_keys_and_its_blobs():
    unit = (SYSTEMD / "muster-coordinator.service").read_text()
    own = Path("/var/lib") / re.search(r"^StateDirectory=(.*)$", unit, re.MULTILINE)[1]
    told = section(read("docs/how-to/deploy.md"), "Machines with systemd")
    shown = "\n".join(re.findall(r"^    (\w+ = .*)$", told, re.MULTILINE))
    settings = tomllib.loads(shown)
    assert settings.keys() <= Settings.model_fields.keys()
    assert {Path(settings[name]).parent for name in ("keys", "blobs")} == {own}
    # The environment comes before the file, and commands do not have the unit's.
    assert set(re.findall(r"\bMUSTER_\w+", unit)) == {"MUSTER_CONFIG", "MUSTER_LOG_FORMAT"}


def test_the_authority_reads_only_credentials_that_its_unit_loads():
    unit = (SYSTEMD / "muster-authority.service").read_text()
    loaded = re.findall(r"^LoadCredential=([\w.]+):", unit, re.MULTILINE)
    assert sorted(re.findall(r"%d/([\w.]+)", unit)) == sorted(loaded)


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
