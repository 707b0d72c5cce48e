"""Flags that several commands share, and how a command takes them.

A command marked `with_flags` may have parameters that are dataclasses whose fields are declared as
flags, and such flags alone; each becomes a flag of the command.
"""

from typing import Literal

from flyspec.cli.options.binding import with_flags
from flyspec.cli.options.stack import ListeningFlags, ModelFlags

Color = Literal["auto", "always", "never"]

__all__ = ["Color", "ListeningFlags", "ModelFlags", "with_flags"]
