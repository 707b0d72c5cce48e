"""`flyspec plan`: tokens per second of a deployment, calculated from a bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.options import with_flags
from flyspec.flags import Flag
from flyspec.speculation_length import MOST
from flyspec_lab.bench.options import numbers_flag
from flyspec_lab.report import Part, Report, Results

if TYPE_CHECKING:
    from flyspec.tables import FittedTable
    from flyspec_lab.planning.measured import MeasuredMode
    from flyspec_lab.planning.plan import Bounds, Deployment, Rate

_RATES = (
    ("clients", "{.clients}"),
    ("K", "{.num_speculative_tokens}"),
    ("tok/s", "{.tokens_per_s:.0f}"),
    ("per request", "{.tokens_per_s_per_request:.0f}"),
    ("rounds/s", "{.rounds_per_s:.0f}"),
    ("round", "{.round_ms:.2f} ms"),
    ("tok/round", "{.tokens_per_round:.2f}"),
    ("rounds/step", "{.rounds_per_step:.1f}"),
    ("target busy", "{.target_share:.0%}"),
    ("drafter busy", "{.draft_share:.0%}"),
    ("ahead", "{.drafted_ahead:.0%}"),
)
_NOTES = (
    "rounds/step: rounds of different requests in a step of the target; busy: share of the time; "
    "ahead: rounds whose drafts are made while the one before is verified"
)


# fmt: off
@dataclass(frozen=True)
class PlanOptions:
    """What to plan. The models, rule, drafter and texts are those of the bench."""

    clients: Annotated[tuple[int, ...], numbers_flag(
        "Concurrent requests",
    )] = (1, 8, 32)
    targets: Annotated[int, Flag("Replicas of the verify service.", min=1)] = 1
    drafters: Annotated[int, Flag("Replicas of the draft service.", min=1)] = 1
    cores: Annotated[int, Flag(
        "All services share one machine with this many cores (then there is one of each).", min=0,
        default="each has a device of its own",
    )] = 0
    num_speculative_tokens: Annotated[tuple[int, ...], numbers_flag(
        "K: maximum drafted tokens per round",
    )] = (1, 2, 3, 4, 6, 8, 12, 15)
    draft_rtt_ms: Annotated[float, Flag(
        "Round-trip time from the orchestrator to the drafters, ms.", min=0,
    )] = 0.0
    verify_rtt_ms: Annotated[float, Flag(
        "Round-trip time from the orchestrator to the targets, ms.", min=0,
    )] = 0.0
    draft_ahead: Annotated[bool, Flag(
        "Draft the next round while the target verifies, where most rounds use it.",
    )] = True
    max_tokens: Annotated[int | None, Flag(
        "Output tokens per request.", min=2, default="as measured",
    )] = None
    tokens_per_second: Annotated[float | None, Flag(
        "Also say how many targets and drafters reach this rate.", min=0, default="none",
    )] = None
    rule: Annotated[str, Flag("Rule, if several were measured.", default="the only one")] = ""
    drafter: Annotated[str, Flag("Drafter, if several were measured.", default="the only one")] = ""
    group: Annotated[str, Flag(
        "Group of prompts, if several were measured.", default="the only one",
    )] = ""


@with_flags
def plan(
    bench: Annotated[Path, typer.Argument(
        metavar="BENCH", help="JSON document of `flyspec bench` (--output or --json).",
    )],
    options: PlanOptions,
    results: Results,
) -> None:
    # fmt: on
    """Calculate tokens per second, load and bounds of a deployment from a bench's measurements."""
    results.of(lambda: _planned(bench, options))


