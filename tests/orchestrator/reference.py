"""Recomputes a whole generation from its history of proposals, token by token, by definition."""

from __future__ import annotations

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
    rejected: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def replay(world: World, plan, window_size: int, history) -> Replayed:
    """`history` has the drafts of every round; of a round without drafts, none."""
    prompt = plan.prompt_token_ids
    tokens, origins, gaps = list(prompt), [Origin.PLAIN] * len(prompt), [None] * len(prompt)
    result = Replayed(tokens)
    limit = len(prompt) + plan.max_tokens
    # The open window: position, the target's own token, gap, matches so far, number of its round.
    window = None
    spans: list[list[int]] = []  # start and accepted drafts of every round with drafts

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
        result.rejected.append(gap)
        cut(position)
        put(own, Origin.CORRECTION)
        window = None

    def may_stand(token):
        spent = [gap for gap in gaps if gap is not None]
        gap = world.gap(tokens, token)
        if plan.max_loose_tokens is not None and len(spent) >= plan.max_loose_tokens:
            return False
        if plan.max_loose_cost_nats is not None and sum(spent) + gap > plan.max_loose_cost_nats:
            return False
        return world.passes(tokens, token) and len(tokens) >= plan.exact_until_position

    for number, drafts in enumerate(history):
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
                    result.rejected.append(world.gap(tokens, token))
                fail(number)
                break
            elif may_stand(token):
                gap = world.gap(tokens, token)
                if window_size:
                    window = [len(tokens), own, gap, 0, number]
                put(token, Origin.LOOSE, gap)
                span[1] += 1
            else:
                result.rejected.append(world.gap(tokens, token))
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
    result.accepted = [max(0, min(n, result.committed - start)) for start, n in spans]
    return result
