"""What a message is refused for before it is read into our types, or as soon as it is.

A list in a message costs several times its bytes once it is read, so its length comes first. What
depends on the session's sequence is checked by `sessions`, in the engine's thread.
"""

from __future__ import annotations

from flyspec.config import VerifySettings
from flyspec.engine.distributions import check_received
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.rules import MAX_GUARDED_TOKENS
from flyspec.v1 import verify_pb2
from flyspec.validation import MAX_LOGIT_BIAS_TOKENS
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import DraftDistributions, VerifyRound
from flyspec.values.tokens import MAX_TOP_LOGPROBS, TokenDistribution


def check_lengths(
    message: verify_pb2.VerifyRequest, info: ModelInfo, settings: VerifySettings
) -> None:
    """Refuse lists that are longer than any that can be right."""
    context, limit = info.context_length, settings.max_speculative_tokens
    match message.WhichOneof("request"):
        case "open":
            o = message.open
            _check(
                "open.token_ids",
                len(o.token_ids),
                context,
                f"exceed the model's context of {context}; shorten the prompt",
            )
            _check("open.rule.guarded_token_ids", len(o.rule.guarded_token_ids), MAX_GUARDED_TOKENS)
            _check("open.sampling.logit_bias", len(o.sampling.logit_bias), MAX_LOGIT_BIAS_TOKENS)
        case "round":
            r = message.round
            _check(
                "round.append_token_ids",
                len(r.append_token_ids),
                context,
                f"exceed the model's context of {context}",
            )
            drafts = len(r.draft_token_ids)
            if drafts > limit:
                raise InvalidArgumentError(
                    f"round.draft_token_ids: {drafts} drafts, this service checks at most {limit}"
                )
            given = r.open_window.target_logprobs
            for name in ("top_token_ids", "top_logprobs"):
                size = len(getattr(given, name))
                _check(f"round.open_window.target_logprobs.{name}", size, MAX_TOP_LOGPROBS)
        case "distributions":
            q = message.distributions.distributions
            if not 1 <= len(q) <= limit:
                raise _distribution_count(len(q), limit)
            for index, distribution in enumerate(q):
                field = f"distributions[{index}].token_ids"
                _check(field, len(distribution.token_ids), info.vocab_size)


def _check(
    field: str, size: int, most: int, instead: str = "are too many; send at most {most}"
) -> None:
    if size > most:
        raise InvalidArgumentError(f"{field}: {size} tokens {instead.format(most=most)}")


def _distribution_count(count: int, limit: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"distributions: {count} before one round; send between 1 and {limit}, one a drafted token"
    )


class RoundInbox:
    """What a stream has sent towards its next round: the drafts' distributions.

    Rounds come in the order of their ids; a round that came before, or late, is not run again.
    """

    def __init__(self, info: ModelInfo, settings: VerifySettings) -> None:
        self._info, self._settings = info, settings
        self._last_round_id = -1
        self._pieces: list[DraftDistributions] = []
        self._count = 0

    def add(self, piece: DraftDistributions) -> None:
        """Keep a piece for the round to come. Raises `InvalidArgumentError`."""
        self._count += len(piece.distributions)
        if self._count > self._settings.max_speculative_tokens:
            raise _distribution_count(self._count, self._settings.max_speculative_tokens)
        check_received(piece.distributions, self._info.vocab_size)
        self._pieces.append(piece)

    def take(self, round_: VerifyRound) -> list[TokenDistribution]:
        """The distributions of this round's drafts, one each or none.

        Raises `InvalidArgumentError` for a round that is too long or whose distributions are not
        its own, `PrefixMismatchError` for one that comes out of order.
        """
        if round_.round_id <= self._last_round_id:
            raise PrefixMismatchError(
                f"round.round_id is {round_.round_id} after {self._last_round_id}: rounds come "
                "once and in order; open a session with the whole prefix"
            )
        self._last_round_id = round_.round_id
        if round_.max_plain_tokens > self._settings.max_plain_tokens:
            raise InvalidArgumentError(
                f"round.max_plain_tokens must be at most {self._settings.max_plain_tokens}, "
                f"got {round_.max_plain_tokens}"
            )
        drafts = len(round_.draft_token_ids)
        if self._count not in (0, drafts):
            raise InvalidArgumentError(
                f"distributions: {self._count} for {drafts} drafted tokens; send one each"
            )
        first = round_.keep_length + len(round_.append_token_ids)
        found: list[TokenDistribution] = []
        for piece in self._pieces:
            if (piece.round_id, piece.first_position) != (round_.round_id, first):
                raise InvalidArgumentError(
                    f"distributions: of round {piece.round_id} from position "
                    f"{piece.first_position} on, but what follows is round {round_.round_id} at "
                    f"position {first}"
                )
            first += len(piece.distributions)
            found += piece.distributions
        self._pieces, self._count = [], 0
        return found
