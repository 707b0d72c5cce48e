"""The dashboard `flyspec: services`: the models of draft and verify, and the processes."""

from __future__ import annotations

from k8s.monitoring.panels import Panel, graph
from k8s.monitoring.promql import NS, RATE, labelled, quantile, quantiles, ratio


def engine(service: str) -> list[Panel]:
    p = f"flyspec_{service}"
    return [
        graph("Step time", "Of one forward pass over all its sessions.",
              quantiles(f"{p}_step_seconds", NS), "s"),
        graph("Sessions and tokens per step", "Means: how well steps are shared.",
              [(ratio(f"{p}_step_{x}_sum", f"{p}_step_{x}_count", NS), x)
               for x in ("sessions", "tokens")]),
        graph("Sessions", "Open, and the limit.",
              [(f"sum({p}_sessions{{{NS}}})", "open"),
               (f"sum({p}_sessions_limit{{{NS}}})", "limit")]),
        graph("Time in steps",
              "Share of time in which the model runs, by replica. Near 1, it is at capacity.",
              labelled(f"rate({p}_step_seconds_sum{{{NS}}}[{RATE}])", "instance"), "percentunit"),
        graph("Wait for a step", "From a request's arrival.",
              quantiles(f"{p}_queue_seconds", NS), "s"),
        graph("Prefix cache", "Share of opened sequences' tokens that the KV cache already held.",
              [(ratio(f"{p}_prefix_cache_hits_total", f"{p}_prefix_cache_queries_total", NS),
                "hit rate")], "percentunit"),
    ]  # fmt: skip


SERVICES = {
    "Verify service": engine("verify"),
    "Draft service": engine("draft"),
    "Processes": [
        graph("Memory", "Resident.",
              labelled('process_resident_memory_bytes{job=~"flyspec-.*"}', "job, instance"),
              "bytes"),
        graph("CPU", "Cores in use.",
              labelled(f'rate(process_cpu_seconds_total{{job=~"flyspec-.*"}}[{RATE}])',
                       "job, instance")),
        graph("RPCs that ended with an error",
              "Without CANCELLED, with which the orchestrator ends sessions. UNAUTHENTICATED: "
              "a missing or wrong API key.",
              labelled('sum by (method, code) (rate(flyspec_rpc_calls_total{code!~"CANCELLED"}'
                       f"[{RATE}]))", "method, code"), "cps"),
        graph("Judging", "Time that the rule takes for one verdict, p95.",
              labelled(quantile(0.95, "flyspec_verify_judge_seconds", NS, "rule"), "rule"), "s"),
        graph("Open calls", "By method.",
              labelled("sum by (method) (flyspec_rpc_open_calls)", "method")),
        graph("Versions", "Processes by version.",
              labelled("count by (service, version) (flyspec_build_info)", "service, version")),
    ],
}  # fmt: skip
