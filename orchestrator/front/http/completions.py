"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    FinishReason,
    GenerateOptions,
    GenerationTimings,
    Models,
    Prompt,
    ScoredTokens,
    ScoreRequest,
    SpeculationMetrics,
    Started,
)
from flyspec.values.tokens import TokenLogprobs
from orchestrator.front.http.bodies import MAX_CHOICES, CompletionBody
from orchestrator.front.http.choices import Gathered
from orchestrator.front.http.logprobs import completion_logprobs
from orchestrator.front.http.options import options_of, token_ids_of
from orchestrator.front.http.replies import Reply

Score = Callable[[ScoreRequest], AsyncGenerator[ScoredTokens, None]]


def completion_options(body: CompletionBody, models: Models) -> GenerateOptions:
    """Raises `InvalidArgumentError`, `NoSuchModelError`."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgumentError("max_tokens must be at least 1, or 0 with echo")
    return options_of(body, models, max_tokens=max(1, body.max_tokens), logprobs=body.logprobs)


def prompts_of(body: CompletionBody) -> list[Prompt]:
    """Return the prompts: texts or token ids. Raises `InvalidArgumentError`."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise InvalidArgumentError("prompt: is empty; give a text or token ids")
    if len(given) * body.n > MAX_CHOICES:
        raise InvalidArgumentError(
            f"prompt: {len(given)} prompts with n {body.n} are more than {MAX_CHOICES} choices; "
            "send fewer at a time"
        )
    return [
        prompt if isinstance(prompt, str) else token_ids_of(f"prompt[{index}]", prompt)
        for index, prompt in enumerate(given)
    ]


@dataclass
class Echo:
    """A prompt to return before the output; `logprobs` only if requested."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


async def echo_of(
    prompt: Prompt,
    token_ids: Sequence[int],
    body: CompletionBody,
    tokenizer: Tokenizer,
    score: Score,
) -> Echo:
    """Return a prompt's echo, scored by the target if log-probabilities are requested."""
    echo = Echo(prompt if isinstance(prompt, str) else tokenizer.decode(token_ids))
    if body.logprobs is not None:
        async for piece in score(ScoreRequest(list(token_ids), body.logprobs)):
            echo.token_ids += piece.token_ids
            echo.token_texts += piece.token_texts
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
        self._lengths = [0] * len(self._gathered)  # characters sent of each choice

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        echo = self._echo(index)
        return {
            "text": (echo.text if echo else "") + gathered.text,
            "logprobs": self._logprobs(gathered.chunks, 0, echo),
        }

    def first(self, index: int, started: Started) -> list[dict[str, Any]]:
        echo = self._echo(index)
        if echo is None:
            return []
        self._lengths[index] = len(echo.text)
        return [{"text": echo.text, "logprobs": self._logprobs((), 0, echo)}]

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        start = self._lengths[index]
        self._lengths[index] += len(chunk.text)
        return {"text": chunk.text, "logprobs": self._logprobs([chunk], start)}

    def last(self, index: int) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._body.n] if self._echoes else None

    def _logprobs(
        self, chunks: Sequence[Chunk], offset: int, echo: Echo | None = None
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        before = echo or Echo()
        token_ids = [*before.token_ids, *(t for chunk in chunks for t in chunk.token_ids)]
        found = [*before.logprobs, *(entry for chunk in chunks for entry in chunk.logprobs)]
        texts = [*before.token_texts, *(text for chunk in chunks for text in chunk.token_texts)]
        return completion_logprobs(token_ids, found, texts, offset, self._tokenizer.bytes_of)


async def echoes_only(
    prompts: Sequence[Sequence[int]], options: GenerateOptions, models: Models
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of choices that are nothing but their prompts (`max_tokens` 0)."""
    for index, token_ids in enumerate(prompts):
        seed, rule = options.seed or 0, options.rule or Rule("")
        yield index, Started("", models.target.name, "", seed, token_ids, rule, 0)
        nothing = SpeculationMetrics(), GenerationTimings()
        yield index, Completion(FinishReason.LENGTH, None, len(token_ids), 0, *nothing)
