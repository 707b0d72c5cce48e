"""Write the generated files: `python -m k8s.monitoring.generate [DIRECTORY]`.

- dashboards/*.json, for Grafana, from on_call.py and services.py;
- prometheus-rule.yaml: the groups of rules.yaml as an object of the Prometheus operator.

They are committed; a test regenerates and compares them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.monitoring.on_call import ON_CALL
from k8s.monitoring.panels import build
from k8s.monitoring.services import SERVICES

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


def generate(out: Path) -> None:
    (out / "dashboards").mkdir(parents=True, exist_ok=True)
    for uid, (title, rows) in DASHBOARDS.items():
        document = json.dumps(build(uid, title, rows), cls=JSONEncoder, indent=2)
        (out / "dashboards" / f"{uid}.json").write_text(document + "\n")
    _, groups = (HERE / "rules.yaml").read_text().split("groups:\n")
    indented = "".join(f"  {line}".rstrip() + "\n" for line in ["groups:", *groups.splitlines()])
    (out / "prometheus-rule.yaml").write_text(RULE_HEADER + indented)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
