"""Flags shared by several commands, and the decorator that adds them to a command.

A command decorated with `with_flags` may have parameters declared as flags, and dataclass
parameters whose fields are; each becomes a flag of the command.
"""

from typing import Literal

from flyspec.cli.options.binding import with_flags
from flyspec.cli.options.stack import (
    ListeningFlags,
    ModelFlags,
    read_address,
    read_admin_address,
)

Color = Literal["auto", "always", "never"]

__all__ = [
    "Color",
    "ListeningFlags",
    "ModelFlags",
    "read_address",
    "read_admin_address",
    "with_flags",
]
