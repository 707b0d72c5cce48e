"""Streams to the draft and verify services: what they hold, deadlines, and opening them again.

A remote session is a cache (DESIGN, principle 1): when a stream is lost or holds another prefix,
the next call opens a new one with the whole sequence.
"""

from orchestrator.upstreams.draft import DraftSession, DraftUpstream, Proposal
from orchestrator.upstreams.traffic import Traffic
from orchestrator.upstreams.verify import VerifySession, VerifyUpstream

__all__ = [
    "DraftSession",
    "DraftUpstream",
    "Proposal",
    "Traffic",
    "VerifySession",
    "VerifyUpstream",
]
