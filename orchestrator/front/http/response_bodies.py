"""Bodies of requests to `/v1/responses`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.front.http.bodies import Body, CallingBody, Metadata, Objects, SampledBody


class ReasoningBody(Body):
    """Options of the model's reasoning."""

    effort: Literal["none"] | None = Field(None, description="Only none.")
    summary: str | None = Field(None, description="Accepted; there is none without effort.")


class ResponsesBody(SampledBody, CallingBody):
    """A request for a response; nothing of it is stored."""

    input: str | Objects = Field(
        description="A text, or items: messages, function calls and their outputs."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, description="Maximum output tokens.")
    reasoning: ReasoningBody | None = Field(
        None, description="Reasoning is not told from text, so only no effort is served."
    )
    client_metadata: Metadata | None = Field(None, description="Accepted; has no effect.")
