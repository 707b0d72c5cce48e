"""Checks that draft model and target fit each other: tokenizers and contexts."""

from __future__ import annotations

from collections.abc import Iterator

from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.doctor.models import Examined
from flyspec.model_files import size_problem

SECTION = "pair"


def pair(target: Examined, draft: Examined) -> Iterator[Diagnosis]:
    """Examine two models, as far as both could be read."""
    if target.bundle is not None and draft.bundle is not None:
        same = target.bundle.fingerprint == draft.bundle.fingerprint
        text = "tokenizers are equal: drafts are used as they are"
        if not same:
            text = (
                "tokenizers differ: drafts are translated through text, which costs some time and "
                "acceptance (docs/translation.md); a draft model with the target's tokenizer "
                "needs none"
            )
        mark = Mark.OK if same else Mark.WARNING
        yield Diagnosis(SECTION, "tokenizers", mark, text, {"translated": not same})
    if target.checkpoint is None or draft.checkpoint is None:
        return
    own, needed = draft.checkpoint.context_length, target.checkpoint.context_length
    text = f"draft model {own:,} tokens, target {needed:,}"
    if own < needed:
        text += (
            f"; beyond {own:,} tokens this drafter proposes nothing, and prompt lookup drafts; "
            "use a draft model with a longer context if texts get longer"
        )
    yield Diagnosis(SECTION, "contexts", Mark.WARNING if own < needed else Mark.OK, text)
    sizes = target.checkpoint.loaded_bytes(), draft.checkpoint.loaded_bytes()
    if problem := size_problem(*sizes):
        yield Diagnosis(SECTION, "sizes", Mark.WARNING, problem)
