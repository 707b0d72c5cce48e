"""Bodies of requests: OpenAI's parameters, vLLM's extras and ours.

Parameters that exist elsewhere but are not served are refused by name, unless they have the value
that changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from flyspec.concurrency import in_turn
from flyspec.flags import flags_of
from flyspec.json_text import MAX_PARTS
from flyspec.validation import LENGTHS
from flyspec.values.tokens import MAX_TOP_LOGPROBS, SamplingParams
from orchestrator.generation.plan import SEED_BITS

MAX_CHOICES = 128
"""Maximum choices of a request, over all prompts."""
MAX_STOP_STRINGS = 4
MAX_METADATA = 16

T = TypeVar("T")
Many = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
"""A list that only `MAX_PARTS` limits; the first wrong item is told, since all may be wrong."""
Objects = Many[dict[str, Any]]
TokenIdList = Annotated[list[int], Field(fail_fast=True)]
"""A list that the model's context limits."""
Prompts = Annotated[list[T], Field(max_length=MAX_CHOICES, fail_fast=True)]
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_METADATA)]

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
    _in_turn: bool = False

    def convert_in_turn(self) -> None:
        """Do the work on this body, which is long, in turn."""
        self._in_turn = True

    async def converted(self, work: Callable[[], T]) -> T:
        """Return the result of work on this body."""
        return await in_turn(work) if self._in_turn else work()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unserved = [name for name in data if name in NEUTRAL and name not in cls.model_fields]
        for name in unserved:
            value = data[name]
            if value is not None and value not in NEUTRAL[name]:
                allowed = " or ".join(map(json.dumps, NEUTRAL[name]))
                raise refused(name, f"{f'only {allowed} is' if allowed else 'is not'} served here")
        dropped = {name for name, value in data.items() if value is None} | set(unserved)
        unknown = [name for name in data if name not in cls.model_fields and name not in dropped]
        dropped.update(unknown[1:])  # one is told
        return {name: value for name, value in data.items() if name not in dropped}


