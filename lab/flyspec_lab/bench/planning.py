"""What `flyspec plan` needs of a comparison: each mode's rounds, step times and acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flyspec.drafter_names import NEED_MODEL
from flyspec.process import available_cores
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import MeasuredStep
from flyspec.values.tokens import Origin
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import FlyspecMode, Mode, Sample
from flyspec_lab.bench.summaries import grouped
from flyspec_lab.planning.acceptance import AgreeingRuns
from flyspec_lab.planning.measured import MeasuredMode

_END = Origin.PLAIN, Origin.CORRECTION, Origin.BONUS
"""Origins of a round's last token."""


def measured_modes(
    modes: Sequence[Mode],
    samples: Sequence[Sample],
    step_costs: Sequence[MeasuredStep] = (),
    on_this_machine: bool = True,
) -> list[MeasuredMode]:
    """Return the modes with a fixed K and one rule, for each group; those without drafts left out.

    `samples` are of requests sent one at a time.
    """
    known = {mode.name: mode for mode in modes if isinstance(mode, FlyspecMode)}
    plain = grouped((s for s in samples if s.mode == PLAIN), lambda s: s.group)
    found = []
    for (group, name), of in grouped(samples, lambda s: (s.group, s.mode)).items():
        mode = known.get(name)
        if mode is None or mode.options.phases or not mode.options.rule:
            continue
        k = mode.options.num_speculative_tokens
        behind = _typical(s for s in of if s.rounds > 1 and s.drafted)
        if not isinstance(k, int) or k < 1 or not behind:
            continue
        token_ns = _mean_token_ns(plain.get(group, ()))
        cores = available_cores() if on_this_machine else 0
        found.append(_measured(mode, k, group, behind, token_ns, step_costs, cores))
    return found


def _mean_token_ns(plain: Iterable[Sample]) -> float | None:
    """Return the target's time per token of plain decoding, behind the first."""
    known = _typical(s for s in plain if s.rounds > 1)
    if not known:
        return None
    spent = sum(s.target_ns - s.opening_target_ns for s in known)
    return spent / sum(s.rounds - 1 for s in known)


def _measured(
    mode: FlyspecMode,
    k: int,
    group: str,
    samples: Sequence[Sample],
    plain_token_ns: float | None,
    step_costs: Sequence[MeasuredStep],
    cores: int,
) -> MeasuredMode:
    """Return the means over requests, given samples with several rounds.

    With the drafts of the first round, if it has any, come its opening of sessions and its reading
    of the prompt; so all rounds but the first count as rounds.
    """
    from orchestrator.generation.sources import AHEAD

    number = len(samples)
    rounds = sum(s.rounds - 1 for s in samples)
    drafts = sum(s.drafted for s in samples) / sum(s.spec_steps for s in samples)
    opened = sum(s.opening_draft_ns > 0 for s in samples)  # with a proposal
    draft_ns = sum(s.draft_ns - s.opening_draft_ns for s in samples)
    draft_token_ns = draft_ns / max(1.0, sum(s.drafted for s in samples) - opened * drafts)
    verify_ns = sum(s.target_ns - s.opening_target_ns for s in samples) / rounds
    rounds_ns = sum(s.total_ns - s.opening_ns for s in samples)
    opening_draft = sum(s.opening_draft_ns for s in samples) / number
    opening_target = sum(s.opening_target_ns for s in samples) / number
    seconds = sum(s.seconds for s in samples)
    opening = (seconds * 1e9 - rounds_ns) / number  # the client's own time included
    undrafted = sum(_undrafted(s) for s in samples) / number
    rule, drafter = mode.options.rule, samples[0].drafter
    assert rule is not None
    return MeasuredMode(
        mode=mode.name,
        group=group,
        rule=rule.name,
        drafter=drafter,
        token_exact=rule.name in RULE_PRESETS and RULE_PRESETS[rule.name].token_exact,
        num_speculative_tokens=k,
        requests=number,
        tokens_per_request=sum(s.tokens for s in samples) / number,
        undrafted_tokens=undrafted,
        tokens_per_second=sum(s.tokens for s in samples) / seconds,
        mean_draft_tokens=drafts,
        agreement=AgreeingRuns.of(s.origins for s in samples),
        draft_token_ns=draft_token_ns,
        verify_ns=verify_ns,
        rest_ns=max(0.0, rounds_ns / rounds - drafts * draft_token_ns - verify_ns),
        opening_draft_ns=max(0.0, opening_draft - opened / number * drafts * draft_token_ns),
        opening_target_ns=opening_target,
        opening_rest_ns=max(0.0, opening - opening_draft - opening_target),
        plain_token_ns=plain_token_ns,
        step_costs=tuple(step_costs),
        ahead_share=AHEAD if drafter in NEED_MODEL else None,
        cores=cores,
    )


def _undrafted(sample: Sample) -> int:
    """Return the tokens of the first round, which rounds behind it need not make."""
    return next(
        (n for n, o in enumerate(sample.origins, start=1) if o in _END), len(sample.origins)
    )


def _typical(samples: Iterable[Sample]) -> list[Sample]:
    """Return the repeat of median duration for each prompt."""
    return [
        sorted(of, key=lambda s: s.seconds)[(len(of) - 1) // 2]
        for of in grouped(samples, lambda s: s.prompt).values()
    ]


async def step_costs_of(verify_address: str) -> tuple[MeasuredStep, ...]:
    """Return the target's step times, as its service measured them at its start."""
    from orchestrator.upstreams.connection import DESCRIBE_TIMEOUT_S
    from orchestrator.upstreams.verify import GrpcVerifyUpstream

    service = GrpcVerifyUpstream(verify_address, DESCRIBE_TIMEOUT_S)
    try:
        return (await service.describe()).step_costs
    finally:
        await service.close()
