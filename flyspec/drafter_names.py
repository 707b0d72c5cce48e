"""Names of drafters: kinds, valid and taken names; settings that give things names."""

from __future__ import annotations

import re
from typing import Literal, get_args

from flyspec.errors import ConfigError

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

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_RULE = "use 1 to 64 letters, digits, dots, dashes and underscores"
LOOKUP = "prompt_lookup"
PREDICTION = "prediction"
"""A request's predicted output, as a drafter."""
RELAY = "relay"
"""A head's proposal, which a draft service extends."""


def check_needs(kind: str, has_model: bool, has_datastore: bool) -> None:
    """Raise `ConfigError` if a draft service lacks what its `--drafter` needs."""
    if kind in NEED_MODEL and not has_model:
        raise ConfigError(f"--drafter {kind}: needs a draft model; set --model")
    if kind in NEED_DATASTORE and not has_datastore:
        raise ConfigError(f"--drafter {kind}: needs a datastore; set --datastore")


def named_values(flag: str, setting: str, form: str) -> dict[str, str]:
    """Return the values of a setting like `"a=1 b=2"` by name.

    Raises `ConfigError`, with the `form` that a part must have, for one that is not a pair, for an
    invalid name and for one given twice.
    """
    found: dict[str, str] = {}
    for part in setting.split():
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag}: {part!r} is not {form}, separated by spaces")
        if not NAME.fullmatch(name):
            raise ConfigError(f"{flag}: invalid name {name!r}; {NAME_RULE}")
        if name in found:
            raise ConfigError(f"{flag}: {name!r} is given twice; choose another name")
        found[name] = value
    return found


def head_directories(setting: str) -> dict[str, str]:
    """Return the directories or GGUF files of `--heads` by name. Raises `ConfigError`."""
    found = named_values("--heads", setting, "NAME=PATH; give one for each head")
    for name in (LOOKUP, PREDICTION, RELAY):
        if name in found:
            raise ConfigError(f"--heads: {name!r} is another drafter; choose another name")
    return found
