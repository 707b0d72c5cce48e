"""How close speculation gets to its bound, on pairs of models other than the bundled ones.

The bound is the speedup of rounds that cost only the target's forward pass: tokens per round x
plain step / verify step. With the draft model's time added to the verify step it is the bound of
rounds in which the two take turns. All modes of a prompt run one after the other in a rotating
order, everything once before it counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flyspec.cli.conditions import Condition
from flyspec.client import AsyncClient
from flyspec.concurrency import check_reached
from flyspec.rules import Rule
from flyspec.speculation_length import MOST_BY_AUTO, SpeculationLength
from flyspec.tables import Column, FittedTable, record_table
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench import speed
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.modes import FlyspecMode, Item, Sample
from flyspec_lab.bench.options import PairOptions
from flyspec_lab.bench.prompts import fresh_requests
from flyspec_lab.bench.summaries import grouped


@dataclass(frozen=True)
class PairReport:
    """A mode over all prompts. Times are in ms, per round or token.

    `cost_ratio` is a verify step over a draft step. `bound` and `share` are for rounds that cost
    only the verify step, `bound_in_turn` and `share_in_turn` for those that also wait for the draft
    model. `worst_prompt` is the one with the lowest speedup, `worst_speedup`. `same` and
    `same_as_plain` count the generations with the tokens of the uncounted run, and of plain
    decoding in it.
    """

    mode: str
    tokens_per_second: float
    tokens_per_round: float
    acceptance_rate: float
    loose_share: float
    plain_step_ms: float
    verify_step_ms: float
    draft_step_ms: float | None
    cost_ratio: float | None
    speedup: float
    bound: float
    share: float
    bound_in_turn: float
    share_in_turn: float
    bytes_per_round: float
    distribution_bytes_per_round: float
    judge_ms: float
    round_ms: float
    worst_speedup: float
    worst_prompt: int
    same: int
    same_as_plain: int
    generations: int


async def measure(client: AsyncClient, o: PairOptions) -> list[Sample]:
    """Run everything `repeats` times after repeat 0, which does not count.

    A replaying drafter first rehearses with the longest rounds, so that it knows the text it will
    draft; K auto learns nothing from the time that takes.
    If interrupted, returns what was measured in all modes until then.
    """
    prompts = fresh_requests(o.problems, o.problem_seed)
    items = [[Item("word problems", i, prompt) for i, prompt in enumerate(prompts)]]

    def modes(k_of_run: SpeculationLength) -> list[FlyspecMode]:
        """Return all modes with equal output lengths, and without the loop guard."""
        plain = Condition(PLAIN, Rule("exact"), 0)
        asked = {c.name: c for c in (plain, *o.rules)}
        return [
            FlyspecMode(
                condition.name,
                client,
                GenerateOptions(
                    sampling=SamplingParams(temperature=o.temperature),
                    seed=0,
                    max_tokens=o.max_tokens,
                    ignore_eos=True,
                    disable_loop_guard=True,
                    drafter=o.drafter,
                    rule=condition.rule,
                    phases=condition.phases,
                    num_speculative_tokens=condition.requested_k(k_of_run),
                ),
            )
            for condition in asked.values()
        ]

    if o.replay_drafter is not None:
        await speed.measure(modes(MOST_BY_AUTO), items, 1)
    samples = await speed.measure(modes(o.num_speculative_tokens), items, o.repeats + 1)
    check_reached(samples[-1].repeat)  # repeat 0 does not count
    return samples


def report(samples: Sequence[Sample]) -> list[PairReport]:
    """Summarize the modes, plain decoding first."""
    before = {(s.mode, s.prompt): s.token_ids for s in samples if s.repeat == 0}
    modes = {
        name: [s for s in of if s.repeat > 0]
        for name, of in grouped(samples, lambda s: s.mode).items()
    }
    names = sorted(modes, key=lambda name: (name != PLAIN, name))
    return [_report(name, modes[name], modes[PLAIN], before) for name in names]


def _total(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Return sums over the prompts, of medians of the repeats for times, of means for counts."""
    of: dict[str, Callable[[list[float]], float]] = {
        **dict.fromkeys(("seconds", "target_ns", "draft_ns"), statistics.median),
        **dict.fromkeys(("tokens", "rounds", "drafted"), statistics.mean),
    }
    prompts = grouped(samples, lambda s: s.prompt).values()
    return {
        name: sum(middle([getattr(s, name) for s in prompt]) for prompt in prompts)
        for name, middle in of.items()
    }


