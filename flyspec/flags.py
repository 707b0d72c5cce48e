"""Flags, declared on the fields that they set.

`top_p: Annotated[float, Flag("Nucleus mass.", Range(0.0, 1.0, open=True))] = 1.0` declares one
parameter; the flags of commands and load tests, the checks of requests and the client's messages
are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from flyspec.ranges import Range

AttentionBackendName = Literal["auto", "flashinfer", "flex", "sdpa"]
ClientAuth = Literal["required", "none"]
EngineName = Literal["auto", "llama-cpp"]
FlashAttention = Literal["auto", "on", "off"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
LogLevel = Literal["debug", "info", "warning", "error"]
UINT32 = Range(0, 2**32 - 1)
UINT64 = Range(0, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a field, with the field's type, default and usually its name.

    `help` is a sentence, shown under the heading `group`. `range` holds the valid values;
    commands enforce only the low end of an integer range, or `min`. `default` is shown instead of
    the field's own. `name` is the flag's name if it differs from the field's; the flag sets a
    boolean to true. `env` is an environment variable for it. `read` parses the text, or the texts
    of a repeatable flag; it raises a `ValueError` that says what is expected. `listed`: not
    repeatable but one text, with commas between the values.
    """

    help: str
    range: Range | None = None
    min: float | None = None
    default: str | None = None
    group: str | None = None
    name: str = ""
    metavar: str | None = None
    env: str | None = None
    read: Callable[[Any], Any] | None = None
    listed: bool = False

    def typed(self, field: str) -> str:
        """The flag as typed on the command line."""
        return self.name or "--" + field.replace("_", "-")

    @property
    def least(self) -> float | None:
        """The minimum that a command enforces."""
        whole = self.range is not None and self.range.integers
        return self.range.low if self.range is not None and whole else self.min


def flags_of(owner: Any) -> Mapping[str, tuple[Any, Flag]]:
    """Return the type and flag of each field of a class (or parameter of a function) with one."""
    return _flags_of(owner)


@cache
def _flags_of(owner: Any) -> Mapping[str, tuple[Any, Flag]]:
    found: dict[str, tuple[Any, Flag]] = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *known = get_args(hint)
            found.update((name, (kind, flag)) for flag in known if isinstance(flag, Flag))
    return found
