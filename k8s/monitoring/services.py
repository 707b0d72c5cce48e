"""The dashboard `flyspec: services`: the models of draft and verify, and the processes."""

from __future__ import annotations

from grafana import Panel, Row, one
from promql import NS, RATE, quantile, quantiles, ratio


def engine(service: str, title: str) -> Row:
    """Panels of a service with a model."""
    p = f"flyspec_{service}"
    return Row(title, [
        Panel("Step time", "Of one forward over all sessions in it.",
              quantiles(f"{p}_step_seconds", NS), "s"),
        Panel("Sessions and tokens of a step", "Means: how well steps are shared.",
              [(ratio(f"{p}_step_{x}_sum", f"{p}_step_{x}_count", NS), x)
               for x in ("sessions", "tokens")]),
        Panel("Sessions", "Open, and the limit.",
              [(f"sum({p}_sessions{{{NS}}})", "open"),
               (f"sum({p}_sessions_limit{{{NS}}})", "limit")]),
        one("Time in steps",
            "Share of the time in which the model runs, by replica: near 1 it is full.",
            f"rate({p}_step_seconds_sum{{{NS}}}[{RATE}])", "instance", "percentunit"),
        Panel("Wait for a step", "From a request's arrival.",
              quantiles(f"{p}_queue_seconds", NS), "s"),
        Panel("Prefix cache", "Tokens of opened sequences that were in the KV cache already.",
              [(ratio(f"{p}_prefix_cache_hits_total", f"{p}_prefix_cache_queries_total", NS),
                "hit rate")], "percentunit"),
    ])  # fmt: skip


SERVICES = [
    engine("verify", "Verify service"),
    engine("draft", "Draft service"),
    Row("Processes", [
        one("Memory", "Resident.", 'process_resident_memory_bytes{job=~"flyspec-.*"}',
            "job, instance", "bytes"),
        one("CPU", "Cores in use.",
            f'rate(process_cpu_seconds_total{{job=~"flyspec-.*"}}[{RATE}])', "job, instance"),
        one("RPCs that ended with an error",
            "CANCELLED, which is how the orchestrator ends sessions, is left out. "
            "UNAUTHENTICATED: no API key, or a wrong one.",
            'sum by (method, code) (rate(flyspec_rpc_calls_total{code!~"CANCELLED"}'
            f"[{RATE}]))", "method, code", "cps"),
        one("Judging", "Time of the rule for one verdict, p95.",
            quantile(0.95, "flyspec_verify_judge_seconds", NS, "rule"), "rule", "s"),
        one("Open calls", "By method.", "sum by (method) (flyspec_rpc_open_calls)", "method"),
        one("Versions", "Processes by version.",
            "count by (service, version) (flyspec_build_info)", "service, version"),
    ]),
]  # fmt: skip
