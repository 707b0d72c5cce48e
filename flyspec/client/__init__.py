"""Asynchronous clients of a running stack: generation, administration, health. No torch.

`calls` holds the clients, `values` what they take and give, `transcript` keeps track of a stream,
and `messages` is the way between values and protobuf, which does not leave this package.
"""

from flyspec.client.calls import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, AdminClient, Client
from flyspec.client.transcript import Transcript
from flyspec.client.values import (
    Chat,
    Chunk,
    Completion,
    DrafterStatus,
    Event,
    GenerateOptions,
    Generation,
    GenerationTimings,
    Models,
    Prompt,
    Retract,
    SpeculationMetrics,
    Started,
    Status,
    UpstreamStatus,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_ADMIN_ADDRESS",
    "AdminClient",
    "Chat",
    "Chunk",
    "Client",
    "Completion",
    "DrafterStatus",
    "Event",
    "GenerateOptions",
    "Generation",
    "GenerationTimings",
    "Models",
    "Prompt",
    "Retract",
    "SpeculationMetrics",
    "Started",
    "Status",
    "Transcript",
    "UpstreamStatus",
]
