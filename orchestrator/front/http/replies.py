"""A request's reply, whole or as a stream; the endpoints' own shapes are subclasses of `Reply`."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import to_jsonable_python

from flyspec.client.recordings import as_document, recording_of
from flyspec.client.transcript import Transcript
from flyspec.errors import FlyspecError
from flyspec.metadata import RULE_KEY
from flyspec.telemetry import request_id
from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    FinishReason,
    GenerationTimings,
    RoundRecord,
    SpeculationMetrics,
    Started,
)
from flyspec.values.tokens import Origin
from orchestrator.front.http.bodies import ChunkOptions, GenerationBody, SampledBody
from orchestrator.front.http.errors import document_of
from orchestrator.front.http.logprobs import name_of

Events = AsyncGenerator[tuple[int, Event], None]

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
DONE = b"data: [DONE]\n\n"
MIXED = (
    "targets that compute differently took part, so the text may differ from that of any one of "
    "them, even with the rule exact"
)


class Reply(ABC):
    """Replies to a request with `count` choices, from the choices' events.

    The choices are those of the first prompt, then those of the next: choice i is of prompt i // n.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(
        self, body: GenerationBody, model: str, fingerprint: str, tokenizer: Tokenizer, count: int
    ) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._arrived = time.perf_counter()
        self._transcripts = [Transcript() for _ in range(count)]
        self._base = {
            "id": f"{self.id_prefix}-{request_id()}",
            "created": int(time.time()),
            "model": body.model or model,
            "system_fingerprint": fingerprint,
        }

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool: ...

    @abstractmethod
    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        """Return a whole choice, apart from its index and why it ended."""

    @abstractmethod
    def first(self, index: int, started: Started) -> list[dict[str, Any]]:
        """Return the chunks with which a choice begins."""

    @abstractmethod
    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return a chunk's part of a choice."""

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """Return a chunk's part of a choice that has no text."""

    def last(self, index: int) -> dict[str, Any]:
        """Return the last chunk's part of a choice."""
        return self.empty()

    def reason(self, index: int, completion: Completion) -> str:
        """Return why a choice ended, as OpenAI calls it."""
        return REASONS[completion.finish_reason]

    def stop_reason(self, completion: Completion) -> str | int | None:
        """Return the stop string or token that was asked for and found, if any."""
        return completion.stop_reason

    # --- whole ------------------------------------------------------------------------------

    async def whole(self, events: Events) -> dict[str, Any]:
        async for index, event in events:
            self._transcripts[index].add(event)
        choices = [
            {"index": index, **self.choice(index, transcript), **self._end(index, transcript)}
            | self._details(transcript.chunks, transcript.started)
            | self._rounds(*transcript.rounds)
            for index, transcript in enumerate(self._transcripts)
        ]
        return {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": self.usage(),
            **measured(self._transcripts),
        }

    # --- stream -----------------------------------------------------------------------------

    async def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; an error after the first is one of them, and the last."""
        shared = json.dumps({**self._base, "object": self.chunk_object}, ensure_ascii=False)[:-1]
        wanted = self._body.stream_options or ChunkOptions()
        wants_usage = wanted.include_usage
        usage = {"usage": None} if wants_usage else {}

        def frame(choices: list[Any], **more: Any) -> bytes:
            if wanted.include_elapsed_ms:
                more["elapsed_ms"] = round(1e3 * (time.perf_counter() - self._arrived), 3)
            rest = json.dumps({"choices": choices, **usage, **more}, ensure_ascii=False)
            return f"data: {shared}, {rest[1:]}\n\n".encode()

        begun, left = False, len(self._transcripts)
        try:
            async for index, event in events:
                transcript = self._transcripts[index]
                match event:
                    case Started():
                        transcript.started = event
                        for part in self.first(index, event):
                            yield frame([{"index": index, **part, "finish_reason": None}])
                            begun = True
                    case Chunk() if event.text or (event.token_ids and self._tells_tokens):
                        part = self.delta(index, event) | self._details([event])
                        yield frame([{"index": index, **part, "finish_reason": None}])
                        begun = True
                    case RoundRecord():
                        part = self.empty() | self._rounds(event)
                        yield frame([{"index": index, **part, "finish_reason": None}])
                        begun = True
                    case Completion():
                        transcript.completion = event
                        left -= 1
                        end = {"index": index, **self.last(index), **self._end(index, transcript)}
                        end |= self._details((), transcript.started)
                        yield frame(
                            [end], **({} if left or wants_usage else measured(self._transcripts))
                        )
            if wants_usage:
                yield frame([], **{"usage": self.usage(), **measured(self._transcripts)})
        except FlyspecError as error:
            if not begun:
                raise
            yield self.failure(error)
            return
        yield DONE

    def failure(self, error: FlyspecError) -> bytes:
        """Return the end of a stream that fails."""
        return b"data: " + json.dumps(document_of(error)).encode() + b"\n\n" + DONE

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the reply, once it has begun."""
        return headers_of(self._transcripts)

    # --- both -------------------------------------------------------------------------------

    def _end(self, index: int, transcript: Transcript) -> dict[str, Any]:
        completion = transcript.completion
        assert completion is not None, "the events of a choice end with it"
        reason = self.reason(index, completion)
        end: dict[str, Any] = {"finish_reason": reason, "stop_reason": self.stop_reason(completion)}
        if self._body.return_rounds:
            end["num_draft_tokens_per_round"] = list(completion.num_draft_tokens_per_round)
        if self._body.return_recording and (generation := transcript.generation) is not None:
            end["recording"] = as_document(recording_of(generation))
        return end

    def _rounds(self, *records: RoundRecord) -> dict[str, Any]:
        """Return the rounds, if they were asked for."""
        if not self._body.return_rounds:
            return {}
        return {"rounds": [round_document(record, self._tokenizer) for record in records]}

    @property
    def _tells_tokens(self) -> bool:
        """True if chunks say something of tokens that have completed no text."""
        body = self._body
        asked = body.return_token_ids, body.return_token_texts, body.return_origins
        return any(asked) or self.wants_logprobs

    def _details(self, chunks: Sequence[Chunk], started: Started | None = None) -> dict[str, Any]:
        """Return what was asked for beyond OpenAI's fields; at the end, with the choice's seed."""
        seed = {"seed": started.seed} if started else {}
        return seed | token_details(self._body, chunks, started)

    def usage(self) -> dict[str, Any]:
        """Return the token counts; a prompt counts once, however many choices it has."""
        ended = self.completions
        prompt_tokens = sum(c.prompt_tokens for c in ended[:: self._body.n])
        completion_tokens = sum(c.completion_tokens for c in ended)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    @property
    def completions(self) -> list[Completion]:
        return completions_of(self._transcripts)


