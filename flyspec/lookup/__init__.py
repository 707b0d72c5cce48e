"""Drafts without a model: copies of the sequence or its like, and the target's own candidates.

Serves the draft service and, with prompt lookup, the orchestrator's own fallback. No torch, no
numpy.
"""

from flyspec.lookup.prompt import PromptLookup

__all__ = ["PromptLookup"]