def _planned(bench: Path, o: PlanOptions) -> Report:
    from flyspec.errors import ConfigError
    from flyspec.tables import record_table
    from flyspec_lab.planning import plan as planning
    from flyspec_lab.planning.measured import choose, read_measured

    if o.cores and (o.targets > 1 or o.drafters > 1):
        raise ConfigError("--cores: one machine has one target and one drafter; remove --targets "
                          "and --drafters, or --cores")  # fmt: skip
    if (most := max(o.clients)) > planning.MOST_CLIENTS:
        raise ConfigError(f"--clients: at most {planning.MOST_CLIENTS} can be planned, got {most}")
    if (most := max(o.num_speculative_tokens)) > MOST:
        raise ConfigError(f"--num-speculative-tokens: at most {MOST}, got {most}")
    if o.tokens_per_second is not None and o.cores:
        raise ConfigError("--tokens-per-second counts devices; remove --cores")
    measured = choose(read_measured(bench), o.rule, o.drafter, o.group)
    if o.max_tokens is not None:
        measured = replace(measured, tokens_per_request=float(o.max_tokens))
    ks = o.num_speculative_tokens
    deployments = [_deployment(o, clients) for clients in o.clients]
    rates = [[planning.rate(measured, d, k) for k in ks] for d in deployments]
    chosen = [planning.best(of) for of in rates]
    limits = [planning.bounds(measured, d, r.num_speculative_tokens)
              for d, r in zip(deployments, chosen, strict=True)]  # fmt: skip
    largest = deployments[-1]
    devices = None
    if o.tokens_per_second is not None:
        devices = planning.devices_for(measured, largest, ks, o.tokens_per_second)
        if devices is None:
            raise ConfigError(
                f"--tokens-per-second {o.tokens_per_second:g}: {largest.clients} requests do not "
                "reach it with any number of devices; raise --clients"
            )
    doubts = planning.notes(measured, largest, ks)
    shown: list[Part] = [
        record_table(_RATES, [r for of in rates for r in of], _title(measured, largest), left=0),
        _bounds_table(chosen, limits),
        "\n".join([_NOTES, *doubts]),
    ]
    if devices is not None:
        shown.insert(
            2,
            f"{devices.tokens_per_s:g} tokens/s with {largest.clients} requests: targets "
            f"{devices.targets}, drafters {devices.drafters}, at K = "
            f"{devices.num_speculative_tokens}",
        )
    document = {
        **vars(o), "kind": "plan", "bench": str(bench), "measured": measured,
        "rates": [r for of in rates for r in of],
        "best": [{"clients": r.clients, "rate": r, "bounds": b}
                 for r, b in zip(chosen, limits, strict=True)],
        "devices": devices, "notes": doubts,
    }  # fmt: skip
    return Report(document, shown)


def _deployment(o: PlanOptions, clients: int) -> Deployment:
    from flyspec_lab.planning.plan import Deployment

    return Deployment(
        clients, o.targets, o.drafters, o.cores, o.draft_rtt_ms, o.verify_rtt_ms, o.draft_ahead
    )


def _title(m: MeasuredMode, d: Deployment) -> str:
    where = f"one machine of {d.cores} cores" if d.cores else (
        f"{d.targets} target{'s' * (d.targets > 1)}, {d.drafters} drafter{'s' * (d.drafters > 1)}"
    )  # fmt: skip
    return f"{m.rule}, {m.drafter}, {m.tokens_per_request:.0f} tokens a request; {where}"


def _bounds_table(rates: list[Rate], limits: list[Bounds]) -> FittedTable:
    from flyspec.tables import record_table

    columns = (
        ("clients", "{0[0].clients}"),
        ("best K", "{0[0].num_speculative_tokens}"),
        ("tok/s", "{0[0].tokens_per_s:.0f}"),
        ("plain at most", "{0[1].plain:.0f}"),
        ("target alone", "{0[1].target_alone:.0f}"),
        ("one request", "{0[1].one_remote:.0f}"),
        ("drafter beside", "{0[1].one_beside:.0f}"),
        ("1 + K t_d/t_v", "{0[1].clients_per_target:.1f}"),
        ("with trips", "{0[1].clients_per_target_with_trips:.1f}"),
    )
    return record_table(columns, list(zip(rates, limits, strict=True)), "bounds, tokens/s", left=0)
