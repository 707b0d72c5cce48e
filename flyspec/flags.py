"""What is known of a field that can be given as a flag, said where the field is declared.

`top_p: Annotated[float, Flag("Nucleus mass.", Range(0.0, 1.0, open=True))] = 1.0` is one parameter:
the flags of commands and load tests, the checks of requests and the client's messages come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from flyspec.ranges import Range

ClientAuth = Literal["required", "none"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
LogLevel = Literal["debug", "info", "warning", "error"]
UINT32 = Range(0, 2**32 - 1)
UINT64 = Range(0, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as a flag; its type, default and usually its name are the field's.

    `help` is a sentence, under the heading `group`. `range` is what may be given; a command refuses
    less than its low end itself if it has whole numbers, or less than `min`. `default` is shown in
    place of the field's own. `name` is how it is typed, if not as the field; a truth is on if it is
    typed. `env` is a variable that gives it. `read` makes a value of the text, or of the texts of
    a field with several; it raises `ValueError`, which says what to write.
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

    def typed(self, field: str) -> str:
        """How the flag of this field is typed."""
        return self.name or "--" + field.replace("_", "-")

    @property
    def least(self) -> float | None:
        """What a command refuses less than."""
        whole = self.range is not None and self.range.integers
        return self.range.low if self.range is not None and whole else self.min


def flags_of(owner: Any) -> Mapping[str, tuple[Any, Flag]]:
    """The fields of a class, or parameters of a function, that are flags: the type and facts."""
    return _flags_of(owner)


@cache
def _flags_of(owner: Any) -> Mapping[str, tuple[Any, Flag]]:
    found: dict[str, tuple[Any, Flag]] = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *known = get_args(hint)
            found.update((name, (kind, flag)) for flag in known if isinstance(flag, Flag))
    return found
