"""A warm target before requests arrive: its heads and its judge, tried, and its step times."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

from flyspec.drafter_names import head_directories
from flyspec.engine.autojudge import HIDDEN_LAYER, AutoJudge
from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.draft_heads.loading import load_head
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Model, Step
from flyspec.errors import ConfigError
from flyspec.flags import FlashAttention
from flyspec.values.admin import MeasuredStep
from verify_service.heads import Heads

log = logging.getLogger(__name__)
SIZES = (1, 32, 8, 16, 4, 24, 2, 64, 48)
"""In order of measurement. Sizes that a slow target has no time for are interpolated linearly."""
NEEDED = 3
"""Number of leading sizes that are measured however long it takes."""
CONTEXT = 64
"""Tokens of context before each step."""
REPEATS, ENOUGH = 6, 2
"""Maximum and minimum measurements per size; the first step of a size may be slow."""
MOST_NS = 400_000_000
"""Nanoseconds after which only needed measurements are made."""


def load_heads(
    setting: str, loaded: LoadedModel, model: Model, flash_attn: FlashAttention = "auto"
) -> Heads:
    """Load the heads of `--heads` beside a warm target, and try each on its hidden rows.

    Raises `ConfigError`.
    """
    heads: dict[str, DraftHead] = {}
    for name, directory in head_directories(setting).items():
        place = Path(directory).expanduser()
        head = load_head(place, loaded, model.cache.num_slots, flash_attn)
        _try(f"--heads {name}={directory}", head, model)
        log.info("head %s: %s, %.1f M parameters, up to %d tokens",
                 name, head.kind, head.num_parameters / 1e6, head.max_tokens)  # fmt: skip
        heads[name] = head
    info = model.info
    return Heads(heads, info.vocab_size, info.context_length, loaded.tokenizer.eos_token_ids)


def _try(what: str, head: DraftHead, model: Model) -> None:
    """Have a head read and draft after a few tokens. Raises `ConfigError`."""
    tokens = [i % 7 for i in range(min(8, model.info.context_length - 1))]
    with model.cache.borrowed() as (slot,):
        try:
            step = Step(slot, 0, tokens[:-1], 1, head.hidden_layers, len(tokens) - 1)
            (rows,) = model.forward([step])
            most = min(head.max_tokens, model.info.context_length - len(tokens))
            turn = HeadStep(slot, 0, rows.hidden, tokens[1:], most, first_token_id=tokens[0])
            (drafted,) = head.draft([turn])
            if not all(map(math.isfinite, drafted.confidences)):
                raise ArithmeticError("its probabilities are not finite")
        except Exception as error:
            reason = f"it does not work with {model.info.name}: {error}"
            raise ConfigError(f"{what}: {reason}") from error
        finally:
            with suppress(Exception):
                head.forget(slot)


def fitted(judge: AutoJudge, model: Model, file: str) -> AutoJudge:
    """Return a judge on the device of a warm target, `file` its name in errors.

    Raises `ConfigError` if it is not this target's.
    """
    problem = judge.misfit(model.info)
    if not problem and (size := _hidden_size(model)) != judge.hidden_size:
        problem = f"it is for hidden rows of size {judge.hidden_size}, the target's have {size}"
    if problem:
        raise ConfigError(f"--autojudge-file {file}: {problem}")
    facts = judge.facts
    log.info("judge %s: AUC %.3f, trained on %d mismatches of %d %s prompts",
             judge.fingerprint, facts.auc, facts.labels, facts.prompts, facts.task)  # fmt: skip
    return judge.on(model.info.device)


def _hidden_size(model: Model) -> int:
    """Return the size of the target's hidden rows, as a step returns them."""
    with model.cache.borrowed() as (slot,):
        (rows,) = model.forward([Step(slot, 0, [0], hidden_layers=(HIDDEN_LAYER,))])
        return int(rows.hidden[0].shape[-1])


def measure_steps(model: Model) -> tuple[MeasuredStep, ...]:
    """Return the forward time of one sequence's round by size; never less for more tokens.

    Each is the shortest of several: other services start on the same machine, and only ratios
    matter.
    """
    cache, info = model.cache, model.info
    context = min(CONTEXT, info.context_length - max(SIZES))
    if context < 1:
        return ()
    ids = [(7 * i * i + 3 * i + 1) % min(info.vocab_size, 251) for i in range(max(SIZES) + context)]
    until = perf_counter_ns() + MOST_NS
    times: dict[int, list[int]] = {}
    with cache.borrowed() as (slot,):
        model.forward([Step(slot, 0, ids[:context], 0)])
        for repeat in range(REPEATS):
            for rank, size in enumerate(SIZES):
                needed = rank < NEEDED and repeat < ENOUGH
                if not needed and perf_counter_ns() > until:
                    break
                step = Step(slot, context, ids[context : context + size], size)
                began = perf_counter_ns()
                model.forward([step])
                model.synchronize()
                times.setdefault(size, []).append(perf_counter_ns() - began)
    found: list[MeasuredStep] = []
    for size in sorted(size for size in times if len(times[size]) >= ENOUGH):
        least = found[-1].duration_ns if found else 0
        found.append(MeasuredStep(size, max(least, min(times[size]))))
    return tuple(found)
