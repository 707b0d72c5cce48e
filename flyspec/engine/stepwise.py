"""Draws tokens by looping over a model's forward: `Model.draw` for models without a faster way.

Finished sequences drop out of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyspec.engine.distributions import round_off
from flyspec.engine.logits import process_logits
from flyspec.engine.model import NEVER, Draw, Interrupt, Rows, Step
from flyspec.engine.sampling import checked, choose_processed
from flyspec.prefix import num_same
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, still_needed

Forward = Callable[[Sequence[Step]], Sequence[Rows]]


@torch.inference_mode()
def draw(forward: Forward, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
    """Like `flyspec.engine.model.Model.draw`. Raises `FloatingPointError` for non-finite logits."""
    found = [Drafted([])] * len(draws)
    running = list(enumerate(draws))
    while running:
        rows = forward([draw.step for _, draw in running])
        going_on = []
        for (index, draw), (logits, _) in zip(running, rows, strict=True):
            drawn, following = _choose(draw, logits)
            found[index] = _join(found[index], drawn)
            if following is not None:
                going_on.append((index, following))
        running = [] if interrupt.is_set else going_on
    return found


def _choose(draw: Draw, rows: Tensor) -> tuple[Drafted, Draw | None]:
    """The tokens drawn from a step's rows of logits, and the draw that continues, if any."""
    step, sampling, seed, spec = draw.step, draw.sampling, draw.seed, draw.distribution
    if sampling is None:
        return Drafted([]), None
    total, num_rows = len(step.token_ids), step.num_logits
    first = step.start + total - num_rows + 1
    positions = range(first, first + num_rows)
    guess = step.token_ids[total - num_rows + 1 :] if num_rows > 1 else ()
    processed = process_logits(rows, sampling, draw.history, guess)
    distributions: Sequence[TokenDistribution] = ()
    if spec is None or not spec.draw_from_it or sampling.greedy:
        tokens = checked(choose_processed(processed, sampling, positions, seed).tolist())
    if spec is not None and spec.draw_from_it and sampling.greedy:
        # An empty distribution puts all probability on the token.
        distributions = [TokenDistribution()] * (num_same(tokens, guess) + 1)
    elif spec is not None:
        rounded = round_off(rows if spec.raw and not spec.draw_from_it else processed, spec)
        if spec.draw_from_it:
            tokens = checked(rounded.draw(positions, seed).tolist())
        distributions = rounded.encode(num_same(tokens, guess) + 1)
    confidences: list[float] = []
    if draw.confidences or draw.min_confidence > 0:
        confidences = processed.double().softmax(dim=-1).amax(dim=-1).tolist()
    drawn = Drafted(tokens, [Origin.EXACT_MODEL] * num_rows, distributions, confidences)
    return drawn, _going_on(draw, tokens, confidences)


def _going_on(draw: Draw, tokens: list[int], confidences: Sequence[float]) -> Draw | None:
    """The rest of a draw of several steps after the first one's token; None at its end."""
    if draw.max_tokens <= 1 or tokens[0] in draw.stop_token_ids:
        return None
    left = still_needed(draw.min_confidence, confidences[:1])
    if left > 1:
        return None
    step, history = draw.step, draw.history
    if history is not None:
        history = history._replace(token_ids=[*history.token_ids, *tokens])
    return draw._replace(
        step=Step(step.slot, step.start + len(step.token_ids), tokens),
        history=history,
        max_tokens=draw.max_tokens - 1,
        min_confidence=left,
    )


def _join(one: Drafted, other: Drafted) -> Drafted:
    if not one.token_ids:
        return other
    return Drafted(
        [*one.token_ids, *other.token_ids],
        [*one.origins, *other.origins],
        [*one.distributions, *other.distributions],
        [*one.confidences, *other.confidences],
    )
