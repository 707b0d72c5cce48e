"""Recomputes a whole generation from its history of proposals, token by token, by definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flyspec.values.tokens import Origin
from tests.orchestrator.world import EOS, World


@dataclass
class Replayed:
    """The result of a history of proposals."""

    tokens: list[int]
    origins: list[Origin] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)
    committed: int = 0
    num_rollbacks: int = 0
    rejections: list[tuple[bool, int, float]] = field(default_factory=list)
    """Of each whether it was in the last round, position and gap."""
    spans: list[list[int]] = field(default_factory=list)
    """Start, and drafts accepted, of every round with drafts."""

    def rejected(self, end: float = math.inf) -> list[float]:
        """Gaps of the rejected drafts, in the last round those before the output's end."""
        return [gap for last, position, gap in self.rejections if not last or position < end]

    def accepted(self, end: float = math.inf) -> list[int]:
        """Drafts accepted in each round before the output's end."""
        end = min(end, self.committed)
        return [int(max(0, min(count, end - start))) for start, count in self.spans]


def replay(world: World, plan, window_size: int, history) -> Replayed:
    """`history` has the drafts of every round; of a round without drafts, none."""
    prompt = plan.prompt_token_ids
    tokens, origins, gaps = list(prompt), [Origin.PLAIN] * len(prompt), [None] * len(prompt)
    result = Replayed(tokens)
    limit = len(prompt) + plan.limits.max_tokens
    # The open window: position, the target's own token, gap, matches so far, number of its round.
    window = None
    spans, is_last = result.spans, False

    def cut(length):
        del tokens[length:], origins[length:], gaps[length:]
        for span in spans:
            span[1] = max(0, min(span[1], length - span[0]))

    def put(token, origin, gap=None):
        tokens.append(token)
        origins.append(origin)
        gaps.append(gap)

    def fail(number):
        nonlocal window
        position, own, gap, _, opened = window
        if opened != number:
            result.num_rollbacks += 1
        result.rejections.append((is_last, position, gap))
        cut(position)
        put(own, Origin.CORRECTION)
        window = None

    def may_stand(token):
        allowed = plan.judging.allowed
        spent = [gap for gap in gaps if gap is not None]
        gap = world.gap(tokens, token)
        if allowed.loose_tokens is not None and len(spent) >= allowed.loose_tokens:
            return False
        if allowed.loose_cost_nats is not None and sum(spent) + gap > allowed.loose_cost_nats:
            return False
        return world.passes(tokens, token) and len(tokens) >= plan.judging.exact_until_position

    for number, drafts in enumerate(history):
        is_last = number == len(history) - 1
        if not drafts:
            if window is not None:
                fail(number)
            else:
                put(world.own(tokens), Origin.PLAIN)
            continue
        spans.append([len(tokens), 0])
        span = spans[-1]
        for token in drafts:
            own = world.own(tokens)
            if token == own:
                put(token, Origin.EXACT_MODEL)
                span[1] += 1
                if window is not None:
                    window[3] += 1
                    if window[3] == window_size:
                        window = None
                if token == EOS:
                    break
            elif window is not None:
                if window[4] != number:
                    result.rejections.append((is_last, len(tokens), world.gap(tokens, token)))
                fail(number)
                break
            elif may_stand(token):
                gap = world.gap(tokens, token)
                if window_size:
                    window = [len(tokens), own, gap, 0, number]
                put(token, Origin.LOOSE, gap)
                span[1] += 1
            else:
                result.rejections.append((is_last, len(tokens), world.gap(tokens, token)))
                put(own, Origin.CORRECTION)
                break
        if origins[-1] is not Origin.CORRECTION:
            own = world.own(tokens)
            if window is not None and EOS in (own, tokens[-1]):
                fail(number)
            else:
                put(own, Origin.BONUS)
        if window is not None and window[0] < limit <= len(tokens):
            fail(-1)
    result.origins, result.gaps = origins[len(prompt) :], gaps[len(prompt) :]
    result.committed = len(tokens) if window is None else window[0]
    return result
