"""Sessions in a crowd, their answers there, and their answers when alone.

A member drafts by asking a scout, a session of the same engine that decodes plainly from where the
member is, and then spoils some of the tokens. So there are two sorts of sessions, long ones and a
new one for each draft, and all of them are compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from flyspec.engine.distributions import encode
from flyspec.engine.loading import load_model
from flyspec.engine.model import Rows, Step
from flyspec.engine.runner import ModelRunner
from flyspec.engine.scheduler import StepBudget
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule, WindowScope
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import (
    Budget,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import SamplingParams, TokenDistribution, TokenLogprobs
from tests.autojudges import random_judge
from tests.tiny import CONTEXT_LENGTH, HIDDEN_SIZE, VOCAB_SIZE
from tests.verify_service.sessions import answers
from tests.waiting import until
from verify_service.engine import VerifyEngine

EOS = 1
EXACT = Rule("exact")
ACROSS = WindowScope.ACROSS_ROUNDS
# The tiny target is unsure of everything: thresholds that let through some mismatches, not all.
RULES = [
    EXACT,
    Rule("fly", fly_window_size=1, fly_entropy_threshold=0.2),
    Rule("fly", fly_window_size=2, fly_entropy_threshold=0.1, window_scope=ACROSS),
    Rule("fly", fly_window_size=9, fly_entropy_threshold=0.1, window_scope=ACROSS),
    Rule("fly-paper", fly_window_size=1),
    Rule("fly-reference", fly_window_size=2, fly_entropy_threshold=0.1),
    Rule("margin", margin_threshold=4.0),
    Rule("margin", margin_threshold=8.0, fly_window_size=9),
    Rule("fly", fly_window_size=6, fly_entropy_threshold=0.1, window_scope=ACROSS),
    Rule("margin", margin_threshold=8.0, fly_window_size=7),
    Rule("fuzzy", divergence_threshold=0.6),
    Rule("fuzzy-reference", divergence_threshold=0.9),
    Rule("kl", divergence_threshold=0.6, fly_window_size=9, window_scope=ACROSS),
    Rule("rejection"),
    Rule("relaxed", relaxed_delta=1.0, fly_window_size=9, window_scope=ACROSS),
    Rule("mars", mars_ratio=0.6),
    Rule("ensemble", ensemble_weight=0.3),
    Rule("cactus", cactus_delta=1.0),
    Rule("typical", typical_epsilon=0.01),
    Rule("autojudge", judge_threshold=0.6),
    Rule("autojudge", fly_window_size=2, window_scope=ACROSS),
    Rule("random", random_acceptance=0.5),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7, top_p=0.9, top_k=50),
    SamplingParams(repetition_penalty=1.3, min_tokens=12, logit_bias=((EOS, 3.0), (9, 1.0))),
    SamplingParams(0.8, min_p=0.02, presence_penalty=0.6, frequency_penalty=0.5),
]
_PREFIXES = [[0, *random.Random(i).choices(range(3, VOCAB_SIZE), k=25 + 20 * i)] for i in range(4)]


class CountingRunner(ModelRunner):
    """Counts sequences per step, prompt chunks, copies between slots; two steps of one slot."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.pieces, self.copies, self.clashes = [], 0, 0, 0

    def open_gate(self) -> None:
        """Let every step run; a subclass may hold some back."""

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.clashes += len(steps) - len({step.slot for step in steps})
        self.batches.append(len(steps))
        self.pieces += sum(step.num_logits == 0 for step in steps)
        self.copies += len(self.cache.pending_copies)
        return super().forward(steps)


@asynccontextmanager
async def running(
    target_dir, num_slots, budget=None, runner_class=CountingRunner, max_queue=1024, **options
):
    """An engine over its own target; yields it and its runner."""
    loaded = load_model(target_dir, "cpu", "float64")
    runner = runner_class(loaded, num_slots, **options)
    engine = VerifyEngine(
        runner,
        loaded.tokenizer,
        max_queue,
        prepare=lambda: torch.set_num_threads(1),
        budget=budget or StepBudget(),
        autojudge=random_judge(HIDDEN_SIZE),
    )
    engine.start()
    try:
        yield engine, runner
    finally:
        runner.open_gate()
        await asyncio.to_thread(engine.stop)


