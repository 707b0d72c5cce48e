"""A real Prometheus scrapes the running stack; every query of dashboards and alerts has data."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

from flyspec.client import AsyncClient, GenerateOptions
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec_lab.ports import free_port
from orchestrator.telemetry.metrics import GenerationMetrics
from tests.observability.observed import SERVICES
from tests.observability.tools import tool
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
AUTOSCALING = ROOT / "k8s" / "components" / "autoscaling"
NAME = re.compile(r"\b(?:flyspec[_:][a-z0-9_:]+|process_[a-z_]+|up\b)")


class Prometheus:
    """A running one; `query` asks it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> dict:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict]:
        """The series that an instant query returns."""
        return self.get("/api/v1/query", query=expression)["result"]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    async def scraped(self) -> None:
        """Wait until every service has been scraped after now."""
        now = time.time()
        scraped = f'count(timestamp(up{{job=~"flyspec-.*"}}) > {now}) == {len(SERVICES)}'
        await until(lambda: asyncio.to_thread(self.query, scraped))

    async def missing(self, expressions, seconds: float = 60.0) -> list[str]:
        """Return the queries that still have no data after a while."""
        left = list(expressions)
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            left = [e for e in left if not await asyncio.to_thread(self.query, e)]
            await asyncio.sleep(1.0)
        return left


async def traffic(address: str) -> None:
    """A bit of everything: rules with and without loss, no drafts, an error."""
    async with AsyncClient(address, max_retries=0) as client:
        for rule in (Rule("exact"), Rule("fly"), Rule("margin")):
            options = GenerateOptions(rule=rule, max_tokens=12, num_speculative_tokens=15)
            await client.complete("def f(x):", options)
        await client.complete("a", GenerateOptions(num_speculative_tokens=0, max_tokens=4))
        with pytest.raises(FlyspecError):
            await client.complete("", GenerateOptions())


@pytest.fixture(scope="module")
async def prometheus(observed, tmp_path_factory):
    program = tool("prometheus")
    ports = {f"flyspec-{service}": observed.port(service) for service in SERVICES}
    registry = CollectorRegistry()  # of keys, which the stack's clients do not have
    metrics = GenerationMetrics(registry)
    for status in ("OK", "RESOURCE_EXHAUSTED"):
        metrics.count_key("team", status, 3)
    keys, _ = start_http_server(0, "127.0.0.1", registry)
    ports["keys"] = keys.server_port
    folder = tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "rules.yaml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"namespace": "flyspec", "pod": f"{job}-0"},
            }]}
            for job, port in ports.items()
        ],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listening = free_port()
    command = [
        program, f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{listening}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    running = Prometheus(listening)
    try:

        async def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            return await asyncio.to_thread(running.ready)

        await until(ready)
        # A counter's increase shows once it was scraped before and after.
        for _ in range(2):
            await traffic(observed.stack.address)
            await observed.at_rest()
            await running.scraped()
        yield running
    finally:
        process.terminate()
        process.wait(20)
        keys.shutdown()


@pytest.mark.parametrize(
    "path", sorted((MONITORING / "dashboards").glob("*.json")), ids=lambda p: p.stem
)
async def test_every_query_of_a_dashboard_returns_series(prometheus, path):
    queries = []
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = re.sub(r"\$(namespace|drafter|rule)\b", ".*", target["expr"])
            queries.append(query.replace("$__rate_interval", "1m"))
    assert len(queries) > 20
    assert not [query for query in queries if "$" in query]
    assert await prometheus.missing(queries) == []


async def test_what_dashboards_choose_from_is_there(prometheus):
    for path in (MONITORING / "dashboards").glob("*.json"):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query" and variable["name"] != "namespace":
                metric = re.match(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                name, label = metric.groups()
                assert prometheus.query(f'{name}{{{label}!=""}}')


async def test_every_metric_of_a_rule_has_series(prometheus):
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    names = {n for g in rules["groups"] for r in g["rules"] for n in NAME.findall(r["expr"])}
    names.remove("flyspec_certificate_expiry_timestamp_seconds")  # over TLS only
    assert {"up", "flyspec_draining", "flyspec:loose_share:rate5m"} <= names
    assert await prometheus.missing(f"count({name})" for name in sorted(names)) == []


async def test_every_rule_is_evaluated_without_error(prometheus):
    def evaluated():
        groups = prometheus.get("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = await until(evaluated)
    assert len(rules) == 40
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def adapter_queries() -> dict[str, tuple[str, str]]:
    """By metric: the series that Prometheus' adapter looks for, and the query it makes then."""
    rules = yaml.safe_load((AUTOSCALING / "prometheus-adapter.yaml").read_text())["rules"]
    found = {}
    for kind, group_by in (("custom", "pod"), ("external", "namespace")):
        for rule in rules[kind]:
            query = rule["metricsQuery"]
            for name, value in {
                "Series": rule["seriesQuery"].partition("{")[0],
                "LabelMatchers": 'namespace="flyspec"',
                "GroupBy": group_by,
            }.items():
                query = query.replace(f"<<.{name}>>", value)
            assert "<<" not in query
            found[rule["name"]["as"]] = (rule["seriesQuery"], query)
    return found


async def test_what_autoscalers_ask_for_is_there(prometheus):
    queries = adapter_queries()
    assert await prometheus.missing([q for pair in queries.values() for q in pair]) == []
    for name, (_, query) in queries.items():
        (series,) = prometheus.query(query)
        value = float(series["value"][1])
        assert 0 <= value < (1 if name.endswith("_ratio") else 1e6), name
        assert ("pod" in series["metric"]) is name.endswith("_ratio")


def test_autoscalers_ask_for_what_the_adapter_makes():
    asked = set()
    for path in AUTOSCALING.glob("*.yaml"):
        document = yaml.safe_load(path.read_text())
        if document.get("kind") == "HorizontalPodAutoscaler":
            for metric in document["spec"]["metrics"]:
                if metric["type"] != "Resource":
                    asked.add(metric[metric["type"].lower()]["metric"]["name"])
    assert asked == set(adapter_queries())


async def test_every_metric_is_in_the_docs(observed):
    """By its own name, without what Prometheus appends."""
    text = (ROOT / "docs" / "observability.md").read_text()
    documented = set(re.findall(r"`(flyspec_[a-z0-9_]+)", text))
    exposed = set()
    for service in SERVICES:
        for name in observed.scrape(service).names:
            if name.startswith("flyspec_"):
                exposed.add(re.sub(r"_(bucket|count|sum)$", "", name))
    assert sorted(exposed - documented) == []