def headers_of(transcripts: Iterable[Transcript]) -> Mapping[str, str]:
    """Return the headers of a reply whose first choice has begun: its rules."""
    started = started_of(transcripts)
    return {RULE_KEY: started.rules} if started else {}


def started_of(transcripts: Iterable[Transcript]) -> Started | None:
    """Return the start of a choice whose tokens a rule accepts, the same for all choices."""
    return next((t.started for t in transcripts if t.started and t.started.rule.name), None)


def completions_of(transcripts: Iterable[Transcript]) -> list[Completion]:
    return [t.completion for t in transcripts if t.completion is not None]


def measured(transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Return what is told of all choices besides their text.

    `metrics` have vLLM's names, `timings` llama.cpp's.
    """
    ended, warnings = completions_of(transcripts), warnings_of(transcripts)
    total = SpeculationMetrics.total(completion.speculation for completion in ended)
    metrics: dict[str, Any] = {"speculative_decoding": total.document()}
    if started := started_of(transcripts):
        metrics["speculation"] = {"rule": started.rule.document(), "lossless": started.lossless}
        if phases := [phase.rule or started.rule for phase in started.phases]:
            metrics["speculation"]["phases"] = [{"rule": rule.document()} for rule in phases]
    return {
        "metrics": metrics,
        "timings": timings_of(ended, total),
        "recoveries": [recovery.document() for c in ended for recovery in c.recoveries],
        **({"warnings": warnings} if warnings else {}),
    }


def token_details(
    body: SampledBody, chunks: Sequence[Chunk], started: Started | None = None
) -> dict[str, Any]:
    """Return what a body asks for about tokens, and with `started` those of the prompt."""
    details: dict[str, Any] = {}
    if body.return_token_ids:
        details["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        if started:
            details["prompt_token_ids"] = list(started.prompt_token_ids)
    if body.return_token_texts:
        details["token_texts"] = [text for chunk in chunks for text in chunk.token_texts]
    if body.return_origins:
        details["origins"] = [Origin(o).name for chunk in chunks for o in chunk.origins]
        details["loose_gaps_nats"] = [gap for chunk in chunks for gap in chunk.loose_gaps_nats]
    return details


def warnings_of(transcripts: Iterable[Transcript]) -> list[str]:
    """Return what the client should know about its choices, each warning once."""
    found: dict[str, None] = {}
    for choice in transcripts:
        if choice.started:
            found |= dict.fromkeys(choice.started.warnings)
        if choice.completion and choice.completion.mixed_numerics:
            found[MIXED] = None
    return [*found]


def timings_of(ended: Iterable[Completion], speculation: SpeculationMetrics) -> dict[str, Any]:
    """Return llama.cpp's `timings`; waiting for admission belongs to neither part."""
    prompt_n = predicted_n = 0
    prompt_ms = predicted_ms = 0.0
    for completion in ended:
        times: GenerationTimings = completion.timings
        first_ns = times.time_to_first_token_ns or times.total_ns
        prompt_n += completion.prompt_tokens
        predicted_n += completion.completion_tokens
        prompt_ms += max(0, first_ns - times.queue_ns) / 1e6
        predicted_ms += (times.total_ns - first_ns) / 1e6
    return {
        **_rates("prompt", prompt_n, prompt_ms),
        **_rates("predicted", predicted_n, predicted_ms),
        "draft_n": speculation.num_draft_tokens,
        "draft_n_accepted": speculation.num_accepted_draft_tokens,
    }


def _rates(name: str, count: int, milliseconds: float) -> Mapping[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(1, count),
        f"{name}_per_second": 1e3 * count / milliseconds if milliseconds else 0.0,
    }


def round_document(record: RoundRecord, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a round for JSON; a number without a value there, such as infinity, is null."""

    def text_of(token_id: int | None) -> str | None:
        return None if token_id is None else name_of(tokenizer.bytes_of(token_id))

    document: dict[str, Any] = to_jsonable_python(record.document(), inf_nan_mode="null")
    document["draft_token_texts"] = [text_of(token_id) for token_id in record.draft_token_ids]
    document["next_token_text"] = text_of(record.next_token_id)
    for part in (*document["decisions"], *filter(None, [document["open_window"]])):
        part["target_token_text"] = text_of(part["target_token_id"])
    return document
