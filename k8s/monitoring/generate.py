"""Writes what is generated here: `python k8s/monitoring/generate.py [DIRECTORY]`.

- dashboards/*.json, for Grafana, of on_call.py and services.py;
- prometheus-rule.yaml: the groups of rules.yaml as an object of the Prometheus operator.

All of it is committed; a test writes it anew and compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import dashboard
from on_call import ON_CALL
from services import SERVICES

HERE = Path(__file__).resolve().parent
DASHBOARDS = {
    "flyspec-on-call": ("flyspec: on call", ON_CALL),
    "flyspec-services": ("flyspec: services", SERVICES),
}

RULE_HEADER = """\
# The groups of rules.yaml for the Prometheus operator; written by generate.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: flyspec
  labels:
    app.kubernetes.io/name: flyspec
    app.kubernetes.io/component: monitoring
spec:
"""


def prometheus_rule(rules: str) -> str:
    """rules.yaml as an object of the Prometheus operator."""
    groups = rules[rules.index("groups:") :]
    return RULE_HEADER + "".join(f"  {line}".rstrip() + "\n" for line in groups.splitlines())


def generate(out: Path) -> None:
    """Write everything below `out`."""
    (out / "dashboards").mkdir(parents=True, exist_ok=True)
    for uid, (title, rows) in DASHBOARDS.items():
        document = json.dumps(dashboard(uid, title, rows), indent=2)
        (out / "dashboards" / f"{uid}.json").write_text(document + "\n")
    rules = (HERE / "rules.yaml").read_text()
    (out / "prometheus-rule.yaml").write_text(prometheus_rule(rules))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
