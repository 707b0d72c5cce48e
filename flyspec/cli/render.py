"""Rendering of generations: the JSON document, tokens coloured by origin, the summary line.

Pure functions of what the client returns; no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from flyspec.client import Chunk, Generation, Started
from flyspec.errors import FlyspecError
from flyspec.speculation_length import AUTO
from flyspec.tables import rate
from flyspec.values.tokens import LABELS, Origin

STYLES: dict[Origin, Style] = {
    Origin.EXACT_MODEL: Style(color="green"),
    Origin.EXACT_LOOKUP: Style(color="cyan"),
    Origin.PREDICTED: Style(color="bright_cyan"),
    Origin.LOOSE: Style(color="magenta", bold=True, underline=True),
    Origin.CORRECTION: Style(color="red"),
    Origin.BONUS: Style(color="blue"),
    Origin.PLAIN: Style(),
}
_DOT = " · "
PROMPT_STYLE = Style(dim=True)

# A model's output must not control the terminal: escape sequences, bells, backspaces.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def document(generation: Generation, prompt_index: int = 0) -> dict[str, Any]:
    """Return what `generate --json` prints for one prompt, the one at `prompt_index`.

    `logprobs` and `rounds` are present only if requested.
    """
    started, completion = generation.started, generation.completion
    values: dict[str, Any] = {
        "prompt_index": prompt_index,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_token_ids": list(generation.started.prompt_token_ids),
        "finish_reason": completion.finish_reason.name.lower(),
        "stop_reason": completion.stop_reason,
        "model": started.model,
        "drafter": started.drafter,
        "rule": started.rule.document(),
        "phases": [
            {**asdict(phase), "rule": phase.rule and phase.rule.document()}
            for phase in started.phases
        ],
        "exact_inside": list(started.exact_inside),
        "num_speculative_tokens": AUTO if started.adaptive else started.num_speculative_tokens,
        "seed": started.seed,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
        "timings": asdict(completion.timings),
        "origins": [origin.name for origin in generation.origins],
        "loose_gaps_nats": generation.loose_gaps_nats,
        "loop_guard_token_index": completion.loop_guard_token_index,
        "warnings": list(generation.started.warnings),
        "metrics": {"speculative_decoding": completion.speculation.document()},
        "drafters": [asdict(share) for share in completion.drafters],
        "num_draft_tokens_per_round": list(completion.num_draft_tokens_per_round),
        "mixed_numerics": completion.mixed_numerics,
        "num_recoveries": completion.num_recoveries,
        "recoveries": [recovery.document() for recovery in completion.recoveries],
    }
    if generation.logprobs:
        told = zip(generation.token_ids, generation.logprobs, strict=True)
        values["logprobs"] = [entry.document(token_id) for token_id, entry in told]
    if generation.rounds:
        values["rounds"] = [record.document() for record in generation.rounds]
    return values


def failure(error: FlyspecError, prompt_index: int = 0) -> dict[str, Any]:
    """Return what `generate --json` prints for a prompt that could not be answered."""
    return {
        "prompt_index": prompt_index,
        "error": {"status": error.status, "message": str(error)},
    }


def visible(text: str) -> str:
    """Replace control characters by visible symbols; keep line breaks and tabs."""
    return _CONTROL.sub(lambda m: chr(0x2400 + ord(m[0])) if m[0] < " " else "\ufffd", text)


def pieces(chunk: Chunk) -> list[tuple[str, Style]]:
    """Return the visible text of a chunk in pieces, each with the style of its origin."""
    if len(chunk.token_texts) == len(chunk.origins) and chunk.token_texts:
        return [
            (visible(text), STYLES[origin])
            for text, origin in zip(chunk.token_texts, chunk.origins, strict=True)
            if text
        ]
    # Without texts per token, only a chunk of one origin can be coloured.
    origins = set(chunk.origins)
    return [(visible(chunk.text), STYLES[origins.pop()] if len(origins) == 1 else Style())]


def paint(text: str, style: Style) -> str:
    """Render text in a style, line by line so that colours do not run over."""
    lines = visible(text).split("\n")
    return "\n".join(
        style.render(line, color_system=ColorSystem.STANDARD) if line else "" for line in lines
    )


def painted(chunk: Chunk, color: bool) -> str:
    if not color:
        return visible(chunk.text)
    return "".join(paint(text, style) for text, style in pieces(chunk))


def legend(width: int | None = None, origins: Sequence[Origin] = tuple(Origin)) -> Text:
    """Name the colours, in lines of at most `width` characters."""
    text, column = Text(), 0
    for origin in origins:
        label = LABELS[origin]
        if column and width is not None and column + 2 + len(label) > width:
            text.append("\n")
            column = 0
        text.append("  " if column else "")
        text.append(label, STYLES[origin])
        column += len(label) + 2 * bool(column)
    return text


def folded(line: str, width: int | None) -> str:
    """Break a line between its parts, so that none is wider than `width`."""
    if width is None:
        return line
    lines: list[str] = []
    for part in line.split(_DOT):
        if lines and len(lines[-1]) + len(_DOT) + len(part) <= width:
            lines[-1] += _DOT + part
        else:
            lines.append(part)
    return "\n".join(lines)


def stopped(started: Started, chunks: Sequence[Chunk], seconds: float) -> str:
    """Summarize what was reached of an answer."""
    origins = [origin for chunk in chunks for origin in chunk.origins]
    rounds = sum(origin in (Origin.CORRECTION, Origin.BONUS) for origin in origins)
    parts = [
        "stopped",
        f"{len(origins)} tokens in {seconds:.2f} s",
        f"{rate(len(origins) / max(seconds, 1e-9))} tokens/s",
        f"{rounds} rounds with drafts",
        f"{origins.count(Origin.PLAIN)} plain",
    ]
    if loose := origins.count(Origin.LOOSE):
        cost = sum(gap for chunk in chunks for gap in chunk.loose_gaps_nats)
        parts.append(f"{loose} loose ({cost:.2f} nats)")
    return _DOT.join([*parts, _rules(started)])


def _rules(started: Started) -> str:
    """Return the rule, or those of the phases with what ends them."""
    words = []
    for phase in started.phases:
        ends = [*map(repr, phase.until), *(f"token {i}" for i in phase.until_token_ids)]
        name = phase.rule.name if phase.rule else started.rule.name
        words.append(f"{name} until {' or '.join(ends)}" if ends else name)
    text = f"rule {', then '.join(words) or started.rule.name}"
    inside = " and ".join(started.exact_inside)
    return f"{text}, exact inside {inside}" if inside else text


def _undrafted(started: Started) -> str:
    """Why nothing was drafted."""
    if started.adaptive:
        return "no drafts: they promised no gain"
    return "no drafts" if started.num_speculative_tokens else "no speculation"


def summary(generation: Generation, seconds: float) -> str:
    completion, metrics = generation.completion, generation.completion.speculation
    tokens = completion.completion_tokens
    parts = [
        f"{tokens} tokens in {seconds:.2f} s",
        f"{rate(tokens / max(seconds, 1e-9))} tokens/s",
    ]
    if metrics.num_spec_steps:
        parts += [
            f"{generation.mean_accepted_tokens:.2f} tokens per step",
            f"loose {metrics.num_loose_tokens / max(1, tokens):.1%}"
            + (f" ({metrics.loose_cost_nats:.2f} nats)" if metrics.num_loose_tokens else ""),
        ]
        if metrics.num_plain_tokens:
            parts.append(f"{metrics.num_plain_tokens} plain")
        if count := metrics.num_rollbacks:
            parts.append(f"{count} rollback{'s' * (count > 1)}")
        if (index := completion.loop_guard_token_index) is not None:
            parts.append(f"repeating, exact from token {index} on")
    else:
        parts.append(_undrafted(generation.started))
    parts.append(_rules(generation.started))
    if generation.started.drafter:
        parts.append(f"drafter {generation.started.drafter}")
    if count := completion.num_recoveries:
        parts.append(f"{count} recover{'ies' if count > 1 else 'y'}")
    if completion.mixed_numerics:
        parts.append("on targets that compute differently")
    reason = completion.finish_reason.name.lower()
    parts.append(f"{reason} {completion.stop_reason!r}" if completion.stop_reason else reason)
    return _DOT.join(parts)


def total(generations: Sequence[Generation], seconds: float, what: str = "prompts") -> str:
    """Summarize several generations; `what` is the plural of what each of them is."""
    done = [g.completion for g in generations]
    tokens = sum(c.completion_tokens for c in done)
    rounds = sum(c.speculation.num_rounds for c in done)
    loose = sum(c.speculation.num_loose_tokens for c in done)
    return (
        f"{len(done)} {what} · {tokens} tokens in {seconds:.2f} s · "
        f"{rate(tokens / max(seconds, 1e-9))} tokens/s · "
        f"{tokens / max(1, rounds):.2f} tokens per step · "
        f"loose {loose / max(1, tokens):.1%}"
    )