def refused(param: str, reason: str) -> PydanticCustomError:
    """Return the error with which a body's validator refuses a parameter."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = Field(False, description="Accepted; chunks are never padded.")


class ChunkOptions(StreamOptions):
    """Contents of a stream of chunks besides text."""

    include_usage: bool = Field(False, description="Send a last chunk with the token counts.")
    include_elapsed_ms: bool = Field(
        False,
        description="Add elapsed_ms to chunks: time since the request's arrival, by the server's "
        "clock.",
    )


def _of_body(text: str) -> str:
    """Return a help text of the command line with flags as parameters."""
    return re.sub("--([a-z-]+)", lambda found: found[1].replace("-", "_"), text)


_SAMPLING: dict[str, Any] = {
    field.name: (kind | None, Field(None, description=_of_body(flag.help)))
    for field in fields(SamplingParams)
    for kind, flag in [flags_of(SamplingParams)[field.name]]
    if field.name != "logit_bias"
}
_Sampled: type[Body] = create_model("_Sampled", __base__=Body, **_SAMPLING)


class SampledBody(_Sampled):
    """Parameters of all endpoints that generate; sampling parameters are those of gRPC."""

    model: str | None = Field(None, description="The served name, or NAME:RULE.")
    stream: bool = Field(False, description="Send text as it becomes final (server-sent events).")
    stream_options: StreamOptions | None = Field(
        None, description="How it is sent; only with stream."
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << SEED_BITS,
        description="Random seed; choice i uses seed + i. Else drawn.",
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Up to 4 strings that end the output, and are not part of it."
    )
    stop_token_ids: TokenIdList | None = Field(
        None,
        description="Tokens that end the output.",
        max_length=LENGTHS["stop_token_ids"],
    )
    ignore_eos: bool = Field(False, description="Keep generating past end of sequence.")
    logit_bias: dict[str, float] | None = Field(
        None,
        description="Added to the logits of these token ids.",
        max_length=LENGTHS["logit_bias"],
    )
    speculation: dict[str, Any] | None = Field(
        None,
        description="How to speculate and how much loss to allow: the JSON form of the proto "
        'message Speculation, such as {"rule": {"name": "exact"}}.',
    )
    return_token_ids: bool = Field(False, description="Add token_ids to choices.")
    return_token_texts: bool = Field(
        False, description="Add token_texts to choices: what of the text each token completed."
    )
    return_origins: bool = Field(
        False, description="Add each token's origin, and the cost of loose ones in nats."
    )
    user: str | None = Field(None, description="Accepted; has no effect.")
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted; has no effect.")
    metadata: Metadata | None = Field(None, description="Accepted; has no effect.")

    @model_validator(mode="after")
    def _stream_options_go_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "only with stream true")
        return self


class GenerationBody(SampledBody):
    """Parameters of the endpoints with choices."""

    stream_options: ChunkOptions | None = Field(
        None, description="What a stream contains; only with stream."
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Number of choices per prompt.")
    return_rounds: bool = Field(
        False,
        description="Add rounds to choices: each round's drafts and decisions; and at the end "
        "num_draft_tokens_per_round, with which speculation reproduces the run.",
    )
    return_recording: bool = Field(
        False,
        description="Add recording to choices: all that judging them again needs, as a line of a "
        "file for flyspec audit. Not with stream.",
    )

    @model_validator(mode="after")
    def _recordings_are_whole(self) -> Self:
        if self.return_recording and self.stream:
            raise refused("return_recording", "only without stream")
        return self


@with_config(ConfigDict(extra="allow", strict=True))
class ChatMessageBody(TypedDict):
    """A message: `role`, `content`, and whatever else the chat template reads."""

    role: Annotated[
        str, Field(description="The author: system, developer, user, assistant or tool.")
    ]
    content: NotRequired[
        Annotated[str | Objects | None, Field(description="A text, or a list of parts of text.")]
    ]


class ToolsBody(Body):
    """The functions that the model may call."""

    tools: Objects | None = Field(
        None, description="Functions that the model may call, if its chat template shows them."
    )

    @property
    def shows_tools(self) -> bool:
        """True if the chat template gets them."""
        return bool(self.tools)


class CallingBody(ToolsBody):
    """Permission for the model to call them, or duty to."""

    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="none: tools are not shown to the model."
    )
    parallel_tool_calls: bool = Field(
        True, description="Whether it may call several; false: the first call ends the output."
    )

    @property
    def shows_tools(self) -> bool:
        return self.tool_choice != "none" and super().shows_tools


class TemplateBody(ToolsBody):
    """Options of the chat template for rendering a chat's messages."""

    documents: Objects | None = Field(
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
    content: str | Many[TextPart] = Field(description="The text, or its parts.")

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(GenerationBody, CallingBody, TemplateBody):
    """A request for a chat completion."""

    messages: Many[ChatMessageBody] = Field(min_length=1, description="The chat so far.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Maximum output tokens.")
    max_tokens: int | None = Field(None, ge=1, description="The same, by its older name.")
    logprobs: bool = Field(False, description="Return log-probabilities of the output tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="And of this many most likely tokens."
    )
    prediction: PredictionBody | None = Field(
        None, description="Text that the output is expected to resemble; it is drafted."
    )

    @model_validator(mode="after")
    def _top_goes_with_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "only with logprobs true")
        return self


class CompletionBody(GenerationBody):
    """A request for completions of one or more prompts."""

    prompt: str | Prompts[str] | TokenIdList | Prompts[TokenIdList] = Field(
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

    model: str | None = Field(None, description="The served name.")
    prompt: str | None = Field(None, description="A text.")
    messages: Many[ChatMessageBody] | None = Field(None, description="A chat.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; true by default for texts."
    )
    return_token_strs: bool = Field(False, description="Also return each token as text.")


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = Field(None, description="The served name.")
    tokens: TokenIdList = Field(description="The token ids.")


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
