"""Names of drafters: which are valid and which are taken, and settings that give things names."""

from __future__ import annotations

import re

from flyspec.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_RULE = "use 1 to 64 letters, digits, dots, dashes and underscores"
LOOKUP = "prompt_lookup"
PREDICTION = "prediction"
"""A request's predicted output, as a drafter."""
RELAY = "relay"
"""A head's proposal, which a draft service extends."""


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
    """Return the directories of `--heads` by name. Raises `ConfigError`."""
    found = named_values("--heads", setting, "NAME=DIRECTORY; give one for each head")
    for name in (LOOKUP, PREDICTION, RELAY):
        if name in found:
            raise ConfigError(f"--heads: {name!r} is another drafter; choose another name")
    return found
