"""Limits on the lists in a message, and what a stream has sent for its next round.

Checks that depend on the session's sequence are in `sessions` and run in the engine's thread.
"""

from __future__ import annotations

from flyspec.config import VerifySettings
from flyspec.engine.distributions import check_received
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.rpc import Lengths
from flyspec.rules import MAX_GUARDED_TOKENS
from flyspec.validation import BIAS_LENGTH
from flyspec.values.admin import ModelInfo
from flyspec.values.phases import MAX_RULES
from flyspec.values.rounds import MAX_STOP_TOKEN_IDS, DraftDistributions, VerifyRound
from flyspec.values.tokens import MAX_TOP_LOGPROBS, TokenDistribution

RULE_LENGTHS: Lengths = {
    "guarded_token_ids": (MAX_GUARDED_TOKENS, f"tokens; send at most {MAX_GUARDED_TOKENS}"),
}


def length_limits(info: ModelInfo, settings: VerifySettings) -> dict[str, Lengths]:
    """Return the maximum lengths of a request's lists."""
    context, drafts = info.context_length, settings.max_speculative_tokens
    sequence = (context, f"tokens exceed the model's context of {context}; shorten the prompt")
    top = (MAX_TOP_LOGPROBS, f"tokens; send at most {MAX_TOP_LOGPROBS}")
    return {
        "open": {
            "token_ids": sequence,
            **{f"rule.{name}": limit for name, limit in RULE_LENGTHS.items()},
            "other_rules": (MAX_RULES - 1, f"rules; send at most {MAX_RULES - 1}"),
            "sampling.logit_bias": BIAS_LENGTH,
            "stop_token_ids": (MAX_STOP_TOKEN_IDS, f"tokens; send at most {MAX_STOP_TOKEN_IDS}"),
        },
        "round": {
            "append_token_ids": sequence,
            "draft_token_ids": (drafts, f"drafts; this service checks at most {drafts}"),
            "draft_parents": (drafts, f"entries; this service checks at most {drafts} drafts"),
            "rule_segments": (drafts + 1, f"segments; {drafts} drafts have at most as many"),
            "draft_survivals": (drafts, f"entries; this service checks at most {drafts} drafts"),
            "open_window.target_logprobs.top_token_ids": top,
            "open_window.target_logprobs.top_logprobs": top,
        },
        "distributions": {"distributions": (drafts, _one_a_draft(drafts))},
    }


def _one_a_draft(most: int) -> str:
    return f"for one round; send between 1 and {most}, one per drafted token"


class RoundInbox:
    """Data that a stream has sent for its next round: the drafts' distributions.

    Rounds arrive in the order of their ids; a repeated or late round is rejected.
    """

    def __init__(self, info: ModelInfo, settings: VerifySettings) -> None:
        self._info, self._settings = info, settings
        self._last_round_id = -1
        self._pieces: list[DraftDistributions] = []
        self._count = 0

    def add(self, piece: DraftDistributions) -> None:
        """Store a piece for the next round. Raises `InvalidArgumentError`."""
        self._count += len(piece.distributions)
        most = self._settings.max_speculative_tokens
        if not piece.distributions or self._count > most:
            raise InvalidArgumentError(f"distributions: {self._count} {_one_a_draft(most)}")
        check_received(piece.distributions, self._info.vocab_size)
        self._pieces.append(piece)

    def take(self, round_: VerifyRound) -> list[TokenDistribution]:
        """Return the distributions of this round's drafts, one per draft or none.

        Raises `InvalidArgumentError` for a round that is too long or has another round's
        distributions, `PrefixMismatchError` for one out of order.
        """
        if round_.round_id <= self._last_round_id:
            raise PrefixMismatchError(
                f"round.round_id is {round_.round_id} after {self._last_round_id}, but each round "
                "must arrive once and in order; open a new session with the whole prefix"
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
                f"distributions: {self._count} for {drafts} drafted tokens; send one per token"
            )
        first = round_.keep_length + len(round_.append_token_ids)
        found: list[TokenDistribution] = []
        for piece in self._pieces:
            if (piece.round_id, piece.first_position) != (round_.round_id, first):
                raise InvalidArgumentError(
                    f"distributions: sent for round {piece.round_id} from position "
                    f"{piece.first_position}, but they precede round {round_.round_id} at "
                    f"position {first}"
                )
            first += len(piece.distributions)
            found += piece.distributions
        self._pieces, self._count = [], 0
        return found
