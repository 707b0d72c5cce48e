"""Flags shared by several commands, and the decorator that adds them to a command.

A command decorated with `with_flags` may have parameters declared as flags, and dataclass
parameters whose fields are; each becomes a flag of the command.
"""

from typing import Literal

from flyspec.cli.options.binding import with_flags as with_flags
from flyspec.cli.options.stack import ListeningFlags as ListeningFlags
from flyspec.cli.options.stack import ModelFlags as ModelFlags
from flyspec.cli.options.stack import read_address as read_address
from flyspec.cli.options.stack import read_admin_address as read_admin_address

Color = Literal["auto", "always", "never"]
