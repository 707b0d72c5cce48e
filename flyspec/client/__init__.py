"""Asynchronous clients of a running stack: generation, administration, health. No torch.

`calls` and `admin` hold the clients, `credentials` what they show to a server, `values` and
`admin_values` what they take and give, `transcript` keeps track of a stream, and `messages` is the
way between values and protobuf, which does not leave this package.
"""

from flyspec.client.admin import DEFAULT_ADMIN_ADDRESS, AdminClient
from flyspec.client.admin_values import DrafterStats, DrafterStatus, Status, UpstreamStatus
from flyspec.client.calls import DEFAULT_ADDRESS, Client
from flyspec.client.credentials import Credentials
from flyspec.client.transcript import Transcript
from flyspec.client.values import (
    Chat,
    Chunk,
    Completion,
    DrafterShare,
    Event,
    GenerateOptions,
    Generation,
    GenerationTimings,
    Models,
    Prompt,
    Recovery,
    Retract,
    RoundRecord,
    SpeculationMetrics,
    Started,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_ADMIN_ADDRESS",
    "AdminClient",
    "Chat",
    "Chunk",
    "Client",
    "Completion",
    "Credentials",
    "DrafterShare",
    "DrafterStats",
    "DrafterStatus",
    "Event",
    "GenerateOptions",
    "Generation",
    "GenerationTimings",
    "Models",
    "Prompt",
    "Recovery",
    "Retract",
    "RoundRecord",
    "SpeculationMetrics",
    "Started",
    "Status",
    "Transcript",
    "UpstreamStatus",
]
