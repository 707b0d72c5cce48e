"""What judging costs: each rule against the forward of the output layer, in one run.

Before every timed judgement the layer runs, hidden size H -> V over K + 1 rows, and the logits are
written anew: so the caches hold what they hold after a forward, and a machine whose speed drifts
slows both alike. Shares are the median over the repeats of a judgement's time over that of the
layer just before it. Judged by `verify_service.rules.judge`, as the verify service does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flyspec.bench import rounds
from flyspec.bench.rounds import SEED, START_POSITION, RandomRound, make_round
from flyspec.engine.distributions import decode
from flyspec.engine.logits import token_logprobs
from flyspec.engine.model import History
from flyspec.engine.sampling import choose
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams, TokenDistribution
from verify_service.rules import judge

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
}
"""Under which the rules are judged."""

DEFAULT_RULES = tuple(
    # At the default probability the mismatch would seldom stand; the cost is the same.
    (name, Rule(name, random_acceptance=0.999 if "random_acceptance" in p.defaults else None))
    for name, p in RULE_PRESETS.items()
)

TARGET_SHARE = 0.1
"""Of the layer's time: what `exact` and `fly` may add when greedy."""

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
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class JudgeOptions:
    """Sizes, and what is judged. `repeats` timed runs of everything follow one that is not."""

    vocab_size: int = 128_256
    hidden_size: int = 4096
    num_speculative_tokens: Sequence[int] = (15, 25)
    rules: Sequence[tuple[str, Rule]] = DEFAULT_RULES
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = _CPU
    repeats: int = 9


@dataclass(frozen=True)
class LayerCost:
    """The output layer's forward over K + 1 rows; median, ns."""

    num_speculative_tokens: int
    rows: int
    median_ns: int


@dataclass(frozen=True)
class RuleCost:
    """A rule over one round: all of its drafts match, or one does not and has this outcome."""

    rule: str
    sampling: str
    num_speculative_tokens: int
    matching: bool
    outcome: str
    median_ns: int
    share_of_layer: float


@dataclass(frozen=True)
class SamplingCost:
    """A part of it alone: choosing the target's own tokens of K + 1 rows, which every rule does;
    their log-probabilities; reading the drafts' distributions."""

    what: str
    num_speculative_tokens: int
    median_ns: int
    share_of_layer: float


@dataclass(frozen=True)
class JudgeReport:
    """All of it, and the largest greedy share of `exact` and `fly`, if they were measured."""

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
        """Of the layer's time, greedy, over `exact` and `fly`; the target is `TARGET_SHARE`."""
        shares = [
            cost.share_of_layer
            for cost in self.rules
            if cost.sampling == "greedy" and cost.rule in ("exact", "fly")
        ]
        return max(shares) if shares else None

    def to_document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {**asdict(self), "target_share": TARGET_SHARE, "worst_share": self.worst_share}


@dataclass(frozen=True)
class _Case:
    """Something to time on fresh logits; `make` turns its times into a cost."""

    num_speculative_tokens: int
    logits: Tensor
    work: Callable[[Tensor], object]
    make: Callable[[int, float], RuleCost | SamplingCost]


def count(options: JudgeOptions) -> int:
    """How many times `measure` calls `on_sample`."""
    per_k = len(options.rules) * len(SAMPLINGS) * 2 + len(_SAMPLING_ALONE) + 3
    return len(options.num_speculative_tokens) * per_k * (options.repeats + 1)


def measure(options: JudgeOptions, on_sample: Callable[[], None] = lambda: None) -> JudgeReport:
    """Time every rule, K, way of sampling and kind of round, in an order that rotates."""
    with torch.inference_mode():
        weight = torch.empty(
            options.vocab_size, options.hidden_size, dtype=options.dtype, device=options.device
        ).normal_(std=0.02)
        hidden = {
            k: torch.randn(k + 1, options.hidden_size).to(options.device, options.dtype)
            for k in options.num_speculative_tokens
        }
    cases = _cases(options)
    layer_ns: dict[int, list[int]] = {k: [] for k in options.num_speculative_tokens}
    times: list[list[int]] = [[] for _ in cases]
    shares: list[list[float]] = [[] for _ in cases]
    for repeat in range(options.repeats + 1):
        turn = repeat % len(cases)
        for index in [*range(turn, len(cases)), *range(turn)]:
            case = cases[index]
            k = case.num_speculative_tokens
            with torch.inference_mode():
                forward = partial(torch.nn.functional.linear, hidden[k], weight)
                layer = _time(forward, options.device)
                logits = case.logits.clone()
            judged = _time(partial(case.work, logits), options.device)
            if repeat > 0:  # the first run fills caches of programs and of memory
                layer_ns[k].append(layer)
                times[index].append(judged)
                shares[index].append(judged / layer)
            on_sample()
    costs = [
        case.make(int(statistics.median(t)), statistics.median(s))
        for case, t, s in zip(cases, times, shares, strict=True)
    ]
    return JudgeReport(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        dtype=str(options.dtype).removeprefix("torch."),
        device=str(options.device),
        threads=torch.get_num_threads(),
        repeats=options.repeats,
        layers=[LayerCost(k, k + 1, int(statistics.median(t))) for k, t in layer_ns.items()],
        rules=[cost for cost in costs if isinstance(cost, RuleCost)],
        sampling=[cost for cost in costs if isinstance(cost, SamplingCost)],
    )


