"""Sessions of the verify service: a sequence, its slot, and how much of it the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flyspec.engine.runner import Step
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.prefix import TokenSequence
from flyspec.types import ModelInfo, Rule, SamplingParams, Verdict, VerifyRound


def check_token_ids(name: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    """Refuse ids that the model does not have."""
    if token_ids and max(token_ids) >= info.vocab_size:
        raise InvalidArgumentError(
            f"{name}: token id {max(token_ids)} is out of range; "
            f"{info.name} has ids 0 to {info.vocab_size - 1}"
        )


@dataclass(slots=True, eq=False)
class Session:
    """One client's sequence. `cached` tokens of it have their keys and values in `slot`."""

    slot: int
    sequence: TokenSequence
    prompt_length: int
    rule: Rule
    sampling: SamplingParams
    seed: int
    info: ModelInfo
    cached: int = 0
    closed: bool = False

    def begin(self, round_: VerifyRound) -> None:
        """Set the sequence to what the round builds on.

        Raises `PrefixMismatchError` when that is not held, `InvalidArgumentError` for bad values.
        """
        held = len(self.sequence)
        if round_.keep_length > held:
            raise PrefixMismatchError(
                f"round.keep_length is {round_.keep_length} but the session holds {held} tokens; "
                "open a session with the whole prefix"
            )
        check_token_ids("round.append_token_ids", round_.append_token_ids, self.info)
        check_token_ids("round.draft_token_ids", round_.draft_token_ids, self.info)
        self.sequence.keep(round_.keep_length)
        self.cached = min(self.cached, round_.keep_length)
        self.sequence.extend(round_.append_token_ids)
        length = len(self.sequence)
        if round_.prefix_hash not in (0, self.sequence.hash):
            raise PrefixMismatchError(
                f"round.prefix_hash differs: the session holds {length} other tokens; "
                "open a session with the whole prefix"
            )
        if length == 0:
            raise InvalidArgumentError("round: the sequence is empty; keep or append a token")
        # Every checked row needs a position: the last draft's row predicts one token more.
        if length + len(round_.draft_token_ids) > self.info.context_length:
            raise InvalidArgumentError(
                f"round: {length} tokens and {len(round_.draft_token_ids)} drafts exceed the "
                f"model's context of {self.info.context_length}; send fewer drafts"
            )

    def step(self, draft_token_ids: Sequence[int]) -> Step:
        """The forward that this round needs: what is not cached yet, then the drafts.

        The last token is always run again, even when cached: its logits judge the first draft.
        """
        start = min(self.cached, len(self.sequence) - 1)
        return Step(
            slot=self.slot,
            start=start,
            token_ids=[*self.sequence.tokens[start:], *draft_token_ids],
            num_logits=len(draft_token_ids) + 1,
        )

    def apply(self, verdict: Verdict, draft_token_ids: Sequence[int]) -> int:
        """Append what the verdict lets stand; the length before its `next_token_id`."""
        self.sequence.extend(draft_token_ids[: verdict.num_accepted])
        self.cached = len(self.sequence)
        self.sequence.extend([verdict.next_token_id])
        return self.cached
