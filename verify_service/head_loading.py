"""Loads the heads of `--heads` beside a warm target, and tries each of them."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path

from flyspec.drafter_names import head_directories
from flyspec.engine import draft_heads
from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Model, Step
from flyspec.errors import ConfigError
from flyspec.flags import FlashAttention
from verify_service.heads import Heads

log = logging.getLogger(__name__)


def load_heads(
    setting: str, loaded: LoadedModel, model: Model, flash_attn: FlashAttention = "auto"
) -> Heads:
    """Load the heads of `--heads` beside a warm target, and try each on its hidden rows.

    Raises `ConfigError`.
    """
    heads: dict[str, DraftHead] = {}
    for name, directory in head_directories(setting).items():
        place = Path(directory).expanduser()
        head = draft_heads.load_head(place, loaded, model.cache.num_slots, flash_attn)
        _try(f"--heads {name}={directory}", head, model)
        log.info("head %s: %s, %.1f M parameters, up to %d tokens",
                 name, head.kind, head.num_parameters / 1e6, head.max_tokens)  # fmt: skip
        heads[name] = head
    info = model.info
    return Heads(heads, info.vocab_size, info.context_length, loaded.tokenizer.eos_token_ids)


def _try(what: str, head: DraftHead, model: Model) -> None:
    """Have a head read and draft after a few tokens. Raises `ConfigError`."""
    tokens = [i % 7 for i in range(min(8, model.info.context_length - 1))]
    slot = model.cache.acquire().slot
    try:
        step = Step(slot, 0, tokens[:-1], 1, head.hidden_layers, len(tokens) - 1)
        (rows,) = model.forward([step])
        most = min(head.max_tokens, model.info.context_length - len(tokens))
        turn = HeadStep(slot, 0, rows.hidden, tokens[1:], most, first_token_id=tokens[0])
        (drafted,) = head.draft([turn])
        if not all(map(math.isfinite, drafted.confidences)):
            raise ArithmeticError("its probabilities are not finite")
    except Exception as error:
        raise ConfigError(f"{what}: it does not work with {model.info.name}: {error}") from error
    finally:
        model.cache.release(slot)
        model.cache.forget()
        with suppress(Exception):
            head.forget(slot)
