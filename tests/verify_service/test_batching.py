"""Continuous batching: sessions are told the same as alone; the queue; who moves under overload."""

import asyncio
import collections
import random
import statistics
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from flyspec.engine.distributions import encode
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ModelFailureError, ResourceExhaustedError
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule, WindowScope
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import Budget, Outcome, VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from tests.tiny import CONTEXT_LENGTH, HIDDEN_SIZE, VOCAB_SIZE
from tests.verify_service.sessions import EXACT, answers, opening
from tests.waiting import until
from verify_service.engine import VerifyEngine

EOS = 1
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

    def open_gate(self):
        """Let every step run; a subclass may hold some back."""

    def forward(self, steps):
        self.clashes += len(steps) - len({step.slot for step in steps})
        self.batches.append(len(steps))
        self.pieces += sum(step.num_logits == 0 for step in steps)
        self.copies += len(self.cache.pending_copies)
        return super().forward(steps)


@asynccontextmanager
async def running(target_dir, num_slots, budget=None, runner_class=CountingRunner, max_queue=1024):
    """An engine over its own target; yields it and its runner."""
    loaded = load_model(target_dir, "cpu", "float64")
    runner = runner_class(loaded, num_slots)
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


def _exact(verdict):
    """The part that must be identical."""
    return replace(
        verdict,
        timings=None,
        decisions=tuple((d.outcome, d.target_token_id) for d in verdict.decisions),
        open_window=verdict.open_window and verdict.open_window[:3],
        logprobs=tuple(entry.top_token_ids for entry in verdict.logprobs),
    )


def _numbers(verdict):
    """The numbers whose last digits forwards of another shape may change."""

    def of(entry):
        return [] if entry is None else [entry.logprob, *entry.top_logprobs]

    numbers = []
    for _, _, *rest in verdict.decisions:
        numbers += [-1.0 if value is None else value for value in rest]
    for entry in verdict.logprobs:
        numbers += of(entry)
    if verdict.open_window is not None:
        numbers += [verdict.open_window.gap_nats, *of(verdict.open_window.target_logprobs)]
    return numbers


