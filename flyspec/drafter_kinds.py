"""The kinds of drafters, by the names that `--drafter` and the registry know. No torch."""

from __future__ import annotations

from typing import Literal, get_args

DrafterKind = Literal[
    "model", "multi_level", "prompt_lookup", "token_recycling", "rest", "composed"
]
"""Of a draft service:

- model: a causal language model.
- multi_level: a causal language model that checks what prompt lookup guesses.
- prompt_lookup: what followed the last tokens earlier in the sequence.
- token_recycling: what the target itself said after the same tokens.
- rest: what followed the last tokens in a datastore.
- composed: all others that there are but multi_level; each round, the one that pays.
"""

DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)
KINDS_LISTED = ", ".join(DRAFTER_KINDS)
NEED_MODEL = frozenset[DrafterKind]({"model", "multi_level"})
NEED_DATASTORE = frozenset[DrafterKind]({"rest"})


def missing(kind: str, has_model: bool, has_datastore: bool) -> str:
    """Return what a service lacks to offer a kind, as an instruction; empty if nothing."""
    if kind in NEED_MODEL and not has_model:
        return "needs a draft model; set --model"
    if kind in NEED_DATASTORE and not has_datastore:
        return "needs a datastore; set --datastore"
    return ""
