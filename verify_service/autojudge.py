"""Check that a judge of the rule `autojudge` fits the target, on its hidden rows."""

from __future__ import annotations

import logging

from flyspec.engine.autojudge import HIDDEN_LAYER, AutoJudge
from flyspec.engine.model import Model, Step
from flyspec.errors import ConfigError

log = logging.getLogger(__name__)


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
    slot = model.cache.acquire().slot
    try:
        (rows,) = model.forward([Step(slot, 0, [0], hidden_layers=(HIDDEN_LAYER,))])
        return int(rows.hidden[0].shape[-1])
    finally:
        model.cache.release(slot)
        model.cache.forget()