def _time(work: Callable[[], object], device: torch.device) -> int:
    """Nanoseconds until the work is done, on the device as well."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter_ns()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - begin


def _cases(options: JudgeOptions) -> list[_Case]:
    @cache
    def round_of(k: int, sampling: SamplingParams, mismatch: bool, likely: bool) -> RandomRound:
        return make_round(
            k, options.vocab_size, sampling,
            mismatch=mismatch, likely=likely, dtype=options.dtype, device=options.device,
        )  # fmt: skip

    cases = []
    for k in options.num_speculative_tokens:
        for label, sampling in SAMPLINGS.items():
            for name, rule in options.rules:
                lossless = RULE_PRESETS[rule.name].lossless
                for mismatch in (False, True):
                    round_ = round_of(k, sampling, mismatch, likely=mismatch and not lossless)
                    cases.append(_rule_case(name, rule, label, sampling, round_, options))
        for label, sampling in _SAMPLING_ALONE.items():
            drawn = SamplingParams() if sampling.penalizes else sampling
            cases.append(_sampling_case(label, sampling, round_of(k, drawn, False, False)))
        greedy = round_of(k, SamplingParams(), False, False)
        cases.append(_logprobs_case(greedy))
        cases += [_reading_case(top_k, greedy) for top_k in (0, _READ_TOP_K)]
    return cases


def _rule_case(
    name: str,
    rule: Rule,
    label: str,
    sampling: SamplingParams,
    round_: RandomRound,
    options: JudgeOptions,
) -> _Case:
    k = len(round_.draft_token_ids)
    resolved = resolve_rule(rule, k)
    distributions = round_.distributions(distribution_spec(resolved, sampling))
    eos = rounds.eos_token_ids(options.vocab_size)
    control = rounds.control_token_ids(options.vocab_size)

    def work(logits: Tensor) -> Any:
        return judge(
            resolved,
            round_.draft_token_ids,
            logits,
            sampling=sampling,
            seed=SEED,
            start_position=START_POSITION,
            eos_token_ids=eos,
            control_token_ids=control,
            draft_distributions=distributions,
        )

    index = round_.mismatch_index
    decisions = work(round_.logits).decisions
    outcome = decisions[index or 0].outcome.name

    def make(median_ns: int, share: float) -> RuleCost:
        return RuleCost(name, label, k, index is None, outcome, median_ns, share)

    return _Case(k, round_.logits, work, make)


def _sampling_case(what: str, sampling: SamplingParams, round_: RandomRound) -> _Case:
    k = len(round_.draft_token_ids)
    vocab_size = round_.logits.shape[-1]
    tokens = [position % vocab_size for position in range(START_POSITION)]
    history = History(tokens, START_POSITION // 2)

    def work(logits: Tensor) -> Any:
        return choose(
            logits,
            sampling,
            START_POSITION,
            SEED,
            history=history,
            draft_token_ids=round_.draft_token_ids,
        ).tolist()

    return _Case(k, round_.logits, work, lambda ns, share: SamplingCost(what, k, ns, share))


def _logprobs_case(round_: RandomRound) -> _Case:
    k = len(round_.draft_token_ids)
    token_ids = [*round_.draft_token_ids, 0]
    return _Case(
        k,
        round_.logits,
        lambda logits: token_logprobs(logits, token_ids, 5),
        lambda ns, share: SamplingCost("log-probs, top 5", k, ns, share),
    )


def _reading_case(top_k: int, round_: RandomRound) -> _Case:
    """Distributions from the bytes of the wire to the device."""
    k, vocab_size = len(round_.draft_token_ids), round_.logits.shape[-1]
    sent = round_.distributions(DistributionSpec(top_k))
    assert sent is not None
    travelling = [
        TokenDistribution(
            row.to("cpu", torch.float16).numpy().tobytes(),
            () if sent.token_ids is None else tuple(sent.token_ids[i].tolist()),
        )
        for i, row in enumerate(sent.log_probs)
    ]

    def work(logits: Tensor) -> Any:
        return decode(
            travelling,
            round_.draft_token_ids,
            vocab_size,
            renormalise=False,
            device=logits.device,
        )

    what = f"reading distributions, {f'top {top_k}' if top_k else 'full'}"
    return _Case(k, round_.logits, work, lambda ns, share: SamplingCost(what, k, ns, share))
