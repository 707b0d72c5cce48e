"""What clients send: OpenAI's parameters, vLLM's extras and ours.

Parameters that exist elsewhere but are not served are refused by name, unless they have the value
that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from flyspec.flags import flags_of
from flyspec.values.tokens import MAX_TOP_LOGPROBS, SamplingParams
from orchestrator.generation.plan import SEED_BITS

MAX_CHOICES = 128
"""Maximum choices of a request, over all prompts."""
MAX_STOP_STRINGS = 4

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "conversation": (),
    "function_call": (),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": (),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}}, {}),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that are not served, with the values that change nothing; null never does."""


class Body(BaseModel):
    """A request's body: no other parameters, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unserved = [name for name in data if name in NEUTRAL and name not in cls.model_fields]
        for name in unserved:
            value = data[name]
            if value is not None and value not in NEUTRAL[name]:
                allowed = " or ".join(repr(neutral) for neutral in NEUTRAL[name])
                reason = f"only {allowed} is" if allowed else "is not"
                raise PydanticCustomError("unserved", f"{reason} served here", {"param": name})
        dropped = {name for name, value in data.items() if value is None} | set(unserved)
        return {name: value for name, value in data.items() if name not in dropped}


class StreamOptions(Body):
    """What a stream contains besides text."""

    include_usage: bool = Field(False, description="Send a last chunk with the token counts.")
    include_obfuscation: bool = Field(False, description="Accepted; chunks are never padded.")


_SAMPLING: dict[str, Any] = {
    field.name: (kind | None, Field(None, description=flag.help))
    for field in fields(SamplingParams)
    for kind, flag in [flags_of(SamplingParams)[field.name]]
    if field.name != "logit_bias"
}
_Sampled: type[Body] = create_model("_Sampled", __base__=Body, **_SAMPLING)


class SampledBody(_Sampled):
    """What all endpoints that generate take; sampling parameters are those of gRPC."""

    model: str | None = Field(None, description="The served name, or NAME:RULE.")
    stream: bool = Field(False, description="Send text as it becomes final (server-sent events).")
    stream_options: StreamOptions | None = None
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << SEED_BITS,
        description="Random seed; choice i uses seed + i. Else drawn.",
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Up to 4 strings that end the output, and are not part of it."
    )
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end the output.")
    ignore_eos: bool = Field(False, description="Keep generating past end of sequence.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Added to the logits of these token ids."
    )
    speculation: dict[str, Any] | None = Field(
        None,
        description="How to speculate and how much loss to allow: the JSON form of the proto "
        'message Speculation, such as {"rule": {"name": "exact"}}.',
    )
    return_token_ids: bool = Field(False, description="Add token_ids to choices.")
    return_origins: bool = Field(
        False, description="Add each token's origin, and the cost of loose ones in nats."
    )
    user: str | None = Field(None, description="Accepted; has no effect.")
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted; has no effect.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted; has no effect.")


class GenerationBody(SampledBody):
    """What the endpoints with choices take."""

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Number of choices per prompt.")


class ChatMessageBody(BaseModel):
    """A message: `role`, `content`, and whatever else the chat template reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class ToolsBody(Body):
    """The functions that the model may call."""

    tools: list[dict[str, Any]] | None = Field(
        None, description="Functions that the model may call, if its chat template shows them."
    )

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """Those that the chat template gets."""
        return tuple(self.tools or ())


class CallingBody(ToolsBody):
    """Whether and how the model calls them."""

    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="none: tools are not shown to the model."
    )
    parallel_tool_calls: bool = Field(
        True, description="Whether it may call several; false: what follows the first call is cut."
    )

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        return () if self.tool_choice == "none" else super().shown_tools


class TemplateBody(ToolsBody):
    """How the chat template renders a chat's messages."""

    documents: list[dict[str, Any]] | None = Field(
        None, description="Documents to answer from, if the chat template reads them."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message; true by default."
    )
    continue_final_message: bool = Field(
        False, description="Continue the final message; add_generation_prompt is then false."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="More variables for the chat template."
    )


class TextPart(Body):
    """A part of a text."""

    type: Literal["text"]
    text: str


class PredictionBody(Body):
    """A predicted output, such as a file before an edit."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(GenerationBody, CallingBody, TemplateBody):
    """A request for a chat completion."""

    messages: list[ChatMessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="Maximum output tokens.")
    max_tokens: int | None = Field(None, ge=1, description="The same, by its older name.")
    logprobs: bool = Field(False, description="Return log-probabilities of the output tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="And of this many most likely tokens."
    )
    prediction: PredictionBody | None = Field(
        None, description="Text that the output is expected to resemble; it is drafted."
    )


class CompletionBody(GenerationBody):
    """A request for completions of one or more prompts."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A text or its token ids, or a list of either."
    )
    max_tokens: int = Field(16, ge=0, description="Maximum output tokens; 0 only with echo.")
    echo: bool = Field(False, description="Return the prompt before the output.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Return log-probabilities of the tokens, and of this many most likely ones; "
        "with echo of the prompt's too.",
    )


class TokenizeBody(TemplateBody):
    """A text, or a chat, to encode."""

    model: str | None = None
    prompt: str | None = Field(None, description="A text.")
    messages: list[ChatMessageBody] | None = Field(None, description="A chat.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; true by default for texts."
    )
    return_token_strs: bool = Field(False, description="Also return each token as text.")


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[int]
