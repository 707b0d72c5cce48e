"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyspec.client.recordings import recordable
from flyspec.client.transcript import Transcript
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.values.chat import Chat
from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    FinishReason,
    GenerationTimings,
    Models,
    ScoredTokens,
    SpeculationMetrics,
    Started,
)
from flyspec.values.requests import GenerateOptions, GenerationRequest, Prompt, ScoreRequest
from flyspec.values.tokens import TokenLogprobs
from orchestrator.front.http.bodies import MAX_CHOICES, CompletionBody
from orchestrator.front.http.logprobs import Offsets, completion_logprobs
from orchestrator.front.http.options import options_of, token_ids_of
from orchestrator.front.http.replies import Reply

Score = Callable[[ScoreRequest], AsyncGenerator[ScoredTokens, None]]


def completion_options(body: CompletionBody, models: Models) -> GenerateOptions:
    """Raises `InvalidArgumentError`, `NoSuchModelError`."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgumentError("max_tokens must be at least 1, or 0 with echo")
    options = options_of(
        body, models, max_tokens=max(1, body.max_tokens), logprobs=body.logprobs,
        return_rounds=body.return_rounds,
    )  # fmt: skip
    return recordable(options) if body.return_recording else options


def prompts_of(body: CompletionBody) -> dict[str, Prompt]:
    """Return the prompts, texts or token ids, by their names. Raises `InvalidArgumentError`."""
    given: Any = body.prompt
    if isinstance(given, str):
        return {"prompt": given}
    if given and isinstance(given[0], int):
        return {"prompt": token_ids_of("prompt", given)}
    if not given:
        raise InvalidArgumentError("prompt: is empty; give a text or token ids")
    if len(given) * body.n > MAX_CHOICES:
        raise InvalidArgumentError(
            f"prompt: {len(given)} prompts with n {body.n} are more than {MAX_CHOICES} choices; "
            "send fewer at a time"
        )
    return {
        (name := f"prompt[{index}]"): prompt
        if isinstance(prompt, str)
        else token_ids_of(name, prompt)
        for index, prompt in enumerate(given)
    }


@dataclass
class Echo:
    """A prompt to return before the output; `logprobs` only if requested."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


async def echo_of(
    prompt: Prompt, request: GenerationRequest, tokenizer: Tokenizer, score: Score
) -> Echo:
    """Return the echo of a prompt, scored by the target if log-probabilities are requested.

    `request` has the prompt's token ids.
    """
    token_ids, logprobs = ids_of(request), request.options.logprobs
    echo = Echo(prompt if isinstance(prompt, str) else tokenizer.decode(token_ids))
    if logprobs is not None:
        async for piece in score(ScoreRequest(token_ids, logprobs)):
            echo.token_ids += piece.token_ids
            echo.logprobs += [None] * (len(piece.token_ids) - len(piece.logprobs))
            echo.logprobs += piece.logprobs
    return echo


class CompletionReply(Reply):
    """Texts, or their growth; `echoes` has the one of each prompt, if requested."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"
    _body: CompletionBody

    def __init__(self, *given: Any, echoes: Sequence[Echo] = ()) -> None:
        super().__init__(*given)
        self._echoes = echoes
        self._offsets = [Offsets(self._tokenizer) for _ in self._transcripts]

    @property
    def wants_logprobs(self) -> bool:
        return self._body.logprobs is not None

    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        echo = self._echo(index)
        return {
            "text": (echo.text if echo else "") + transcript.text,
            "logprobs": self._logprobs(index, transcript.chunks, echo),
        }

    def first(self, index: int, started: Started) -> list[dict[str, Any]]:
        echo = self._echo(index)
        if echo is None:
            return []
        return [{"text": echo.text, "logprobs": self._logprobs(index, (), echo)}]

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._logprobs(index, [chunk])}

    def empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._body.n] if self._echoes else None

    def _logprobs(
        self, index: int, chunks: Sequence[Chunk], echo: Echo | None = None
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        before = echo or Echo()
        token_ids = [*before.token_ids, *(t for chunk in chunks for t in chunk.token_ids)]
        found = [*before.logprobs, *(entry for chunk in chunks for entry in chunk.logprobs)]
        offsets = self._offsets[index].of(token_ids)
        return completion_logprobs(token_ids, found, offsets, self._tokenizer.bytes_of)


def ids_of(request: GenerationRequest) -> list[int]:
    """Return the token ids of a request for which they are known."""
    assert not isinstance(request.prompt, str | Chat)
    return [*request.prompt]


async def echoes_only(
    requests: Sequence[GenerationRequest], models: Models
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of choices that are nothing but their prompts (`max_tokens` 0)."""
    for index, request in enumerate(requests):
        token_ids, options = ids_of(request), request.options
        seed, rule = options.seed or 0, options.rule or Rule("")
        yield index, Started("", models.target.name, "", seed, token_ids, rule, 0)
        nothing = SpeculationMetrics(), GenerationTimings()
        yield index, Completion(FinishReason.LENGTH, None, len(token_ids), 0, *nothing)
