"""Collects the events of a generation, applying `Retract`."""

from __future__ import annotations

from dataclasses import replace

from flyspec.errors import FlyspecError
from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    Generation,
    Retract,
    RoundRecord,
    Started,
)
from flyspec.values.tokens import Origin


class Transcript:
    """A generation so far: its current output, without retracted tokens, as `chunks`.

    `started` and `completion` are None until they arrive.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.completion: Completion | None = None
        self.chunks: list[Chunk] = []
        self.rounds: list[RoundRecord] = []
        self.num_final_tokens = 0

    def add(self, event: Event) -> None:
        """Apply an event. Raises `FlyspecError` if it retracts unsent or final text."""
        match event:
            case Started():
                self.started = event
            case Chunk():
                self.chunks.append(event)
                self.num_final_tokens = max(self.num_final_tokens, event.num_final_tokens)
            case Retract():
                self._retract(event)
            case RoundRecord():
                self.rounds.append(event)
            case Completion():
                self.completion = event

    @property
    def generation(self) -> Generation | None:
        """The whole generation; None until it is complete."""
        if self.started is None or self.completion is None:
            return None
        return Generation(self.started, self.chunks, self.completion, self.rounds)

    @property
    def text(self) -> str:
        """The text so far, including what is not final."""
        return "".join(chunk.text for chunk in self.chunks)

    def _retract(self, retract: Retract) -> None:
        tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        size = sum(len(chunk.text.encode()) for chunk in self.chunks)
        if not (
            self.num_final_tokens <= retract.output_token_index <= tokens
            and 0 <= retract.text_byte_offset <= size
        ):
            raise FlyspecError(
                f"the server retracted to {retract.output_token_index} tokens and "
                f"{retract.text_byte_offset} bytes, but had sent {tokens} tokens "
                f"({self.num_final_tokens} of them final) and {size} bytes"
            )
        tokens, size = retract.output_token_index, retract.text_byte_offset
        kept = []
        for chunk in self.chunks:
            kept.append(_cut(chunk, tokens, size))
            tokens = max(0, tokens - len(chunk.token_ids))
            size = max(0, size - len(chunk.text.encode()))
        self.chunks = [chunk for chunk in kept if chunk.token_ids or chunk.text]


def _cut(chunk: Chunk, tokens: int, size: int) -> Chunk:
    """Return the first `tokens` tokens of a chunk and the first `size` bytes of its text.

    They are cut independently, since text may come later than its token.
    """
    text = chunk.text.encode()[:size].decode(errors="ignore")
    if tokens >= len(chunk.token_ids) and text == chunk.text:
        return chunk
    token_texts = tuple(chunk.token_texts[:tokens])
    origins = tuple(chunk.origins[:tokens])
    return replace(
        chunk,
        text=text,
        token_ids=tuple(chunk.token_ids[:tokens]),
        origins=origins,
        token_texts=token_texts if "".join(token_texts) == text else (),
        loose_gaps_nats=tuple(chunk.loose_gaps_nats[: origins.count(Origin.LOOSE)]),
        logprobs=tuple(chunk.logprobs[:tokens]),
    )
