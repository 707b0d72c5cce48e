"""Asynchronous clients of a running stack: generation, administration, health. No torch.

`generation` and `admin` hold the clients, `credentials` what they show to a server, `transcript`
keeps track of a stream. What they take and give is in `flyspec.values`.
"""

from flyspec.client.admin import DEFAULT_ADMIN_ADDRESS, AdminClient
from flyspec.client.generation import DEFAULT_ADDRESS, Client
from flyspec.client.transcript import Transcript
from flyspec.credentials import Credentials
from flyspec.values.admin import DrafterStats, DrafterStatus, Status, UpstreamStatus
from flyspec.values.generation import (
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
