"""Cost of judging by each rule, relative to the forward pass of the output layer.

Before every timed judgement the layer (hidden size H -> V, K + 1 rows) runs and the logits are
rewritten, so that the caches are as after a forward pass, and a machine whose speed drifts slows
both alike. Shares are medians over the repeats of a judgement's time divided by the layer's just
before it. Judging is `verify_service.rules.judge`, as in the verify service.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flyspec.concurrency import UntilCtrlC
from flyspec.engine.autojudge import AutoJudge, JudgeFacts
from flyspec.engine.distributions import decode
from flyspec.engine.loading import resolve_device
from flyspec.engine.logits import token_logprobs
from flyspec.engine.model import History
from flyspec.engine.sampling import choose
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.tables import FittedTable, make_table
from flyspec.validation import distribution_spec
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams, TokenDistribution
from flyspec_lab.bench import rounds
from flyspec_lab.bench.options import JudgeOptions
from flyspec_lab.bench.rounds import SEED, START_POSITION, RandomRound, make_round
from flyspec_lab.bench.summaries import grouped
from verify_service.rules import judge

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
}
"""Sampling parameters for every rule."""

_ACCEPTING: Mapping[str, Any] = {"random_acceptance": 0.999, "judge_threshold": 1.0}
"""Values at which the mismatch is accepted; the cost is the same."""
DEFAULT_RULES = tuple(
    (name, Rule(name, **{p: value for p, value in _ACCEPTING.items() if p in preset.defaults}))
    for name, preset in RULE_PRESETS.items()
)

TARGET_SHARE = 0.1
"""Goal for greedy `exact` and `fly`: maximum share of the layer's time."""

