"""The gRPC face of the verify service: reads messages, queues rounds, writes verdicts."""

from __future__ import annotations

from typing import Any

from flyspec import process, rpc, wire
from flyspec.config import VerifySettings
from flyspec.errors import InvalidArgumentError
from flyspec.types import (
    DraftDistributions,
    TokenDistribution,
    TokenizerBundle,
    VerifyOpen,
    VerifyRound,
    VerifyServiceInfo,
)
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.validation import BYTES_PER_LOG_PROB, RULE_PRESETS
from verify_service.engine import VerifyEngine
from verify_service.sessions import Session


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """`VerifyService` over an engine."""

    def __init__(
        self, engine: VerifyEngine, tokenizer: TokenizerBundle, settings: VerifySettings
    ) -> None:
        self._engine = engine
        self._tokenizer_messages = wire.tokenizer_to_protos(tokenizer)
        self._settings = settings

    @rpc.handler
    async def Describe(
        self, request: verify_pb2.VerifyServiceDescribeRequest, context: Any
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        """Answer with the model, the limits and the sessions open now."""
        return wire.verify_info_to_proto(
            VerifyServiceInfo(
                model=self._engine.info,
                sessions=self._engine.sessions,
                max_speculative_tokens=self._settings.max_speculative_tokens,
                max_plain_tokens=self._settings.max_plain_tokens,
                rules=tuple(RULE_PRESETS),
                process=process.describe(),
            )
        )

    @rpc.handler
    async def GetTokenizer(self, request: verify_pb2.GetTokenizerRequest, context: Any) -> None:
        """Stream the tokenizer."""
        for message in self._tokenizer_messages:
            await context.write(message)

    @rpc.handler
    async def Verify(self, requests: Any, context: Any) -> None:
        """One session: open, then rounds in order."""
        session = self._engine.open(await self._first(context))
        try:
            while (request := await self._next(context)) is not None:
                await self._answer(session, *request, context)
        finally:
            self._engine.close(session)

    async def _answer(
        self,
        session: Session,
        round_: VerifyRound,
        distributions: list[TokenDistribution],
        context: Any,
    ) -> None:
        """Queue a round and write its verdicts as they come."""
        answers = self._engine.submit(session, round_, distributions)
        while True:
            answer = await answers.get()
            if isinstance(answer, Exception):
                raise answer
            await context.write(wire.round_verdict_to_proto(answer))
            if answer.last:
                return

    async def _first(self, context: Any) -> VerifyOpen:
        message = await rpc.read(context, self._settings.idle_timeout_s)
        request = None if message is None else wire.verify_request_from_proto(message)
        if not isinstance(request, VerifyOpen):
            raise InvalidArgumentError("the first message of a stream must be `open`")
        return request

    async def _next(self, context: Any) -> tuple[VerifyRound, list[TokenDistribution]] | None:
        """The next round with its drafts' distributions; None when the client is done."""
        distributions: list[TokenDistribution] = []
        pieces: list[DraftDistributions] = []
        while True:
            message = await rpc.read(context, self._settings.idle_timeout_s)
            if message is None:
                return None
            request = wire.verify_request_from_proto(message)
            if isinstance(request, VerifyOpen):
                raise InvalidArgumentError("a stream is one session; open another stream instead")
            if isinstance(request, VerifyRound):
                self._check_round(request, len(distributions))
                first = request.keep_length + len(request.append_token_ids)
                for piece in pieces:
                    _check_piece(piece, request.round_id, first)
                    first += len(piece.distributions)
                return request, distributions
            pieces.append(request)
            distributions += request.distributions
            limit = self._settings.max_speculative_tokens
            if len(distributions) > limit or not request.distributions:
                raise InvalidArgumentError(
                    f"distributions: {len(distributions)} before one round; send between 1 and "
                    f"{limit}, one a drafted token"
                )
            _check_size(request, self._engine.info.vocab_size)

    def _check_round(self, round_: VerifyRound, num_distributions: int) -> None:
        """Refuse a round that is too long, or whose distributions do not fit it."""
        drafts, limit = len(round_.draft_token_ids), self._settings.max_speculative_tokens
        if drafts > limit:
            raise InvalidArgumentError(
                f"round.draft_token_ids: {drafts} drafts, this service checks at most {limit}"
            )
        if round_.max_plain_tokens > self._settings.max_plain_tokens:
            raise InvalidArgumentError(
                f"round.max_plain_tokens must be at most {self._settings.max_plain_tokens}, "
                f"got {round_.max_plain_tokens}"
            )
        if num_distributions not in (0, drafts):
            raise InvalidArgumentError(
                f"distributions: {num_distributions} for {drafts} drafted tokens; send one each"
            )


def _check_size(piece: DraftDistributions, vocab_size: int) -> None:
    """Refuse more than a vocabulary holds: a session keeps all until their round comes."""
    for distribution in piece.distributions:
        size = max(len(distribution.log_probs) // BYTES_PER_LOG_PROB, len(distribution.token_ids))
        if size > vocab_size:
            raise InvalidArgumentError(
                f"distributions: {size} tokens in one, the target has {vocab_size}; send one "
                "log-probability a token of its vocabulary, or list some of its tokens"
            )


def _check_piece(piece: DraftDistributions, round_id: int, first_position: int) -> None:
    """Refuse distributions of another round or of other positions."""
    if piece.round_id != round_id or piece.first_position != first_position:
        raise InvalidArgumentError(
            f"distributions: of round {piece.round_id} from position {piece.first_position} on, "
            f"but what follows is round {round_id} at position {first_position}"
        )
