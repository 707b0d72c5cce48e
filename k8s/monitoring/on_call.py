"""The dashboard `flyspec: on call`: for each panel its question, its PromQL and its unit."""

from __future__ import annotations

from grafana import Panel, Row, one, stat
from promql import BY, NS, RATE, RULED, quantile, quantiles, rate, ratio

USABLE = "flyspec_upstream_replicas_usable"
ACCEPTED = "flyspec_spec_decode_num_accepted_tokens_total"
DRAFTS = "flyspec_spec_decode_num_drafts_total"
OUTPUT = "flyspec_output_tokens_total"
EMITTED = "flyspec_drafter_emitted_tokens_total"
ROUNDS = "flyspec_round_seconds_count"
PARTS = "flyspec_round_part_seconds_sum"
REQUESTS = "flyspec_requests_total"
TARGET = 'part=~"verify_step|judge"'
FAILED = 'status=~"INTERNAL|UNKNOWN|UNAVAILABLE"'

ON_CALL = [
    Row("Is it up?", [
        stat("Processes that answer", "Of those that Prometheus knows.",
             'sum(up{job=~"flyspec-.*"}) / count(up{job=~"flyspec-.*"})', "percentunit",
             red_below=1),
        stat("Targets usable", "Replicas of the verify service that a session may be opened on.",
             f'max({USABLE}{{{NS},service="verify"}})', red_below=1),
        stat("Draft replicas usable",
             "Without any, the orchestrator looks drafts up in the prompt.",
             f'max({USABLE}{{{NS},service="draft"}})', red_below=1),
        stat("Generations", "That run now.", f"sum(flyspec_generations_active{{{NS}}})"),
        stat("Tokens a second", "That became final.", rate(OUTPUT, NS)),
        stat("Requests that fail", "By our own doing: INTERNAL, UNKNOWN, UNAVAILABLE.",
             f"{rate(REQUESTS, f'{NS},{FAILED}')} / {rate(REQUESTS, NS)}", "percentunit",
             red_above=0.01),
        one("Requests by status",
            "RESOURCE_EXHAUSTED is load that was refused, CANCELLED a client that went away.",
            rate(REQUESTS, NS, "status"), "status", "reqps", stack=True),
        one("Recoveries",
            "What kept generations going when a service failed; their clients saw a pause.",
            rate("flyspec_recoveries_total", NS, "kind"), "kind", "cps", stack=True),
        one("Circuit breakers that are not closed",
            "Replicas that failed and are not fully trusted yet.",
            "sum by (service, address) (flyspec_upstream_breaker_state"
            f'{{{NS},state!="closed"}})', "service, address", red_above=1),
    ]),
    Row("Is it slow, and where?", [
        Panel("Time to first token", "From arrival, the wait to be admitted included.",
              quantiles("flyspec_time_to_first_token_seconds", RULED), "s"),
        Panel("Time per output token", "Of completed requests.",
              quantiles("flyspec_request_time_per_output_token_seconds", RULED), "s"),
        Panel("Request, end to end", "Of completed requests.",
              quantiles("flyspec_e2e_request_latency_seconds", RULED), "s"),
        one("Where a round's time goes",
            "Mean of each part. verify_queue grows: the target is full. draft_queue: the "
            "drafter is. network: gRPC, the orchestrator, clients that read slowly.",
            f"{rate(PARTS, BY, 'part')} / on () group_left {rate(ROUNDS, BY)}", "part", "s",
            width=12, stack=True),
        Panel("Round", "From asking for drafts to the verdict.",
              quantiles("flyspec_round_seconds", BY), "s", width=6),
        Panel("Wait to be admitted", "Of admitted requests.",
              quantiles("flyspec_request_queue_time_seconds", NS), "s", width=6),
    ]),
    Row("Is speculation paying?", [
        one("Estimated speedup over plain decoding",
            "Tokens a second of rounds with drafts, times what the target takes for a round. "
            "Below 1 drafts cost more than they save. An estimate, somewhat too high: see "
            "docs/observability.md.",
            f"({ratio(EMITTED, 'flyspec_round_seconds_sum', BY, 'drafter')}) * "
            f"({rate(PARTS, f'{BY},{TARGET}', 'drafter')}"
            f" / {rate(ROUNDS, BY, 'drafter')})", "drafter", red_below=1),
        one("Mean acceptance length",
            "Tokens that a round with drafts gives: 1 + accepted / rounds.",
            f"1 + {ratio(ACCEPTED, DRAFTS, RULED, 'drafter, rule')}", "drafter, rule"),
        one("Draft acceptance rate", "Accepted of drafted tokens.",
            ratio(ACCEPTED, "flyspec_spec_decode_num_draft_tokens_total", RULED, "drafter, rule"),
            "drafter, rule", "percentunit"),
        one("Acceptance by position",
            "Share of the rounds in which the draft at a position, from 0, was accepted. Where "
            "it is low, a smaller K drafts less in vain.",
            "sum by (position) (rate(flyspec_spec_decode_num_accepted_tokens_per_pos_"
            f"total{{{RULED}}}[{RATE}])) / on () group_left {rate(DRAFTS, RULED)}",
            "position", "percentunit"),
        Panel("K", "Tokens drafted a round.", [
            (quantile(0.5, "flyspec_spec_decode_draft_length", RULED), "p50"),
            (ratio("flyspec_spec_decode_draft_length_sum",
                   "flyspec_spec_decode_draft_length_count", RULED), "mean")]),
        one("Tokens by origin", "loose: not the target's own. plain: decoded without drafts.",
            rate(OUTPUT, RULED, "origin"), "origin", "cps", stack=True),
        one("Share of loose tokens", "By rule; exact and rejection have none.",
            ratio("flyspec_spec_decode_num_loose_tokens_total", OUTPUT, RULED, "rule"), "rule",
            "percentunit"),
        one("Loose cost", "Nats that loose tokens cost, for each 1,000 tokens of output.",
            f"1000 * {ratio('flyspec_spec_decode_loose_cost_nats_total', OUTPUT, RULED, 'rule')}",
            "rule"),
        one("Rollbacks", "Windows that failed after their round, a second.",
            rate("flyspec_spec_decode_num_rollbacks_total", RULED, "drafter, rule"),
            "drafter, rule", "cps"),
    ]),
    Row("Which drafter?", [
        one("Share of new generations",
            "As the operator set it: the default has what canaries leave.",
            f"max by (drafter) (flyspec_drafter_share{{{BY}}})", "drafter", "percentunit"),
        one("Generations by drafter", "That draft with it now.",
            f"sum by (drafter) (flyspec_drafter_generations_active{{{BY}}})", "drafter",
            stack=True),
        one("Usable", "0: generations of this drafter get another one, or prompt lookup.",
            f"min by (drafter) (flyspec_drafter_usable{{{BY}}})", "drafter", red_below=1),
        one("Tokens a round", "Of rounds that it drafted for, the target's own token included.",
            ratio(EMITTED, ROUNDS, BY, "drafter"), "drafter"),
        one("Tokens a second of a stream",
            "In rounds that it drafted for: what to compare drafters by.",
            ratio(EMITTED, "flyspec_drafter_round_seconds_total", BY, "drafter"), "drafter"),
        one("Failures", "Proposals that did not come: lost, too late, nonsense.",
            rate("flyspec_drafter_failures_total", BY, "drafter"), "drafter", "cps"),
    ]),
    Row("Is it shedding load?", [
        Panel("Generations and slots", "Running at the limit and waiting: full.", [
            (f"sum(flyspec_generations_active{{{NS}}})", "running"),
            (f"sum(flyspec_generations_waiting{{{NS}}})", "waiting"),
            (f"sum(flyspec_generation_slots{{{NS}}})", "slots")]),
        one("Refusals by reason",
            "queue_full, wait_too_long, service_full: too much work. "
            "client_limit: one client too much.",
            rate("flyspec_requests_refused_total", NS, "reason"), "reason", "reqps", stack=True),
        Panel("Outstanding tokens", "That running generations may still read and write.",
              [(f"sum(flyspec_outstanding_tokens{{{NS}}})", "tokens")]),
    ]),
]  # fmt: skip
