"""Judges lossy texts again: the recorded drafts, a fresh target, the same function.

The target, its slots and `judge` run in this process and have seen nothing of the run. From a
generation's records only the drafts and limits are taken; tokens, windows and text follow from the
new verdicts, and must equal the old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from transformers.utils.logging import disable_progress_bar

from flyspec.bundled import TARGET
from flyspec.client import Generation, RoundRecord
from flyspec.config import VerifySettings
from flyspec.engine.loading import load_model
from flyspec.engine.native.choice import choose_model
from flyspec.prefix import TokenSequence
from flyspec.tokenizer import Tokenizer
from flyspec.values.rounds import (
    Decision,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Origin
from loadtest.chaos.work import Request
from orchestrator.generation.output import Output
from orchestrator.generation.window import (
    Checked,
    Event,
    Extend,
    NothingDrafted,
    RollBack,
    WindowState,
    step,
)
from verify_service.engine import VerifyEngine
from verify_service.sessions import TargetSession

CONCURRENCY = 16
TOLERANCE_NATS = 1e-4


class Replay:
    """A fresh target. `with Replay(dtype) as replay: await replay.check_all(requests)`."""

    def __init__(self, dtype: str) -> None:
        disable_progress_bar()
        loaded = load_model(str(TARGET), "auto", dtype, 0)
        # What the service has, so that its logits have the same bits.
        settings = VerifySettings(model=str(TARGET), max_sessions=CONCURRENCY)
        model = choose_model(loaded, settings, settings.batch_invariant)
        model.warm_up()
        self._engine = VerifyEngine(model, loaded.tokenizer, max_queue=2 * CONCURRENCY)
        self._tokenizer = Tokenizer(loaded.tokenizer)

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    async def check_all(self, requests: Sequence[Request]) -> dict[int, str]:
        """Return differences by the request's number, without requests that turn out the same."""
        gate = asyncio.Semaphore(CONCURRENCY)
        found: dict[int, str] = {}

        async def one(request: Request) -> None:
            async with gate:
                if problem := await self.check(request):
                    found[request.number] = problem

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(one(request))
        return found

    async def check(self, request: Request) -> str:
        """What differs when the generation is judged again; empty if nothing does."""
        generation, options = request.generation, request.options
        assert generation is not None
        started = generation.started
        prompt = list(started.prompt_token_ids)
        max_tokens = started.max_tokens
        session = self._engine.open(
            VerifyOpen(prompt, len(prompt), started.rule, options.sampling, started.seed)
        )
        try:
            return await _Retold(
                self._engine,
                session,
                TokenSequence(prompt),
                WindowState(len(prompt), len(prompt) + max_tokens),
                Output(self._tokenizer, max_tokens, options.stop, options.ignore_eos),
            ).compare(generation)
        finally:
            self._engine.close(session)


class _Retold:
    """A generation as it turns out this time."""

    def __init__(
        self,
        engine: VerifyEngine,
        session: TargetSession,
        sequence: TokenSequence,
        state: WindowState,
        output: Output,
    ) -> None:
        self._engine, self._session = engine, session
        self._sequence, self._state, self._output = sequence, state, output
        self._synced = len(sequence)
        self._token_ids: list[int] = []
        self._text = ""
        self._round_id = 0

    async def compare(self, generation: Generation) -> str:
        """Return the first difference; empty if there is none."""
        for number, record in enumerate(generation.rounds, 1):
            if problem := await self._round(record):
                return f"round {number} of {len(generation.rounds)}: {problem}"
        if self._token_ids != generation.token_ids:
            return f"tokens {self._token_ids[-8:]} instead of {generation.token_ids[-8:]}"
        if self._text != generation.text:
            return f"the text {self._text[-40:]!r} instead of {generation.text[-40:]!r}"
        if self._output.finish_reason is not generation.completion.finish_reason:
            return f"it ends by {self._output.finish_reason}"
        return ""

    async def _round(self, record: RoundRecord) -> str:
        if record.start_length != len(self._sequence):
            return f"begins at {record.start_length} instead of {len(self._sequence)}"
        event: Event
        if self._state.window and not record.draft_token_ids:
            event = NothingDrafted()
            window = self._state.window
            if (record.keep_length, record.next_token_id) != window[:2]:
                return f"goes back to {record.keep_length}, {record.next_token_id}: not {window}"
        else:
            if not _same_window(record.open_window, self._state.window):
                return f"window {record.open_window} instead of {self._state.window}"
            if not record.draft_token_ids:  # several tokens of plain decoding
                for _ in range(record.keep_length - len(self._sequence)):
                    self._take(Checked(await self._judge(record)))
            verdict = await self._judge(record)
            if problem := _difference(record, verdict):
                return problem
            origins = [Origin.EXACT_MODEL] * len(record.draft_token_ids)
            event = Checked(verdict, record.draft_token_ids, origins)
        self._take(event)
        if record.committed_length != self._state.committed_length:
            return (
                f"{record.committed_length} tokens are final instead of "
                f"{self._state.committed_length}"
            )
        return ""

    def _take(self, event: Event) -> None:
        self._state, commands = step(self._state, event)
        for command in commands:
            if isinstance(command, Extend):
                self._sequence.extend(command.token_ids)
            elif isinstance(command, RollBack):
                self._sequence.keep(command.length)
                self._synced = min(self._synced, command.length)
                self._sequence.extend([command.token_id])
        update = self._output.apply(commands)
        self._token_ids += [token.token_id for token in update.tokens]
        self._text += "".join(update.texts)

    async def _judge(self, record: RoundRecord) -> Verdict:
        self._round_id += 1
        round_ = VerifyRound(
            round_id=self._round_id,
            keep_length=self._synced,
            append_token_ids=self._sequence.tokens[self._synced :],
            draft_token_ids=record.draft_token_ids,
            prefix_hash=self._sequence.hash,
            budget=record.budget,
            exact_until_position=record.exact_until_position,
            open_window=self._state.window,
            num_speculative_tokens=record.num_speculative_tokens,
        )
        answer = await self._engine.submit(self._session, round_).get()
        if isinstance(answer, Exception):
            raise answer
        self._synced = answer.keep_length + 1
        return answer


def _difference(record: RoundRecord, verdict: Verdict) -> str:
    """How a verdict differs from the recorded one; empty if it does not."""
    then, now = (
        (record.keep_length, record.next_token_id),
        (verdict.keep_length, verdict.next_token_id),
    )
    if then != now:
        return f"kept {then[0]} and took {then[1]}, now {now[0]} and {now[1]}"
    if len(record.decisions) != len(verdict.decisions):
        return f"{len(record.decisions)} decisions, now {len(verdict.decisions)}"
    for index, (one, other) in enumerate(zip(record.decisions, verdict.decisions, strict=True)):
        if not _same_decision(one, other):
            return f"draft {index}: {one}, now {other}"
    return ""


def _same_decision(one: Decision, other: Decision) -> bool:
    """Whether two decisions are the same; `one` came over the wire."""
    if one.outcome is not other.outcome:
        return False
    if one.outcome in (Outcome.EXACT, Outcome.NOT_REACHED):
        return True
    near = one.gap_nats is None or abs(one.gap_nats - (other.gap_nats or 0.0)) <= TOLERANCE_NATS
    return one.target_token_id == other.target_token_id and near


def _same_window(one: OpenWindow | None, other: OpenWindow | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[:3] == other[:3] and abs(one.gap_nats - other.gap_nats) <= TOLERANCE_NATS