_SAMPLING_ALONE = {
    "greedy": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, top-k 50": SamplingParams(temperature=0.7, top_k=50),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 0.7, min-p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
    "greedy, penalties": SamplingParams(
        repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}
_READ_TOP_K = 50


@dataclass(frozen=True)
class LayerCost:
    """Forward pass of the output layer over K + 1 rows; median, in ns."""

    num_speculative_tokens: int
    rows: int
    median_ns: int


@dataclass(frozen=True)
class RuleCost:
    """A rule on one round: all drafts match, or one does not and has this outcome."""

    rule: str
    sampling: str
    num_speculative_tokens: int
    matching: bool
    outcome: str
    median_ns: int
    share_of_layer: float


@dataclass(frozen=True)
class SamplingCost:
    """A part alone: choosing the target's tokens for K + 1 rows, as every rule does; their
    log-probabilities; decoding the drafts' distributions."""

    what: str
    num_speculative_tokens: int
    median_ns: int
    share_of_layer: float


@dataclass(frozen=True)
class JudgeReport:
    """The costs of the output layer, all rules, and sampling alone."""

    vocab_size: int
    hidden_size: int
    dtype: str
    device: str
    threads: int
    repeats: int
    layers: Sequence[LayerCost]
    rules: Sequence[RuleCost]
    sampling: Sequence[SamplingCost]

    @property
    def worst_share(self) -> float | None:
        """Maximum share of greedy `exact` and `fly`, if measured; the goal is `TARGET_SHARE`."""
        shares = [
            cost.share_of_layer
            for cost in self.rules
            if cost.sampling == "greedy" and cost.rule in ("exact", "fly")
        ]
        return max(shares) if shares else None


@dataclass(frozen=True)
class _Case:
    """Work to time on fresh logits; `make` turns its median and share into a cost."""

    num_speculative_tokens: int
    logits: Tensor
    work: Callable[[Tensor], object]
    make: Callable[[int, float], RuleCost | SamplingCost]


def measure(o: JudgeOptions) -> JudgeReport:
    """Time every rule, K, way of sampling and kind of round, in a rotating order.

    Raises `StoppedEarly` with the medians until then if Ctrl-C was pressed after all had their
    first counted run.
    """
    if o.threads:
        torch.set_num_threads(o.threads)
    dtype, device = getattr(torch, o.dtype), resolve_device(o.device)
    with torch.inference_mode():
        weight = torch.empty(o.vocab_size, o.hidden_size, dtype=dtype, device=device)
        weight.normal_(std=0.02)
        hidden = {k: torch.randn(k + 1, o.hidden_size).to(device, dtype) for k in o.ks}
    cases = _cases(o, dtype, device)
    layer_ns: dict[int, list[int]] = {k: [] for k in o.ks}
    times: list[list[int]] = [[] for _ in cases]
    shares: list[list[float]] = [[] for _ in cases]
    until = UntilCtrlC()
    with until, progress("judging", len(cases) * (o.repeats + 1)) as advance:
        for repeat in range(o.repeats + 1):
            turn = repeat % len(cases)
            for index in [*range(turn, len(cases)), *range(turn)]:
                case = cases[index]
                k = case.num_speculative_tokens
                with torch.inference_mode():
                    forward = partial(torch.nn.functional.linear, hidden[k], weight)
                    layer = _time(forward, device)
                    logits = case.logits.clone()
                judged = _time(partial(case.work, logits), device)
                if repeat > 0:  # the first run fills caches of programs and of memory
                    layer_ns[k].append(layer)
                    times[index].append(judged)
                    shares[index].append(judged / layer)
                advance()
            until.reached = repeat > 0
    costs = [
        case.make(int(statistics.median(t)), statistics.median(s))
        for case, t, s in zip(cases, times, shares, strict=True)
    ]
    return until.result(
        JudgeReport(
            vocab_size=o.vocab_size,
            hidden_size=o.hidden_size,
            dtype=o.dtype,
            device=str(device),
            threads=torch.get_num_threads(),
            repeats=min(map(len, times)),
            layers=[LayerCost(k, k + 1, int(statistics.median(t))) for k, t in layer_ns.items()],
            rules=[cost for cost in costs if isinstance(cost, RuleCost)],
            sampling=[cost for cost in costs if isinstance(cost, SamplingCost)],
        )
    )


def _time(work: Callable[[], object], device: torch.device) -> int:
    """Return the nanoseconds until the work is done, on the device, too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter_ns()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - begin


def _cases(o: JudgeOptions, dtype: torch.dtype, device: torch.device) -> list[_Case]:
    @cache
    def round_of(k: int, sampling: SamplingParams, mismatch: bool, likely: bool) -> RandomRound:
        return make_round(
            k, o.vocab_size, sampling,
            mismatch=mismatch, likely=likely, dtype=dtype, device=device,
        )  # fmt: skip

    cases = []
    for k in o.ks:
        for label, sampling in SAMPLINGS.items():
            for name, rule in o.rules or DEFAULT_RULES:
                lossless = RULE_PRESETS[rule.name].lossless
                for mismatch in (False, True):
                    round_ = round_of(k, sampling, mismatch, mismatch and not lossless)
                    read = RULE_PRESETS[rule.name].hidden_layers
                    judged = _hidden(k, o.hidden_size, dtype, device) if read else (None, None)
                    cases.append(_rule_case(name, rule, label, sampling, round_, *judged))
        for label, sampling in _SAMPLING_ALONE.items():
            drawn = SamplingParams() if sampling.penalizes else sampling
            round_ = round_of(k, drawn, False, False)
            cases.append(_part(label, round_, _choosing(sampling, round_)))
        greedy = round_of(k, SamplingParams(), False, False)
        token_ids = [*greedy.draft_token_ids, 0]
        cases.append(
            _part("log-probs, top 5", greedy, partial(token_logprobs, token_ids=token_ids, top=5))
        )
        for top_k in (0, _READ_TOP_K):
            what = f"reading distributions, {f'top {top_k}' if top_k else 'full'}"
            cases.append(_part(what, greedy, _reading(top_k, greedy)))
    return cases


def _hidden(
    k: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, AutoJudge]:
    """Return hidden rows of a round [K + 1, size], and a judge of such rows, both random."""
    generator = torch.Generator().manual_seed(SEED)
    weight, mean, scale = torch.rand(3, size, generator=generator)
    known: dict[str, Any] = {"threshold": 0.5}  # nobody trained it
    facts = JudgeFacts.model_construct(**known)
    made = AutoJudge(weight, torch.zeros(1), mean, 1.0 + scale, facts, "")
    rows = torch.randn(k + 1, size, generator=generator).to(device, dtype)
    return rows, made.on(str(device))


def _rule_case(
    name: str,
    rule: Rule,
    label: str,
    sampling: SamplingParams,
    round_: RandomRound,
    hidden_rows: Tensor | None,
    autojudge: AutoJudge | None,
) -> _Case:
    k, vocab_size = len(round_.draft_token_ids), round_.logits.shape[-1]
    resolved = resolve_rule(rule, k)
    work = partial(
        judge,
        resolved,
        round_.draft_token_ids,
        sampling=sampling,
        seed=SEED,
        start_position=START_POSITION,
        eos_token_ids=rounds.eos_token_ids(vocab_size),
        control_token_ids=rounds.control_token_ids(vocab_size),
        draft_distributions=round_.distributions(distribution_spec(resolved, sampling)),
        hidden_rows=hidden_rows,
        autojudge=autojudge,
    )
    index = round_.mismatch_index
    outcome = work(round_.logits).decisions[index or 0].outcome.name

    def make(median_ns: int, share: float) -> RuleCost:
        return RuleCost(name, label, k, index is None, outcome, median_ns, share)

    return _Case(k, round_.logits, work, make)


def _part(what: str, round_: RandomRound, work: Callable[[Tensor], object]) -> _Case:
    k = len(round_.draft_token_ids)
    return _Case(k, round_.logits, work, lambda ns, share: SamplingCost(what, k, ns, share))


def _choosing(sampling: SamplingParams, round_: RandomRound) -> Callable[[Tensor], object]:
    vocab_size = round_.logits.shape[-1]
    tokens = [position % vocab_size for position in range(START_POSITION)]
    history = History(tokens, START_POSITION // 2)
    drafts = round_.draft_token_ids
    return lambda logits: choose(
        logits, sampling, START_POSITION, SEED, history=history, draft_token_ids=drafts
    ).tolist()


def _reading(top_k: int, round_: RandomRound) -> Callable[[Tensor], object]:
    """Decode distributions from the bytes of the wire to the device."""
    vocab_size = round_.logits.shape[-1]
    sent = round_.distributions(DistributionSpec(top_k))
    assert sent is not None
    encoded = [
        TokenDistribution(
            row.to("cpu", torch.float16).numpy().tobytes(),
            () if sent.token_ids is None else tuple(sent.token_ids[i].tolist()),
        )
        for i, row in enumerate(sent.log_probs)
    ]
    return lambda logits: decode(
        encoded, round_.draft_token_ids, vocab_size, renormalise=False, device=logits.device
    )


def judge_tables(report: JudgeReport) -> list[FittedTable]:
    """Return one table per way of sampling, and one for sampling alone."""
    ks = [layer.num_speculative_tokens for layer in report.layers]
    costs = {(c.sampling, c.rule, c.num_speculative_tokens, c.matching): c for c in report.rules}
    rules = list(dict.fromkeys(c.rule for c in report.rules))
    tables = []
    for sampling in dict.fromkeys(c.sampling for c in report.rules):
        rows = []
        for rule in rules:
            row = [rule]
            for k in ks:
                matching, other = (costs[sampling, rule, k, match] for match in (True, False))
                row += [_cost(matching), f"{_cost(other)} {other.outcome.lower()}"]
            rows.append(row)
        columns = [head for k in ks for head in (f"K = {k}, all match", "one mismatch")]
        tables.append(make_table(["rule", *columns], rows, f"judging, {sampling}"))
    parts = grouped(report.sampling, lambda c: c.what)
    alone = [[what, *map(_cost, of)] for what, of in parts.items()]
    return [*tables, make_table(["", *(f"K = {k}" for k in ks)], alone, "sampling alone")]


def judge_summary(report: JudgeReport) -> str:
    """Say how long the layers take, and whether the goal was met."""
    lines = [
        f"output layer {report.hidden_size} -> {report.vocab_size:,}, {layer.rows} rows, "
        f"{report.dtype} on {report.device}: {layer.median_ns / 1e6:.2f} ms"
        for layer in report.layers
    ]
    worst = report.worst_share
    if worst is not None:
        verdict = "met" if worst <= TARGET_SHARE else "missed"
        lines.append(
            f"goal for greedy exact and fly: at most {TARGET_SHARE:.0%} of the layer's time; "
            f"{verdict}, maximum {worst:.1%}"
        )
    return "\n".join(lines)


def _cost(cost: RuleCost | SamplingCost) -> str:
    return f"{cost.median_ns / 1e6:.2f} ms {cost.share_of_layer:6.1%}"