def _rates(samples: Sequence[Sample]) -> dict[int, float]:
    """Return the median tokens per second of each prompt."""
    prompts = grouped(samples, lambda s: s.prompt)
    return {p: statistics.median(s.tokens / s.seconds for s in of) for p, of in prompts.items()}


def _report(
    name: str,
    samples: Sequence[Sample],
    plain_samples: Sequence[Sample],
    before: Mapping[tuple[str, int], Sequence[int]],
) -> PairReport:
    total, plain = _total(samples), _total(plain_samples)
    all_rounds, tokens = sum(s.rounds for s in samples), sum(s.tokens for s in samples)
    plain_step = plain["target_ns"] / plain["tokens"]
    verify_step = total["target_ns"] / total["rounds"]
    draft_step = total["draft_ns"] / total["drafted"] if total["drafted"] else None
    per_round = total["tokens"] / total["rounds"]
    speedup = (total["tokens"] / total["seconds"]) / (plain["tokens"] / plain["seconds"])
    bound = per_round * plain_step / verify_step
    rates, plain_rates = _rates(samples), _rates(plain_samples)
    ratios = {prompt: rate / plain_rates[prompt] for prompt, rate in rates.items()}
    worst_speedup, worst_prompt = min((ratio, prompt) for prompt, ratio in ratios.items())
    in_turn = per_round * plain_step / (verify_step + total["draft_ns"] / total["rounds"])
    return PairReport(
        mode=name,
        tokens_per_second=total["tokens"] / total["seconds"],
        tokens_per_round=per_round,
        acceptance_rate=sum(s.accepted for s in samples) / max(1, sum(s.drafted for s in samples)),
        loose_share=sum(s.loose for s in samples) / tokens,
        plain_step_ms=plain_step / 1e6,
        verify_step_ms=verify_step / 1e6,
        draft_step_ms=draft_step / 1e6 if draft_step else None,
        cost_ratio=verify_step / draft_step if draft_step else None,
        speedup=speedup,
        bound=bound,
        share=speedup / bound,
        bound_in_turn=in_turn,
        share_in_turn=speedup / in_turn,
        bytes_per_round=sum(s.round_bytes for s in samples) / all_rounds,
        distribution_bytes_per_round=sum(s.distribution_bytes for s in samples) / all_rounds,
        judge_ms=sum(s.judge_ns for s in samples) / all_rounds / 1e6,
        round_ms=1e3 * total["seconds"] / total["rounds"],
        worst_speedup=worst_speedup,
        worst_prompt=worst_prompt,
        same=sum(s.token_ids == before[name, s.prompt] for s in samples),
        same_as_plain=sum(s.token_ids == before[PLAIN, s.prompt] for s in samples),
        generations=len(samples),
    )


_COLUMNS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", "{.tokens_per_second:.1f}"),
    ("tok/round", "{.tokens_per_round:.2f}"),
    ("plain", "{.plain_step_ms:.2f} ms"),
    ("verify", "{.verify_step_ms:.2f} ms"),
    ("verify/draft", "{.cost_ratio:.1f}"),
    ("x plain", "{.speedup:.2f}"),
    ("slowest", "{0.worst_speedup:.2f} #{0.worst_prompt}"),
    ("bound", "{.bound:.2f}"),
    ("share", "{.share:.0%}"),
    ("in turn", "{.share_in_turn:.0%}"),
    ("loose", "{.loose_share:.1%}"),
    ("B/round", "{.bytes_per_round:,.0f}"),
    ("judge", "{.judge_ms:.2f} ms"),
    ("same", "{0.same}/{0.generations}"),
    ("as plain", "{0.same_as_plain}/{0.generations}"),
)
PAIR_NOTES = (
    "tok/round: mean tokens per round; plain, verify: the target's forward pass, per token of "
    "plain decoding and per round; x plain: rate relative to plain decoding's; slowest: that of "
    "the prompt where it is lowest, and its number; bound: tok/round x plain / verify; share: the "
    "part of it reached; in turn: the same for the bound that includes the draft model's time; "
    "B/round: bytes of a round's messages; judge: the rule and sampling, per round; same: texts "
    "equal to the uncounted run's; as plain: equal to plain decoding's in it"
)


def pair_table(reports: Sequence[PairReport], title: str) -> FittedTable:
    return record_table(_COLUMNS, reports, title)
