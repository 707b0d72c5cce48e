"""`/v1/responses`, without state: text and function calls, as items and as typed events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from typing import Any

from flyspec.client.transcript import Transcript
from flyspec.errors import FlyspecError, InvalidArgumentError
from flyspec.telemetry import request_id
from flyspec.values.chat import Chat
from flyspec.values.generation import Chunk, Completion, Event, FinishReason, Started
from orchestrator.front.http.bodies import ResponsesBody
from orchestrator.front.http.errors import document_of
from orchestrator.front.http.options import (
    call_of_template,
    functions_of,
    sampling_of,
    texts_of,
)
from orchestrator.front.http.replies import Events, headers_of, measured, token_details
from orchestrator.front.http.tool_calls import ToolCall, ToolCallParser, asked_stop

Document = dict[str, Any]


class ResponsesReply:
    """The response, whole or as events; calls are told from text if there is a `parser`.

    `own_stops` are stop strings that the client did not ask for.
    """

    def __init__(
        self,
        body: ResponsesBody,
        model: str,
        parser: ToolCallParser | None = None,
        own_stops: Collection[str] = (),
    ) -> None:
        self._body, self._parser, sampling = body, parser, sampling_of(body)
        self._own_stops = own_stops
        self._number, self._transcript = 0, Transcript()
        self._untold: list[Chunk] = []  # since the last delta
        self._output: list[Document] = []
        self._message: Document | None = None  # the one that text is added to
        self._response: Document = {
            "id": f"resp_{request_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": body.model or model,
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def whole(self, events: Events) -> Document:
        async for _, event in events:
            for _ in self._told(event):
                pass
        return self._response

    async def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; an error after the first is one of them, and the last."""
        try:
            async for _, event in events:
                for told in self._told(event):
                    yield _frame(told)
        except FlyspecError as error:
            if not self._number:
                raise
            yield self.failure(error)

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the reply, once it has begun."""
        return headers_of([self._transcript])

    def failure(self, error: FlyspecError) -> bytes:
        """Return the end of a stream that fails."""
        told = self._event("error", **document_of(error)["error"])
        return _frame(told | {"type": "error"})

    def _told(self, event: Event) -> Iterator[Document]:
        self._transcript.add(event)
        match event:
            case Started():
                self._response["seed"] = event.seed
                yield self._event("response.created", response=self._response)
                yield self._event("response.in_progress", response=self._response)
            case Chunk():
                self._untold.append(event)
                parser = self._parser
                yield from self._pieces(parser.push(event.text) if parser else [event.text])
            case Completion():
                if self._parser:
                    yield from self._pieces(self._parser.end(event.stop_reason))
                if not self._output:
                    yield from self._begin_message()
                whole = event.finish_reason is not FinishReason.LENGTH
                yield from self._end_message("completed" if whole else "incomplete")
                yield self._completed(event)

    def _pieces(self, pieces: Iterable[str | ToolCall]) -> Iterator[Document]:
        for piece in pieces:
            yield from self._call(piece) if isinstance(piece, ToolCall) else self._say(piece)

    def _event(self, type_: str, **fields: Any) -> Document:
        self._number += 1
        return {"type": type_, "sequence_number": self._number - 1, **fields}

    def _say(self, text: str) -> Iterator[Document]:
        if not text:
            return
        if self._message is None:
            yield from self._begin_message()
        assert self._message is not None
        self._message["content"][0]["text"] += text
        told, self._untold = token_details(self._body, self._untold), []
        yield self._event(
            "response.output_text.delta", delta=text, logprobs=[], **self._part, **told
        )

    def _begin_message(self) -> Iterator[Document]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "status": "in_progress", "content": [],
        }  # fmt: skip
        self._output.append(self._message)
        yield self._event("response.output_item.added", item=self._message, **self._place)
        self._message["content"].append(part)
        yield self._event("response.content_part.added", part=part, **self._part)

    def _end_message(self, status: str = "completed") -> Iterator[Document]:
        message = self._message
        if message is None:
            return
        message["status"] = status
        (part,) = message["content"]
        text = {"text": part["text"], "logprobs": []}
        yield self._event("response.output_text.done", **text, **self._part)
        yield self._event("response.content_part.done", part=part, **self._part)
        yield self._event("response.output_item.done", item=message, **self._place)
        self._message = None

    def _call(self, call: ToolCall) -> Iterator[Document]:
        yield from self._end_message()
        item = {
            "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id,
            "name": call.name, "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self._output.append(item)
        place = {"item_id": item["id"], **self._place}
        yield self._event("response.output_item.added", item=item, **self._place)
        item["arguments"], item["status"] = call.arguments, "completed"
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", delta=call.arguments, **place)
        yield self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **place)
        yield self._event("response.output_item.done", item=item, **self._place)

    def _completed(self, completion: Completion) -> Document:
        response = self._response
        whole = completion.finish_reason is not FinishReason.LENGTH
        response["status"] = "completed" if whole else "incomplete"
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        }
        response |= measured([self._transcript])
        response["stop_reason"] = asked_stop(completion.stop_reason, self._own_stops)
        response |= token_details(self._body, self._transcript.chunks, self._transcript.started)
        return self._event(f"response.{response['status']}", response=response)

    @property
    def _place(self) -> Document:
        return {"output_index": len(self._output) - 1}

    @property
    def _part(self) -> Document:
        assert self._message is not None
        return {"item_id": self._message["id"], "content_index": 0, **self._place}


def _frame(event: Document) -> bytes:
    data = json.dumps(event, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


# --- input ------------------------------------------------------------------------------------


def chat_of_items(body: ResponsesBody) -> Chat:
    """Return the chat that `instructions` and `input` stand for. Raises `InvalidArgumentError`."""
    given, tools = body.input, functions_of(body.tools or (), flat=True)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise InvalidArgumentError("input: is empty; give at least one item")
    messages: list[Document] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(items):
        _add_item(messages, f"input[{index}]", item)
    return Chat(messages, tools=tools if body.shows_tools else ())


def _add_item(messages: list[Document], where: str, item: Document) -> None:
    """Append an item's message; a call belongs to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = _string(where, "role", item)
        text = _text(f"{where}.content", item.get("content"))
        messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        name, arguments = _string(where, "name", item), _string(where, "arguments", item)
        function = call_of_template(name, arguments)
        call = {"id": _string(where, "call_id", item), "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text, call_id = (
            _text(f"{where}.output", item.get("output")),
            _string(where, "call_id", item),
        )
        messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
    else:
        raise InvalidArgumentError(
            f"{where}.type: {kind!r:.100}: only message, function_call and function_call_output "
            "are served"
        )


def _string(where: str, name: str, item: Document) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{where}.{name}: {'must be a string' if name in item else 'is missing'}"
        )
    return value


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgumentError(f"{where}: must be a text, or a list of parts of text")
    return "\n".join(texts_of(where, content))
