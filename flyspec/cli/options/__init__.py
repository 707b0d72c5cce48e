"""Flags that several commands share, as dataclasses, and how a command takes them.

A command marked `with_flags` may have parameters whose type is one of these dataclasses; each field
becomes a flag, and the command gets one value.
"""

from typing import Literal

from flyspec.cli.options.binding import with_flags
from flyspec.cli.options.connection import ConnectionFlags
from flyspec.cli.options.listening import ListeningFlags
from flyspec.cli.options.request import SamplingFlags, to_generate_options
from flyspec.cli.options.speculation import RuleFlags, SpeculationFlags
from flyspec.cli.options.stack import Dtype, ModelFlags

Color = Literal["auto", "always", "never"]

__all__ = [
    "Color",
    "ConnectionFlags",
    "Dtype",
    "ListeningFlags",
    "ModelFlags",
    "RuleFlags",
    "SamplingFlags",
    "SpeculationFlags",
    "to_generate_options",
    "with_flags",
]
