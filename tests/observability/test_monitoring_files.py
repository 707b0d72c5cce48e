"""k8s/monitoring: generated files are up to date, rules are valid, and every alert fires."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.observability.tools import tool

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
GENERATE = "k8s.monitoring.generate"
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text())
ALERTS = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}


def test_generated_files_are_those_that_would_be_generated(tmp_path):
    subprocess.run([sys.executable, "-m", GENERATE, tmp_path], cwd=ROOT, check=True)
    fresh = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(fresh) == 3
    stale = [str(name) for name, text in fresh.items() if (MONITORING / name).read_text() != text]
    assert not stale, f"run python -m {GENERATE}: {stale}"


def test_the_operators_rules_are_the_plain_ones():
    document = yaml.safe_load((MONITORING / "prometheus-rule.yaml").read_text())
    assert document["kind"] == "PrometheusRule"
    assert document["spec"] == RULES


def test_promtool_accepts_the_rules():
    subprocess.run([tool("promtool"), "check", "rules", MONITORING / "rules.yaml"], check=True)


@pytest.mark.slow
def test_promtool_fires_every_alert():
    """Each alert has a test in which it fires, and one in which it does not fire yet."""
    tests = yaml.safe_load((MONITORING / "rules.test.yaml").read_text())
    expected = [case for test in tests["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in expected if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in expected if not case["exp_alerts"]} == set(ALERTS)
    subprocess.run([tool("promtool"), "test", "rules", MONITORING / "rules.test.yaml"], check=True)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_how_bad_it_is_and_what_to_do(name):
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    path, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


@pytest.mark.parametrize(
    "path", sorted((MONITORING / "dashboards").iterdir()), ids=lambda p: p.stem
)
def test_panels_do_not_overlap(path):
    dashboard = json.loads(path.read_text())
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.parametrize("parts", [["monitoring"], ["monitoring", "monitoring/tls"]], ids=len)
def test_overlays_can_take_it_in(parts, tmp_path):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("*** kubectl is not installed: nothing was checked ***")
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "with-monitoring"
    overlay.mkdir()
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": ["../cpu-demo"], "components": [f"../../{part}" for part in parts],
    }  # fmt: skip
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(document))
    rendered = subprocess.run(
        [kubectl, "kustomize", str(overlay)], check=True, capture_output=True, text=True
    ).stdout
    objects = [o for o in yaml.safe_load_all(rendered) if o]
    (monitor,) = [o for o in objects if o["kind"] == "ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint.get("scheme") == (None if len(parts) == 1 else "https")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        o
        for o in objects
        if o["kind"] == "Service"
        and wanted <= o["metadata"]["labels"].items()
        and any(port["name"] == endpoint["port"] for port in o["spec"]["ports"])
    ]
    found = {o["metadata"]["labels"]["app.kubernetes.io/component"] for o in scraped}
    assert found == {"draft", "orchestrator", "verify"}
    assert any(o["kind"] == "PrometheusRule" for o in objects)
    assert any(o["metadata"]["name"] == "flyspec-dashboards" for o in objects)
