"""The `VerifyService` servicer: reads messages, queues rounds, writes verdicts."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from flyspec import process, rpc, wire
from flyspec.config import VerifySettings
from flyspec.errors import InvalidArgumentError
from flyspec.rpc.malformed import REQUEST_TIMEOUT_S
from flyspec.rules.presets import RULE_PRESETS
from flyspec.self_drafting import following_round
from flyspec.telemetry import Telemetry
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.values.admin import TokenizerBundle, VerifyServiceInfo
from flyspec.values.phases import MAX_RULES
from flyspec.values.rounds import (
    MAX_STAGED_ROUNDS,
    DraftDistributions,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from verify_service.engine import VerifyEngine
from verify_service.sessions import TargetSession
from verify_service.staging import (
    RULE_LENGTHS,
    RoundInbox,
    StagedRounds,
    WaitingRound,
    length_limits,
)
from verify_service.telemetry import VerifyTelemetry


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Serves `VerifyService` from an engine."""

    def __init__(
        self,
        engine: VerifyEngine,
        tokenizer: TokenizerBundle,
        settings: VerifySettings,
        observer: VerifyTelemetry | None = None,
    ) -> None:
        self._engine = engine
        self._observer = observer or VerifyTelemetry(Telemetry("verify"))
        self._tokenizer_messages = wire.tokenizer_messages(tokenizer, tokenizer.tokenizer_json)
        self._settings = settings
        self._lengths = length_limits(engine.info, settings)

    @rpc.handler
    async def Describe(
        self, request: verify_pb2.VerifyServiceDescribeRequest, context: Any
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        judge = self._engine.judge_info
        info: verify_pb2.VerifyServiceDescribeResponse = wire.encode(
            VerifyServiceInfo(
                model=self._engine.info,
                sessions=self._engine.sessions_for(request.orchestrator_id),
                max_speculative_tokens=self._settings.max_speculative_tokens,
                max_plain_tokens=self._settings.max_plain_tokens,
                rules=tuple(n for n, p in RULE_PRESETS.items() if judge or not p.hidden_layers),
                process=process.describe(self._engine.step_running_ns),
                step_costs=self._engine.costs.measured,
                max_rules=MAX_RULES,
                judge=judge,
                heads=self._engine.heads.infos,
                max_staged_rounds=MAX_STAGED_ROUNDS,
                takes_trees=not self._engine.model.tree_refusal,
            )
        )
        return info

    @rpc.handler
    async def GetTokenizer(self, request: verify_pb2.GetTokenizerRequest, context: Any) -> None:
        for message in self._tokenizer_messages:
            await rpc.write(context, message, self._settings.idle_timeout_s)

    @rpc.handler
    async def Verify(self, requests: Any, context: Any) -> None:
        """Run one session: `open`, then rounds in order."""
        open_ = await self._first(context)
        session = await self._engine.open_in_turn(open_)
        inbox, staged = RoundInbox(self._engine.info, self._settings), StagedRounds()
        rounds = rpc.read_ahead(
            lambda: self._next(context, inbox, staged),
            self._settings.idle_timeout_s,
            partial(self._engine.interrupt, session),
        )
        try:
            if open_.waited_ms is not None:
                sessions = self._engine.sessions_for(open_.orchestrator_id)
                granted = Verdict(len(open_.token_ids), 0, last=False, sessions=sessions)
                await rpc.write(context, wire.encode(granted), self._settings.idle_timeout_s)
            async with aclosing(rounds):
                with self._observer.session(session):
                    async for waiting in rounds:
                        await self._answer(session, waiting, staged, context)
        finally:
            self._engine.close(session)

    async def _answer(
        self, session: TargetSession, waiting: WaitingRound, staged: StagedRounds, context: Any
    ) -> None:
        """Answer a round, and those that were staged for its last verdict and then for theirs.

        And those that its head goes on with, which the engine begins itself.
        """
        next_: WaitingRound | None = waiting
        answers = self._engine.submit(session, *waiting)
        while next_ is not None:
            round_, next_ = next_.round_, None
            with self._observer.round(session, round_) as verdicts:
                last = False
                while not last:
                    answer = await answers.get()
                    if isinstance(answer, Exception):
                        raise answer
                    verdicts.append(answer)
                    last = answer.last
                    if answer.started_staged_round_id:
                        next_ = WaitingRound(following_round(round_, answer), ())
                    elif last and (next_ := staged.after(answer)):
                        # It begins before this verdict is sent.
                        answers = self._engine.submit(session, *next_)
                        begun = next_.round_.round_id
                        answer = replace(answer, started_staged_round_id=begun)
                    message = wire.encode(answer)
                    await rpc.write(context, message, self._settings.idle_timeout_s)

    async def _first(self, context: Any) -> VerifyOpen:
        timeout_s = min(REQUEST_TIMEOUT_S, self._settings.idle_timeout_s)
        message = await rpc.read(context, timeout_s)
        request = None if message is None else self._request(message)
        if not isinstance(request, VerifyOpen):
            raise InvalidArgumentError("the first message of a stream must be `open`")
        return request

    async def _next(
        self, context: Any, inbox: RoundInbox, staged: StagedRounds
    ) -> WaitingRound | None:
        """Return the next round to begin, with its distributions; None when the client is done."""
        while (message := await rpc.receive(context)) is not None:
            match self._request(message):
                case VerifyRound() as round_:
                    waiting = WaitingRound(round_, inbox.take(round_))
                    if round_.staged_on is None:
                        staged.received(round_)
                        return waiting
                    if ready := staged.stage(waiting):
                        return ready
                case DraftDistributions() as piece:
                    inbox.add(piece)
                case VerifyOpen():
                    raise InvalidArgumentError(
                        "a stream carries one session; open another stream for another one"
                    )
        return None

    def _request(self, message: Any) -> VerifyOpen | VerifyRound | DraftDistributions:
        rpc.check_request_lengths(message, self._lengths)
        if message.HasField("open"):
            for index, rule in enumerate(message.open.other_rules):
                rpc.check_lengths(rule, RULE_LENGTHS, f"open.other_rules[{index}].")
        if message.HasField("distributions"):
            vocab_size = self._engine.info.vocab_size
            each = {"token_ids": (vocab_size, f"tokens; send at most {vocab_size}")}
            for index, distribution in enumerate(message.distributions.distributions):
                rpc.check_lengths(distribution, each, f"distributions[{index}].")
        request: VerifyOpen | VerifyRound | DraftDistributions = wire.unwrap(message)
        return request