async def no_sessions(engine, runner):
    """Wait until the engine's thread has closed everything; return its session status."""
    await until(lambda: runner.cache.num_free == runner.cache.num_slots)
    assert engine.sessions.active == 0
    assert not runner.clashes
    return engine.sessions


@dataclass
class Record:
    """A session with all its requests and answers."""

    open: VerifyOpen
    rounds: list[tuple[VerifyRound, Sequence[TokenDistribution], list[Verdict]]] = field(
        default_factory=list
    )

    async def ask(self, engine, session, round_, distributions=()) -> list[Verdict]:
        verdicts = await answers(engine, session, round_, distributions)
        self.rounds.append((round_, distributions, verdicts))
        return verdicts

    async def check(self, engine, fresh: bool = False) -> None:
        """Send the same to an engine that serves nothing else.

        `fresh`: each round of a session of its own, which nothing was ever taken back from.
        """
        session, tokens = engine.open(self.open), list(self.open.token_ids)
        for round_, distributions, told in self.rounds:
            tokens[round_.keep_length :] = round_.append_token_ids
            if fresh:
                engine.close(session)
                session = engine.open(replace(self.open, token_ids=tokens[:]))
                round_ = replace(round_, keep_length=len(tokens), append_token_ids=[])
            alone = await answers(engine, session, round_, distributions)
            for verdict in told:
                drafts = round_.draft_token_ids[: max(0, verdict.keep_length - len(tokens))]
                tokens[verdict.keep_length :] = []
                tokens += [*drafts, verdict.next_token_id]
            assert [_exact(v) for v in told] == [_exact(v) for v in alone], self.open.rule
            for one, other in zip(told, alone, strict=True):
                assert _numbers(one) == pytest.approx(_numbers(other), rel=1e-6, abs=1e-8)
        engine.close(session)


def _exact(verdict: Verdict):
    """The part that must be identical."""
    return replace(
        verdict,
        timings=None,
        decisions=tuple((d.outcome, d.target_token_id) for d in verdict.decisions),
        open_window=verdict.open_window and verdict.open_window[:3],
        logprobs=tuple(entry.top_token_ids for entry in verdict.logprobs),
    )


def _numbers(verdict: Verdict) -> list[float]:
    """The numbers whose last digits forwards of another shape may change."""

    def of(entry: TokenLogprobs | None) -> list[float]:
        return [] if entry is None else [entry.logprob, *entry.top_logprobs]

    numbers: list[float] = []
    for _, _, *rest in verdict.decisions:
        numbers += [-1.0 if value is None else value for value in rest]
    for entry in verdict.logprobs:
        numbers += of(entry)
    if verdict.open_window is not None:
        numbers += [verdict.open_window.gap_nats, *of(verdict.open_window.target_logprobs)]
    return numbers


def make_prompt(rng: random.Random, longest: int) -> list[int]:
    """Some tokens after one of a few prefixes."""
    prefix = rng.choice(_PREFIXES)
    return prefix + rng.choices(range(3, VOCAB_SIZE), k=rng.randint(0, longest - len(prefix)))


