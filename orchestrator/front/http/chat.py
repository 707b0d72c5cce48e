"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from flyspec.values.generation import Chunk, GenerateOptions, Models, Started
from orchestrator.fleet.drafters import PREDICTION
from orchestrator.front.http.bodies import ChatBody
from orchestrator.front.http.choices import Gathered
from orchestrator.front.http.logprobs import chat_logprobs
from orchestrator.front.http.options import options_of
from orchestrator.front.http.replies import Reply


def chat_options(body: ChatBody, models: Models) -> GenerateOptions:
    """Return the options; `top_logprobs` counts only with `logprobs`, as at OpenAI."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prediction = body.prediction.text if body.prediction else ""
    return options_of(body, models, max_tokens=most, logprobs=logprobs, prediction=prediction)


class ChatReply(Reply):
    """The assistant's message, or its growth."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    _body: ChatBody

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        message = {"role": "assistant", "content": gathered.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(*gathered.chunks)}

    def first(self, index: int, started: Started) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(chunk)}

    @property
    def empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

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
        return chat_logprobs(chunks, self._tokenizer, self._body.top_logprobs or 0)