class Member:
    """A session with random behaviour: any K and drafts, cuts, leaving and returning.

    `actions` are its rounds with their answers, and the sequences with which it came back.
    """

    def __init__(self, number, longest_output):
        self.rng = rng = random.Random(number)
        rule, sampling = RULES[number % len(RULES)], rng.choice(SAMPLINGS)
        prefix = rng.choice(_PREFIXES)
        prompt = prefix + rng.choices(range(3, VOCAB_SIZE), k=rng.randint(0, 150 - len(prefix)))
        logprobs = rng.choice([None, None, 0, 3])
        self.open = VerifyOpen(prompt, len(prompt), rule, sampling, number, logprobs)
        self.sequence = TokenSequence(prompt)
        self.end = min(len(prompt) + rng.randint(8, longest_output), CONTEXT_LENGTH - 20)
        self.quality = rng.choice([0.3, 0.7, 0.9, 1.0])
        self.exact_until = len(prompt) + rng.choice([0, 0, 5])
        self.max_loose = rng.choice([None, None, 6])
        self.window, self.actions = None, []
        self.loose = self.rollbacks = self.returns = 0

    async def live(self, engine, greedy):
        """Run from the first round to the last, alone; `greedy` continues a text."""
        rng, session = self.rng, engine.open(self.open)
        while len(self.sequence) < self.end and self.sequence.tokens[-1] != EOS:
            if rng.random() < 0.1:
                self.actions.append(self.sequence.tokens[:])
                self.returns += 1
            round_, distributions = self._round(greedy)
            verdicts = await answers(engine, session, round_, distributions)
            self.actions.append((round_, distributions, verdicts))
            for verdict in verdicts:
                self._apply(verdict, round_.draft_token_ids)
        engine.close(session)

    async def repeat(self, engine):
        """Do the same in company; every answer must be the same."""
        session = engine.open(self.open)
        for action in self.actions:
            if isinstance(action, list):
                # Leaves, perhaps in the middle of a round, and comes back with all it has.
                if self.rng.random() < 0.5:
                    engine.submit(session, VerifyRound(0, len(action), [], [7, 8, 9]))
                    await asyncio.sleep(self.rng.choice([0, 0.001, 0.01]))
                engine.close(session)
                session = engine.open(replace(self.open, token_ids=action))
                continue
            round_, distributions, told = action
            found = await answers(engine, session, round_, distributions)
            assert [_exact(v) for v in found] == [_exact(v) for v in told], self.open.rule
            for one, other in zip(found, told, strict=True):
                assert _numbers(one) == pytest.approx(_numbers(other), rel=1e-6, abs=1e-8)
        engine.close(session)

    def _round(self, greedy):
        rng, sequence = self.rng, self.sequence
        keep, append = len(sequence), []
        if self.window is None and rng.random() < 0.1:
            keep = rng.randint(max(self.open.prompt_length, keep - 6), keep)
            append = rng.choices(range(3, VOCAB_SIZE), k=rng.randint(0, 2))
            sequence.keep(keep)
            sequence.extend(append)
        drafts = []
        if rng.random() < 0.8:  # the target's own continuation with some errors
            own = greedy(sequence.tokens, rng.choice([1, 2, 4, 6, 9, 15]))
            drafts = [t if rng.random() < self.quality else rng.randrange(3, 400) for t in own]
        loose_left = None if self.max_loose is None else max(0, self.max_loose - self.loose)
        round_ = VerifyRound(
            len(self.actions) + 1, keep, append, drafts, sequence.hash, rng.randint(1, 5),
            Budget(loose_left), self.exact_until, self.window,
        )  # fmt: skip
        return round_, self._distributions(drafts)

    def _apply(self, verdict, drafts):
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

    def _distributions(self, drafts):
        open_ = self.open
        spec = distribution_spec(resolve_rule(open_.rule), open_.sampling)
        if spec is None or not drafts:
            return []
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        logits = torch.randn(len(drafts), VOCAB_SIZE, generator=generator, dtype=torch.float64)
        logits[range(len(drafts)), drafts] += 3.0  # a drafter proposes what it finds likely
        return encode(logits, spec)


class UnhurriedRunner(CountingRunner):
    """Waits a moment before each step, in which others come."""

    def forward(self, steps):
        time.sleep(0.005)
        return super().forward(steps)


async def check_crowd(target_dir, greedy, members, concurrent):
    """Run each session alone, then all of them, `concurrent` at once."""
    async with running(target_dir, 1) as (engine, runner):
        runner.cache.reuse = False
        for member in members:
            await member.live(engine, greedy)
        assert set(runner.batches) == {1}
        assert not runner.pieces
    room = asyncio.Semaphore(concurrent)

    async def repeat(member):
        async with room:
            await member.repeat(engine)

    budget = StepBudget(max_tokens=480, prefill_chunk=48)
    slots = concurrent + 2
    async with running(target_dir, slots, budget, UnhurriedRunner) as (engine, runner):
        await asyncio.gather(*map(repeat, members))
        status = await no_sessions(engine, runner)
        assert max(runner.batches) > 4
        assert statistics.mean(runner.batches) > 1.5
        assert min(runner.pieces, runner.copies) > 0
    assert 0.1 < status.prefix_cache_hits / status.prefix_cache_queries < 1
    for name in ("rollbacks", "loose", "returns"):
        assert sum(getattr(member, name) for member in members) > 0


async def test_sessions_of_every_rule_are_told_what_each_is_told_alone(target_dir, greedy):
    members = [Member(i, longest_output=16) for i in range(len(RULES) + 2)]
    await check_crowd(target_dir, greedy, members, 20)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
async def test_hundreds_of_sessions_are_told_what_each_is_told_alone(target_dir, greedy, seed):
    members = [Member(10_000 * (seed + 1) + i, longest_output=80) for i in range(192)]
    await check_crowd(target_dir, greedy, members, 64)