class Member:
    """A session with random behaviour: any K and drafts, cuts, leaving and returning."""

    def __init__(self, number: int, longest_output: int) -> None:
        self.rng = rng = random.Random(number)
        rule, sampling = RULES[number % len(RULES)], rng.choice(SAMPLINGS)
        prompt = make_prompt(rng, 150)
        logprobs = rng.choice([None, None, 0, 3])
        self.record = Record(VerifyOpen(prompt, len(prompt), rule, sampling, number, logprobs))
        self.sequence = TokenSequence(prompt)
        self.end = min(len(prompt) + rng.randint(8, longest_output), CONTEXT_LENGTH - 20)
        self.quality = rng.choice([0.3, 0.7, 0.9, 1.0])
        self.exact_until = len(prompt) + rng.choice([0, 0, 5])
        self.max_loose = rng.choice([None, None, 6])
        self.scouts: list[Record] = []
        self.window: OpenWindow | None = None
        self.loose = self.rollbacks = self.returns = 0

    async def live(self, engine, scouting: asyncio.Semaphore) -> None:
        """Run from the first round to the last; the session is closed whatever happens."""
        rng, sequence = self.rng, self.sequence
        session = engine.open(self.record.open)
        try:
            while len(sequence) < self.end and sequence.tokens[-1] != EOS:
                if rng.random() < 0.1:
                    # Leaves, perhaps in the middle of a round, and comes back with all it has.
                    if rng.random() < 0.5:
                        engine.submit(session, VerifyRound(0, len(sequence), [], [7, 8, 9]))
                        await asyncio.sleep(rng.choice([0, 0.001, 0.01]))
                    engine.close(session)
                    await asyncio.sleep(rng.choice([0, 0.02]))
                    session = None
                    session = engine.open(replace(self.record.open, token_ids=sequence.tokens[:]))
                    self.returns += 1
                await self._round(engine, session, scouting)
        finally:
            if session is not None:
                engine.close(session)

    async def _round(self, engine, session, scouting) -> None:
        rng, sequence, open_ = self.rng, self.sequence, self.record.open
        keep, append = len(sequence), []
        if self.window is None and rng.random() < 0.1:
            keep = rng.randint(max(open_.prompt_length, keep - 6), keep)
            append = rng.choices(range(3, VOCAB_SIZE), k=rng.randint(0, 2))
            sequence.keep(keep)
            sequence.extend(append)
        drafts, plain = [], rng.randint(1, 5)
        if rng.random() < 0.8:
            drafts = await self._drafts(engine, rng.choice([1, 2, 4, 6, 9, 15]), scouting)
        distributions = self._distributions(drafts)
        loose_left = None if self.max_loose is None else max(0, self.max_loose - self.loose)
        round_ = VerifyRound(
            len(self.record.rounds) + 1,
            keep,
            append,
            drafts,
            sequence.hash,
            plain,
            Budget(loose_left),
            self.exact_until,
            self.window,
        )
        for verdict in await self.record.ask(engine, session, round_, distributions):
            self._apply(verdict, drafts)

    def _apply(self, verdict: Verdict, drafts: list[int]) -> None:
        base = len(self.sequence)
        if verdict.keep_length < base:
            self.rollbacks += 1
            self.sequence.keep(verdict.keep_length)
        else:
            self.sequence.extend(drafts[: verdict.keep_length - base])
        self.sequence.extend([verdict.next_token_id])
        self.window = verdict.open_window
        loose = (Outcome.LOOSE, Outcome.PROVISIONAL)
        self.loose += sum(decision.outcome in loose for decision in verdict.decisions)

    async def _drafts(self, engine, count: int, scouting) -> list[int]:
        """The target's own continuation with some errors."""
        open_ = replace(
            self.record.open, token_ids=self.sequence.tokens[:], rule=EXACT, logprobs=None
        )
        scout = Record(open_)
        async with scouting:
            session = engine.open(open_)
            try:
                round_ = VerifyRound(1, len(self.sequence), [], [], max_plain_tokens=count)
                verdicts = await scout.ask(engine, session, round_)
            finally:
                engine.close(session)
        self.scouts.append(scout)
        return [
            v.next_token_id if self.rng.random() < self.quality else self.rng.randrange(3, 400)
            for v in verdicts
        ]

    def _distributions(self, drafts: list[int]) -> list[TokenDistribution]:
        open_ = self.record.open
        spec = distribution_spec(resolve_rule(open_.rule), open_.sampling)
        if spec is None or not drafts:
            return []
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        logits = torch.randn(len(drafts), VOCAB_SIZE, generator=generator, dtype=torch.float64)
        logits[range(len(drafts)), drafts] += 3.0  # a drafter proposes what it finds likely
        return encode(logits, spec)
