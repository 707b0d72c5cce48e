"""Write the generated files: `python -m k8s.monitoring.generate [DIRECTORY]`.

- dashboards/*.json, for Grafana: `on call`, a row for each question, and `services`;
- prometheus-rule.yaml: the groups of rules.yaml as an object of the Prometheus operator.

They are committed; a test regenerates and compares them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.monitoring.panels import (
    BY,
    NS,
    RATE,
    RULED,
    Panel,
    build,
    graph,
    labelled,
    number,
    quantile,
    quantiles,
    rate,
    rates,
    ratio,
    ratios,
)

USABLE = "flyspec_upstream_replicas_usable"
ACCEPTED = "flyspec_spec_decode_num_accepted_tokens"
DRAFTS = "flyspec_spec_decode_num_drafts_total"
LENGTH = "flyspec_spec_decode_draft_length"
OUTPUT = "flyspec_output_tokens_total"
EMITTED = "flyspec_drafter_emitted_tokens_total"
ROUNDS = "flyspec_round_seconds_count"
PARTS = "flyspec_round_part_seconds_sum"
REQUESTS = "flyspec_requests_total"
KEY_REQUESTS = "flyspec_key_requests_total"
TARGET = 'part=~"verify_step|judge"'
LIMITED = 'status="RESOURCE_EXHAUSTED"'
FAILED = 'status=~"INTERNAL|UNKNOWN|UNAVAILABLE"'

ON_CALL = {
    "Is it up?": [
        number("Processes up", "Share of those that Prometheus knows.",
               'sum(up{job=~"flyspec-.*"}) / count(up{job=~"flyspec-.*"})', "percentunit",
               red_below=1),
        number("Targets usable", "Replicas of the verify service that can open sessions.",
               f'max({USABLE}{{{NS},service="verify"}})', red_below=1),
        number("Draft replicas usable",
               "Without any, the orchestrator drafts by prompt lookup.",
               f'max({USABLE}{{{NS},service="draft"}})', red_below=1),
        number("Generations", "Running now.", f"sum(flyspec_generations_active{{{NS}}})"),
        number("Tokens per second", "Final output tokens.", rate(OUTPUT, NS)),
        number("Failed requests", "Failures of ours: INTERNAL, UNKNOWN, UNAVAILABLE.",
               f"{rate(REQUESTS, f'{NS},{FAILED}')} / {rate(REQUESTS, NS)}", "percentunit",
               red_above=0.01),
        graph("Requests by status",
              "RESOURCE_EXHAUSTED: refused under load. CANCELLED: the client went away.",
              rates(REQUESTS, NS, "status"), "reqps", stack=True),
        graph("Recoveries",
              "What kept generations going when a service failed; their clients saw a pause.",
              rates("flyspec_recoveries_total", NS, "kind"), "cps", stack=True),
        graph("Circuit breakers not closed", "Replicas that failed and are not yet trusted again.",
              labelled("sum by (service, address) (flyspec_upstream_breaker_state"
                       f'{{{NS},state!="closed"}})', "service, address"), red_above=1),
    ],
    "Is it slow, and where?": [
        graph("Time to first token", "From arrival, including the wait for admission.",
              quantiles("flyspec_time_to_first_token_seconds", RULED), "s"),
        graph("Time per output token", "Of completed requests.",
              quantiles("flyspec_request_time_per_output_token_seconds", RULED), "s"),
        graph("Request, end to end", "Of completed requests.",
              quantiles("flyspec_e2e_request_latency_seconds", RULED), "s"),
        graph("Time of a round, by part",
              "Means. A rising verify_queue or draft_queue: the target or the drafter is at "
              "capacity. draft_rpc, verify_rpc: waits that the service does not account for, as "
              "its process is short of CPU or the network slow. orchestrator: its own work, and "
              "clients that read slowly.",
              labelled(f"{rate(PARTS, BY, 'part')} / on () group_left {rate(ROUNDS, BY)}", "part"),
              "s", width=12, stack=True),
        graph("Round", "From requesting drafts to the verdict.",
              quantiles("flyspec_round_seconds", BY), "s", width=6),
        graph("Wait for admission", "Of admitted requests.",
              quantiles("flyspec_request_queue_time_seconds", NS), "s", width=6),
    ],
    "Is speculation paying?": [
        graph("Estimated speedup over plain decoding",
              "Tokens per second of rounds with drafts, times what the target takes per round. "
              "Below 1, drafts cost more than they save. Somewhat too high: see "
              "docs/observability.md.",
              labelled(f"({ratio(EMITTED, 'flyspec_round_seconds_sum', BY, 'drafter')}) * "
                       f"({rate(PARTS, f'{BY},{TARGET}', 'drafter')}"
                       f" / {rate(ROUNDS, BY, 'drafter')})", "drafter"), red_below=1),
        graph("Mean acceptance length",
              "Tokens from a round with drafts: 1 + accepted / rounds.",
              labelled(f"1 + {ratio(f'{ACCEPTED}_total', DRAFTS, RULED, 'drafter, rule')}",
                       "drafter, rule")),
        graph("Draft acceptance rate", "Accepted tokens / drafted tokens.",
              ratios(f"{ACCEPTED}_total", "flyspec_spec_decode_num_draft_tokens_total", RULED,
                     "drafter, rule"), "percentunit"),
        graph("Acceptance by position",
              "Share of rounds in which the draft at a position (from 0) was accepted. Where it "
              "is low, a smaller K wastes fewer drafts.",
              labelled(f"{rate(f'{ACCEPTED}_per_pos_total', RULED, 'position')} "
                       f"/ on () group_left {rate(DRAFTS, RULED)}", "position"), "percentunit"),
        graph("K", "Tokens drafted per round.",
              [(quantile(0.5, LENGTH, RULED), "p50"),
               (ratio(f"{LENGTH}_sum", f"{LENGTH}_count", RULED), "mean")]),
        graph("Tokens by origin",
              "loose: not the target's own choice. plain: decoded without drafts.",
              rates(OUTPUT, RULED, "origin"), "cps", stack=True),
        graph("Share of loose tokens", "By rule; exact and rejection have none.",
              ratios("flyspec_spec_decode_num_loose_tokens_total", OUTPUT, RULED, "rule"),
              "percentunit"),
        graph("Loose cost", "Cost of loose tokens in nats, per 1,000 output tokens.",
              labelled("1000 * " + ratio("flyspec_spec_decode_loose_cost_nats_total", OUTPUT,
                                         RULED, "rule"), "rule")),
        graph("Rollbacks", "Windows per second that failed after their round.",
              rates("flyspec_spec_decode_num_rollbacks_total", RULED, "drafter, rule"), "cps"),
    ],
    "Which drafter?": [
        graph("Share of new generations",
              "As set by the operator; the default drafter gets what canaries leave.",
              labelled(f"max by (drafter) (flyspec_drafter_share{{{BY}}})", "drafter"),
              "percentunit"),
        graph("Generations by drafter", "Drafting with it now.",
              labelled(f"sum by (drafter) (flyspec_drafter_generations_active{{{BY}}})",
                       "drafter"), stack=True),
        graph("Usable", "0: generations of this drafter get another one, or prompt lookup.",
              labelled(f"min by (drafter) (flyspec_drafter_usable{{{BY}}})", "drafter"),
              red_below=1),
        graph("Tokens per round", "Of rounds it drafted for, including the target's own token.",
              ratios(EMITTED, ROUNDS, BY, "drafter"), width=6),
        graph("Tokens per second per stream",
              "In rounds it drafted for: use this to compare drafters.",
              ratios(EMITTED, "flyspec_drafter_round_seconds_total", BY, "drafter"), width=6),
        graph("Wait for a proposal",
              "p95. Its parts are in *Time of a round, by part*.",
              labelled(quantile(0.95, "flyspec_drafter_proposal_seconds", BY, "drafter"),
                       "drafter"), "s", width=6),
        graph("Failures", "Missing proposals: lost, late or invalid.",
              rates("flyspec_drafter_failures_total", BY, "drafter"), "cps", width=6),
    ],
    "Is it shedding load?": [
        graph("Generations and slots", "At capacity: all slots in use, and generations waiting.", [
            (f"sum(flyspec_generations_active{{{NS}}})", "running"),
            (f"sum(flyspec_generations_waiting{{{NS}}})", "waiting"),
            (f"sum(flyspec_generation_slots{{{NS}}})", "slots")]),
        graph("Refusals by reason",
              "queue_full, wait_too_long, service_full: too much work. "
              "client_limit: one client too much.",
              rates("flyspec_requests_refused_total", NS, "reason"), "reqps", stack=True),
        graph("Outstanding tokens", "Tokens that running generations may still read and write.",
              [(f"sum(flyspec_outstanding_tokens{{{NS}}})", "tokens")]),
    ],
    "Which API key?": [
        graph("Requests by key", "Of clients with an API key, by its name.",
              rates(KEY_REQUESTS, NS, "key"), "reqps", stack=True),
        graph("Output tokens by key", "Final tokens.",
              rates("flyspec_key_output_tokens_total", NS, "key"), "cps", stack=True),
        graph("Requests refused for limits, by key",
              "Share of a key's requests that ended with RESOURCE_EXHAUSTED.",
              labelled(f"{rate(KEY_REQUESTS, f'{NS},{LIMITED}', 'key')}"
                       f" / {rate(KEY_REQUESTS, NS, 'key')}", "key"), "percentunit",
              red_above=0.5),
    ],
}  # fmt: skip


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
