"""What clients send to `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orchestrator.front.http.bodies import SampledBody


class ResponsesBody(SampledBody):
    """A request for a response; nothing of it is stored."""

    input: str | list[dict[str, Any]] = Field(
        description="A text, or items: messages, function calls and their outputs."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, description="Maximum output tokens.")
    tools: list[dict[str, Any]] | None = Field(
        None, description="Functions that the model may call, if its chat template shows them."
    )
    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="none: tools are not shown to the model."
    )