def some_tokens(count, seed):
    return [0, *random.Random(seed).choices(range(3, 400), k=count - 1)]


class GatedRunner(CountingRunner):
    """Runs a step when the gate permits, and records it: how many tokens of which slot."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate, self.entered = threading.Semaphore(0), 0
        self.ran = []

    def forward(self, steps):
        self.entered += 1
        self.gate.acquire()
        self.ran.append({step.slot: len(step.token_ids) for step in steps})
        return super().forward(steps)

    def open_gate(self):
        self.gate.release(100_000)

    async def at_gate(self, step):
        """Wait until the engine's thread is about to run step `step`, from 1."""
        await until(lambda: self.entered >= step)


@pytest.mark.parametrize("drafts", [[5, 6], []], ids=["drafts", "plain"])
async def test_logits_that_are_not_finite_are_no_verdict(target_dir, drafts):
    async with running(target_dir, 4) as (engine, runner):
        weights = runner.model.model.norm.weight
        well = weights.detach().clone()
        weights.data.fill_(float("nan"))
        session, round_ = engine.open(opening(some_tokens(40, 1))), VerifyRound(1, 40, [], drafts)
        with pytest.raises(ModelFailureError, match="the logits are not finite"):
            await answers(engine, session, round_)
        assert runner.cache.held(session.slot) == [], "nobody builds on that"
        assert engine.failures.num_total == 1
        weights.data.copy_(well)
        assert await answers(engine, session, replace(round_, round_id=2))
        assert not engine.failures.lost.done()


async def test_the_queue_is_bounded_and_says_what_to_do(target_dir):
    async with running(target_dir, 8, None, GatedRunner, max_queue=4) as (engine, runner):
        sessions = [engine.open(opening(some_tokens(9, i))) for i in range(6)]
        round_ = VerifyRound(1, 9, [], [5])
        waiting = [engine.submit(sessions[0], round_)]
        await runner.at_gate(1)
        waiting += [engine.submit(session, round_) for session in sessions[1:5]]
        with pytest.raises(ResourceExhaustedError, match=r"4 rounds are waiting.*--max-queue"):
            engine.submit(sessions[5], round_)
        runner.open_gate()
        for inbox in waiting:
            assert (await asyncio.wait_for(inbox.get(), 120)).last
        assert len(await answers(engine, sessions[5], round_)) == 1
        for session in sessions:
            engine.close(session)
        await no_sessions(engine, runner)


async def test_under_overload_everybody_moves_and_a_long_prompt_too(target_dir):
    budget = StepBudget(max_tokens=128, prefill_chunk=16)
    async with running(target_dir, 40, budget, GatedRunner) as (engine, runner):
        counts, enough = collections.Counter(), asyncio.Event()

        async def hurry(number):
            tokens = some_tokens(9, number)
            session, length = engine.open(opening(tokens)), len(tokens)
            while not enough.is_set():
                drafts = [5] * 9
                (verdict,) = await answers(engine, session, VerifyRound(1, length, [], drafts))
                length = min(verdict.keep_length + 1, 200)
                counts[number] += 1
            engine.close(session)

        runner.open_gate()
        work = [asyncio.create_task(hurry(i)) for i in range(32)]
        await until(lambda: len(counts) == 32)
        prompt = engine.open(opening(some_tokens(200, 99)))
        await answers(engine, prompt, VerifyRound(1, 200, [], []))
        await until(lambda: sum(counts.values()) >= 640)
        enough.set()
        await asyncio.gather(*work)
        pieces = [i for i, ran in enumerate(runner.ran) if prompt.slot in ran]
        engine.close(prompt)
        await no_sessions(engine, runner)
    assert max(sum(ran.values()) for ran in runner.ran) <= budget.max_tokens
    # The prompt is in every step from its first to its last, and no step has more than a chunk.
    assert pieces == list(range(pieces[0], pieces[0] + len(pieces)))
    assert [runner.ran[i][prompt.slot] for i in pieces] == [16] * 12 + [8]
    assert max(counts.values()) <= 2 * min(counts.values())
