"""`/v1/chat/completions`."""

from __future__ import annotations

from itertools import chain
from typing import Any

from flyspec.client.recordings import recordable
from flyspec.client.transcript import Transcript
from flyspec.drafter_names import PREDICTION
from flyspec.values.generation import Chunk, Completion, FinishReason, Models, Started
from flyspec.values.requests import GenerateOptions
from orchestrator.front.http.bodies import ChatBody
from orchestrator.front.http.logprobs import chat_logprobs
from orchestrator.front.http.options import options_of
from orchestrator.front.http.replies import Reply
from orchestrator.front.http.tool_calls import asked_stop, parser_for, stops_of


def chat_options(body: ChatBody, models: Models) -> GenerateOptions:
    """Raises `InvalidArgumentError`, `NoSuchModelError`."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prediction = body.prediction.text if body.prediction else ""
    options = options_of(
        body, models, max_tokens=most, logprobs=logprobs, prediction=prediction,
        return_rounds=body.return_rounds,
    )  # fmt: skip
    return recordable(options) if body.return_recording else options


class ChatReply(Reply):
    """The assistant's message, or its growth."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    _body: ChatBody

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._num_calls = [0] * len(self._transcripts)
        self._parsers = [parser_for(self._body, self._tokenizer) for _ in self._transcripts]
        self._own_stops = stops_of(self._body, self._tokenizer)

    @property
    def wants_logprobs(self) -> bool:
        return self._body.logprobs

    def choice(self, index: int, transcript: Transcript) -> dict[str, Any]:
        text, calls = self._parsed(index, transcript.text, transcript.completion)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(*transcript.chunks)}

    def first(self, index: int, started: Started) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "delta": _delta(*self._parsed(index, chunk.text)),
            "logprobs": self._logprobs(chunk),
        }

    def empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def last(self, index: int) -> dict[str, Any]:
        rest = self._parsed(index, "", self._transcripts[index].completion)
        return self.empty() | ({"delta": _delta(*rest)} if any(rest) else {})

    def reason(self, index: int, completion: Completion) -> str:
        whole = completion.finish_reason is FinishReason.STOP
        called = whole and self._num_calls[index]
        return "tool_calls" if called else super().reason(index, completion)

    def stop_reason(self, completion: Completion) -> str | int | None:
        return asked_stop(completion.stop_reason, self._own_stops)

    def _parsed(
        self, index: int, text: str, completion: Completion | None = None
    ) -> tuple[str, list[Any]]:
        """Return the text and the function calls that came with it, and with the completion."""
        parser = self._parsers[index]
        if parser is None:
            return text, []
        shown, calls = "", []
        rest = parser.end(completion.stop_reason) if completion else ()
        for piece in chain(parser.push(text), rest):
            if isinstance(piece, str):
                shown += piece
                continue
            called = {"name": piece.name, "arguments": piece.arguments}
            place = {"index": self._num_calls[index]} if self._body.stream else {}
            calls.append({**place, "id": piece.id, "type": "function", "function": called})
            self._num_calls[index] += 1
        return shown, calls

    def usage(self) -> dict[str, Any]:
        """Return the token counts, with those of the prediction if there was one."""
        if self._body.prediction is None:
            return super().usage()
        shares = [s for c in self.completions for s in c.drafters if s.drafter == PREDICTION]
        accepted = sum(share.num_accepted_draft_tokens for share in shares)
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(s.num_draft_tokens for s in shares) - accepted,
        }
        return {**super().usage(), "completion_tokens_details": details}

    def _logprobs(self, *chunks: Chunk) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(chunks)


def _delta(text: str, calls: list[Any]) -> dict[str, Any]:
    return {"content": text} | ({"tool_calls": calls} if calls else {})
