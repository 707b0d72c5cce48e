"""How many of the target's own greedy tokens a head or a draft model guesses, without services.

The target's text is what `exact` emits whatever is drafted, so the rounds of every K follow from
the drafts after each of its tokens: a round emits the drafted tokens that are the text's, and the
one after them. Drafts of K tokens begin those of more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.model import Draw, Step
from flyspec.prefix import num_same
from flyspec.values.tokens import SamplingParams
from flyspec_lab.local_model import LocalModel

_GREEDY = SamplingParams()
Accepted = list[int]
"""For each of a text's output tokens but the last, how many drafts after it are right."""


@dataclass(frozen=True)
class TargetOutput:
    """A prompt's tokens with the target's greedy output, which begins at index `prompt`."""

    token_ids: list[int]
    prompt: int


def outputs(
    target: LocalModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[TargetOutput]:
    """Return the target's greedy output after each prompt."""
    found = target.continued(prompts, [max_tokens] * len(prompts))
    return [
        TargetOutput([*p, *o], len(p)) for p, o in zip(prompts, found, strict=True) if len(o) > 1
    ]


def by_head(
    target: LocalModel, head: DraftHead, texts: Sequence[TargetOutput], most: int
) -> Iterator[Accepted]:
    """Yield how many of a head's drafts are right in each text."""
    for text in texts:
        slot = target.model.cache.acquire().slot
        tokens = text.token_ids
        step = Step(slot, 0, tokens[:-1], len(tokens) - 1, head.hidden_layers)
        hidden = [rows.clone() for rows in target.model.forward([step])[0].hidden]
        target.model.cache.release(slot)
        head.forget(0)
        accepted, at = [], 0
        for end in range(text.prompt, len(tokens) - 1):  # drafts follow the token at `end`
            rows = tuple(each[at:end] for each in hidden)
            wanted = min(most, head.max_tokens, len(tokens) - 1 - end)
            turn = HeadStep(0, at, rows, tokens[at + 1 : end + 1], wanted)
            (drafted,) = head.draft([turn])
            accepted.append(num_same(drafted.token_ids, tokens[end + 1 :]))
            at = end
        yield accepted


def by_model(draft: LocalModel, texts: Sequence[TargetOutput], most: int) -> Iterator[Accepted]:
    """Yield how many of a draft model's drafts are right in each text."""
    for text in texts:
        slot = draft.model.cache.acquire().slot
        tokens, at = text.token_ids, 0
        accepted = []
        for end in range(text.prompt, len(tokens) - 1):
            step = Step(slot, at, tokens[at : end + 1])
            wanted = min(most, len(tokens) - 1 - end)
            (drafted,) = draft.model.draw([Draw(step, _GREEDY, max_tokens=wanted)])
            accepted.append(num_same(drafted.token_ids, tokens[end + 1 :]))
            at = end
        draft.model.cache.release(slot)
        yield accepted


def tokens_per_round(
    found: Iterable[Accepted], k: Sequence[int], advance: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Return the mean tokens of a round, the target's own one included, for each K.

    A round drafts no more than what is left of its text.
    """
    rounds, emitted = dict.fromkeys(k, 0), dict.fromkeys(k, 0)
    for accepted in found:
        for most in k:
            at = 0
            while at < len(accepted):
                own = min(accepted[at], most)
                # The text's last token may be a draft, and then no other follows it.
                emitted[most] += min(own + 1, len(accepted) - at)
                rounds[most] += 1
                at += own + 1
        advance()
    return tuple(emitted[most] / max(rounds[most], 1) for most in k)
